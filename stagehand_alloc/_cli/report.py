"""`python -m stagehand_alloc report steps.jsonl`: a table, and a page with pictures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stagehand_alloc._books import findings as _findings
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books.runs import Run, Telemetry
from stagehand_alloc._books.table import table
from stagehand_alloc._errors import StagehandError, TelemetryError
from stagehand_alloc._pictures.paths import require_writable


def main(arguments: Sequence[str]) -> None:
    """Print the table and write the page. Raises StagehandError where that cannot be."""
    options = _parse(arguments)
    path = None if options.no_html else _page_path(options)
    telemetry = _runs.read(options.files)
    print(json.dumps(as_json(telemetry), indent=1) if options.json else text(telemetry))
    if path is not None:
        _page(telemetry, path, asked=options.html is not None)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stagehand_alloc report",
        description="What a run did with its memory, what limited it, and what to change.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what pool(telemetry=...) wrote")
    page = parser.add_mutually_exclusive_group()
    page.add_argument(
        "--html", metavar="PAGE", help="the page; default: FILE with .html at its end"
    )
    page.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of the table")
    return parser.parse_args(arguments)


def text(telemetry: Telemetry) -> str:
    """The table of each run, what limited it, and what to change."""
    parts = []
    for name, run in _runs.by_name(telemetry.runs):
        told = [f"{found.what}\n  -> {found.todo}" for found in _findings.find(run)]
        parts.append("\n".join([*([name] if name else []), table(run), "", *told]))
    across = [f"{found.what}\n  -> {found.todo}" for found in _findings.across(telemetry.runs)]
    return "\n\n".join([*parts, *across, *telemetry.notes()])


def as_json(telemetry: Telemetry) -> dict[str, Any]:
    """For programs: of each run its totals and findings; sizes in bytes."""
    return {
        "runs": [_run_json(run) for run in telemetry.runs],
        "findings": [_finding_json(one) for one in _findings.across(telemetry.runs)],
        "skipped": [dataclasses.asdict(one) for one in telemetry.skipped],
        "left_out": [dataclasses.asdict(one) for one in telemetry.left_out],
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "file": run.file,
        "rank": run.rank,
        "device": run.device,
        "steps": len(run.steps),
        "high": int(run.last("high")),
        "mapped_peak": int(run.most("mapped_peak")),
        "step_ms": run.step_ms(),
        "waits_ms": _findings.waits_ms(run),
        "moved_bytes_a_step": int(run.typical("spill_bytes")),
        "dropped_bytes_a_step": int(run.typical("dropped_bytes")),
        "weights_bytes": int(run.most("weights_bytes")),
        "weights_bytes_a_step": int(run.typical("weights_loaded_bytes")),
        "weights_waits_ms": run.typical("weights_wait_ms"),
        "findings": [_finding_json(one) for one in _findings.find(run)],
    }


def _finding_json(found: _findings.Finding) -> dict[str, str]:
    return {**dataclasses.asdict(found), "level": found.level.value}


def _page_path(options: argparse.Namespace) -> Path:
    """Where the page goes. Raises TelemetryError where it cannot."""
    path = Path(options.html or Path(options.files[0]).with_suffix(".html"))
    if any(path.resolve() == Path(one).resolve() for one in options.files):
        raise TelemetryError(
            f"The page {path} would take the place of the telemetry it is of.",
            "Name another file with --html.",
        )
    if options.html is not None:
        require_writable("page", options.html)  # a Path has no separator at its end
    return path


def _page(telemetry: Telemetry, path: Path, asked: bool) -> None:
    from stagehand_alloc._pictures import page as _page

    if not asked:
        try:
            _refuse_others(path, _page.MARK)
            written = _page.write(telemetry)
        except StagehandError as error:  # nobody asked for the page
            print(f"No page: {error.what} {error.todo}", file=sys.stderr)
            return
    else:
        written = _page.write(telemetry)
    try:
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise TelemetryError(
            f"The page {path} cannot be written: {error.strerror}.",
            "Name another one with --html, or none with --no-html.",
        ) from error
    print(f"page: {path}", file=sys.stderr)


def _refuse_others(path: Path, mark: str) -> None:
    """A page of that name that is not ours is somebody's work."""
    if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
        raise TelemetryError(f"{path} is there and is no page of ours.", "Name one with --html.")
