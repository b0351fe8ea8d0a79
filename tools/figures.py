"""Fills in the figures of README.md and docs/recompute.md from benchmarks/results.

``--check`` fails where they differ, and writes nothing.
"""

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
        drops = (one for one in model["ours"] if one["recompute"])  # the others only move
        ours = "; ".join(f"{one['high_gib']:.1f} GiB {one['ratio']:.2f}" for one in drops)
        theirs = "; ".join(
            f"{one['peak_gib']:.1f} GiB {one['ratio']:.2f}"
            for one in model["checkpointed"]
            if one["share"] >= 0.5 and not one["selective"]
        )
        lines.append(f"| {NAMES[name]} | {model['peak_gib']:.1f} GiB | {ours} | {theirs} |")
    return "\n".join(lines) + "\n"


def beside(found: dict[str, Any]) -> str:
    """What the table has no column for."""
    models = found["models"]
    room = ", ".join(f"{model['with_room']['ratio']:.3f}" for model in models.values())
    slowed = [
        f" With a link of {one['bytes_per_second']}/s the first takes {one['ratio']:.2f} at "
        f"{one['high_gib']:.1f} GiB."
        for one in models["gpt"]["slowed"]
    ]
    return f"\nWith room for all, in that order: {room}.{''.join(slowed)}\n"


def weights(found: dict[str, Any]) -> str:
    """The plot of weights.py, and what a step takes that streams weights and activations."""
    cases = found["cases"]
    budgets = []
    for high in (12, 8):
        there = measured(cases, f"{high}")
        times = [f"{one['to_plain']:.2f}" for one in there]
        if there:
            times.append(f"moving alone at least {there[0]['bound_to_plain']:.2f}")
            budgets.append(f"{high} GB {', '.join(times)}")
    return (
        "\n![Step time against the budget, weights in it](benchmarks/results/weights.svg)\n\n"
        f"*LoRA, its frozen weights offloaded, {found['device']}; plain takes "
        f"{cases['plain 8192']['reserved'] / 1e9:.1f} GB. A step in mode allocator, native:\n"
        f"{'; '.join(budgets)}{trained(cases)}. Of `weights.json`'s sources.*\n"
    )


def measured(cases: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """That case in each mode, where it is compared with plain torch."""
    mine = [cases.get(f"{mode} {name}") for mode in ("allocator", "native")]
    return [one for one in mine if one is not None and one["to_plain"]]


def trained(cases: dict[str, Any]) -> str:
    """The same where all is trained and the optimizer's state streams."""
    plain = cases.get("plain full")
    times = ", ".join(f"{one['to_plain']:.2f}" for one in measured(cases, "full 24"))
    if not plain or not times:
        return ""
    return f"; all trained by AdamW, 24 of {plain['reserved'] / 1e9:.1f} GB, {times}"


def filled(text: str, figures: str, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with ``figures`` between the two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + figures + end + after


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def main() -> int:
    again = read("recompute.json")
    figures = {
        "README.md": table(again) + weights(read("weights.json")),
        "docs/recompute.md": table(again) + beside(again),
    }
    check, differ = "--check" in sys.argv[1:], False
    for name, one in figures.items():
        page = ROOT / name
        text = page.read_text()
        made = filled(text, one)
        differ |= made != text
        if not check:
            page.write_text(made)
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
