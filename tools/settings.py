"""Fills in the table of docs/settings.md from `Config`; ``--check``: fails where they differ."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

from figures import filled

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "stagehand_alloc" / "_settings"
BEGIN = "<!-- settings: python tools/settings.py -->\n"
END = "<!-- end of settings -->"


def table() -> str:
    """One row a setting: its key, v0's, what it is without being set, and what it says."""
    lines = ["| key | in v0 | default | what it is |", "|---|---|---|---|"]
    body = class_named("Config", ast.parse((SETTINGS / "config.py").read_text())).body
    old = aliases(ast.parse((SETTINGS / "load.py").read_text()))
    for one, text in itertools.pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(one.target, ast.Name)
            assert one.value is not None
            assert isinstance(text.value, ast.Constant)
            key, default = one.target.id, ast.literal_eval(one.value)
            shown = "" if default is None else f"`{default!r}`"
            says = " ".join(str(text.value.value).split())
            lines.append(f"| `{key}` | {old.get(key, '')} | {shown} | {says} |")
    return "\n".join(lines) + "\n"


def class_named(name: str, tree: ast.Module) -> ast.ClassDef:
    """The class of that name at the top of a file."""
    return next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)


def aliases(tree: ast.Module) -> dict[str, str]:
    """By key, what Activation Stagehand v0 calls it, where that is another name."""
    found = {}
    for one in tree.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if one.target.id == "ALIASES" and isinstance(one.value, ast.Dict):
            for old, new in zip(one.value.keys, one.value.values, strict=True):
                assert old is not None
                assert isinstance(new, ast.Tuple)
                found[ast.literal_eval(new.elts[0])] = f"`{ast.literal_eval(old)}`"
    return found


def main() -> int:
    page = ROOT / "docs" / "settings.md"
    text = page.read_text()
    made = filled(text, table(), BEGIN, END)
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    page.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
