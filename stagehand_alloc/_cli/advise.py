"""`python -m stagehand_alloc advise steps.jsonl`: what other budgets would cost that run."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from stagehand_alloc._books import advice as _advice
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books.advice import Link
from stagehand_alloc._books.runs import Run
from stagehand_alloc._cli import link as _rates
from stagehand_alloc._errors import DriverError, SizeError, TelemetryError
from stagehand_alloc._settings.environment import number
from stagehand_alloc._settings.sizes import parse_size


def main(arguments: Sequence[str]) -> None:
    """Print what each budget would cost. Raises StagehandError where the files say too little."""
    options = _parse(arguments)
    telemetry = _runs.read(options.files)
    highs = [_size(text, "--high") for text in _listed(options.high)]
    here = functools.cache(_measured_here)  # once for all runs
    told = [
        (name, run, _advice.advise(run, highs, _link_of(run, options.link, here)))
        for name, run in _runs.by_name(telemetry.runs)
    ]
    if options.json:
        print(json.dumps([_json(run, advice) for _, run, advice in told], indent=1))
    else:
        parts = [f"{name}\n{_advice.text(one)}".lstrip() for name, _, one in told]
        print("\n\n".join([*parts, *telemetry.notes()]))


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
        help="what the link carries: 25GB/s, 25GB/s,24GB/s for both ways, or a file of `doctor "
        "--json`; default: as the run measured, else as this machine's GPU does",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; bytes and milliseconds")
    return parser.parse_args(arguments)


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [one for one in text.split(",") if one.strip()]


def _size(text: str, name: str) -> int:
    """Bytes: a text with a unit, or the number itself. Raises SizeError."""
    return parse_size(number(text.strip()), None, name)


def _link_of(run: Run, given: str | None, here: Callable[[], list[_rates.Rates]]) -> Link | None:
    """Of its device: as given, or as measured now where the run measured none; None as it did."""
    if given is None:
        silent = run.shape is not None and run.shape.d2h_rate <= 0
        return _measured(run.device, here()) if silent else None
    if Path(given).is_file():
        return _link_in(Path(given), run.device)
    return _link(given)


def _measured_here() -> list[_rates.Rates]:
    """Empty where there is no GPU."""
    try:
        return _rates.measure(simulated=False)
    except DriverError:
        return []  # the error that follows says what to give


def _measured(device: int, found: list[_rates.Rates]) -> Link | None:
    """By the GPU of that number; None where there is none."""
    if not found:
        return None
    here = next((one for one in found if one.device == device), found[0])
    return Link(here.to_host, here.to_device, "as measured on this machine now")


def _link_in(path: Path, device: int) -> Link:
    """What `doctor --json` measured, of that device or the only one. Raises TelemetryError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rates = {one["device"]: (one["to_host"], one["to_device"]) for one in found["links"]}
        here = rates[device] if device in rates or len(rates) > 1 else next(iter(rates.values()))
        out, back = (float(one) for one in here)
        if found["simulated"] or not (0 < out < math.inf and 0 < back < math.inf):
            raise ValueError
    except (OSError, LookupError, TypeError, ValueError, RecursionError, StopIteration) as error:
        raise TelemetryError(
            f"--link={path} says nothing of a real link of device {device}.",
            "Write it where the run trains: python -m stagehand_alloc doctor --json > link.json",
        ) from error
    return Link(out, back, f"as {path} says")


def _link(text: str) -> Link:
    """ "25GB/s", or two of them: to the host, and back. Raises SizeError."""
    rates = [_size(one.strip().removesuffix("/s"), "--link") for one in _listed(text)]
    if not 1 <= len(rates) <= 2:
        raise SizeError(
            f"--link={text} is {len(rates)} rates.",
            "Give one for both directions, or two: to the host, and back.",
        )
    return Link(rates[0], rates[-1])


def _json(run: Run, advice: _advice.Advice) -> dict[str, object]:
    found = dataclasses.asdict(advice)
    for one, budget in zip(found["budgets"], advice.budgets, strict=True):
        one["settings"] = budget.settings()
    return {"file": run.file, "rank": run.rank, "device": run.device, **found}
