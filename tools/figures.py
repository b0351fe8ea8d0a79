"""Fills in README.md's figures from benchmarks/results; ``--check``: fails where they differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- figures: python tools/figures.py -->\n"
END = "<!-- end of figures -->"
NAMES = {
    "gpt": "GPT, width 4096, sequence 8192",
    "llama": "Llama, 16 layers, sequence 4096",
    "vit": "ViT-B/16, batch 256, autocast",
}


def table(found: dict[str, Any]) -> str:
    """What recompute=model takes at each budget, beside checkpoints on half and all blocks."""
    titles = (
        found["device"],
        "plain needs",
        "`recompute=model`: `high`, time",
        "torch's checkpoint",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---|"]
    for name, model in found["models"].items():
        ours = "; ".join(f"{one['high_gib']:.1f} GiB {one['ratio']:.2f}" for one in model["ours"])
        theirs = "; ".join(
            f"{one['peak_gib']:.1f} GiB {one['ratio']:.2f}"
            for one in model["checkpointed"]
            if one["share"] >= 0.5 and not one["selective"]
        )
        lines.append(f"| {NAMES[name]} | {model['peak_gib']:.1f} GiB | {ours} | {theirs} |")
    return "\n".join(lines) + "\n"


def filled(text: str, figures: str, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with ``figures`` between the two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + figures + end + after


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    made = filled(text, table(json.loads((RESULTS / "recompute.json").read_text())))
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
