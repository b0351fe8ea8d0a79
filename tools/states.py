"""Write docs/states.md from the tables of native/core/states.hpp; `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "native" / "core" / "states.hpp"
PAGE = ROOT / "docs" / "states.md"
KINDS = {"BLOCK": "A block", "RECORD": "A record", "COPY": "A host copy"}


def rows(macro: str, text: str) -> list[list[str]]:
    """The X(...) entries of one macro, each as its words and its text."""
    body = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*\n)", text)
    assert body is not None, macro
    entries = re.findall(r"X\((.*?\"[^\"]*\")\)", body.group(1))
    return [
        [
            part.strip().strip('"')
            for part in entry.split(",", entry.count(",", 0, entry.index('"')))
        ]
        for entry in entries
    ]


def page() -> str:
    text = SOURCE.read_text()
    lines = [
        "# States",
        "",
        "Made by `python tools/states.py` from `native/core/states.hpp`,",
        "whose `move_to` is the only writer of each and checks the table.",
        "",
    ]
    for kind, title in KINDS.items():
        lines += [f"## {title}", "", "| state | |", "|---|---|"]
        lines += [f"| {name} | {what} |" for name, what in rows(f"STAGEHAND_{kind}_STATES", text)]
        lines += ["", "| from | to | when |", "|---|---|---|"]
        lines += [f"| {a} | {b} | {why} |" for a, b, why in rows(f"STAGEHAND_{kind}_MOVES", text)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    made = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != made)
    PAGE.write_text(made)
