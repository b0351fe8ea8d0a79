"""`python -m stagehand_alloc advise steps.jsonl`: what other budgets would cost that run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from stagehand_alloc._books import advice as _advice
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books.advice import Link
from stagehand_alloc._errors import SizeError, StagehandError
from stagehand_alloc._settings.sizes import parse_size


def main(arguments: Sequence[str]) -> int:
    """Print what each budget would cost; 2 where the files say too little."""
    options = _parse(arguments)
    try:
        telemetry = _runs.read(options.files)
        highs = [parse_size(text.strip(), None, "--high") for text in _listed(options.high)]
        link = None if options.link is None else _link(options.link)
        told = [
            (name, run, _advice.advise(run, highs, link))
            for name, run in _runs.by_name(telemetry.runs)
        ]
        if options.json:
            print(json.dumps([_json(run, advice) for _, run, advice in told], indent=1))
        else:
            parts = [f"{name}\n{_advice.text(one)}".lstrip() for name, _, one in told]
            print("\n\n".join([*parts, *map(str, telemetry.skipped)]))
    except StagehandError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        return 0
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stagehand_alloc advise",
        description="What other budgets would cost, by the telemetry of a run without one.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what pool(telemetry=...) wrote")
    parser.add_argument("--high", help="20GiB,16GiB; default: 90 to 50 %% of what a step needs")
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="what the link carries: 25GB/s, or 25GB/s,24GB/s for both ways; default: as measured",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; bytes and milliseconds")
    return parser.parse_args(arguments)


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [one for one in text.split(",") if one.strip()]


def _link(text: str) -> Link:
    """ "25GB/s", or two of them: to the host, and back. Raises SizeError."""
    rates = [parse_size(one.strip().removesuffix("/s"), None, "--link") for one in _listed(text)]
    if not 1 <= len(rates) <= 2:
        raise SizeError(
            f"--link={text} is {len(rates)} rates.",
            "Give one for both directions, or two: to the host, and back.",
        )
    return Link(rates[0], rates[-1])


def _json(run: _runs.Run, advice: _advice.Advice) -> dict[str, object]:
    found = dataclasses.asdict(advice)
    for one, budget in zip(found["budgets"], advice.budgets, strict=True):
        one["settings"] = budget.settings()
    return {"file": run.file, "rank": run.rank, "device": run.device, **found}
