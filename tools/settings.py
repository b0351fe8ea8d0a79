"""Fills in the tables of docs/settings.md from the code; ``--check``: fails where they differ."""

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
OUTER_BEGIN = "<!-- stagehand block: python tools/settings.py -->\n"
OUTER_END = "<!-- end of stagehand block -->"


def table() -> str:
    """One row a setting: its key, v0's, what it is without being set, and what it says."""
    lines = ["| key | in Stagehand | default | what it is |", "|---|---|---|---|"]
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


def outer_table() -> str:
    """One row a key of the `stagehand` block that is no setting: what is done instead."""
    lines = ["| key | what is done instead |", "|---|---|"]
    for one in ast.parse((SETTINGS / "outer.py").read_text()).body:
        if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "WITHOUT_EFFECT":
            assert one.value is not None
            lines += [f"| `{k}` | {why} |" for k, (_, why) in ast.literal_eval(one.value).items()]
    return "\n".join(lines) + "\n"


def class_named(name: str, tree: ast.Module) -> ast.ClassDef:
    """The class of that name at the top of a file."""
    return next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)


def aliases(tree: ast.Module) -> dict[str, str]:
    """By key, what the Stagehands call it, where that is another name."""
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
    made = filled(made, outer_table(), OUTER_BEGIN, OUTER_END)
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    page.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
