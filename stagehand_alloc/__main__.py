"""`python -m stagehand_alloc demo | run SCRIPT | report FILE | advise FILE | doctor [FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stagehand_alloc import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 is a command that could not be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from stagehand_alloc._cli import demo as _demo

        return int(_demo.main(arguments[1:]))
    if arguments[:1] == ["run"]:
        from stagehand_alloc._cli import run as _run

        return _run.main(arguments[1:])
    from stagehand_alloc._cli.ending import ended

    if arguments[:1] == ["report"]:
        from stagehand_alloc._cli import report as _report

        return ended(_report.main, arguments[1:])
    if arguments[:1] == ["advise"]:
        from stagehand_alloc._cli import advise as _advise

        return ended(_advise.main, arguments[1:])
    options = _parse(arguments)
    from stagehand_alloc._cli import doctor as _doctor

    return _doctor.main(options.file, as_json=options.json)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stagehand_alloc", description="Training inside a VRAM budget."
    )
    parser.add_argument("--version", action="version", version=f"stagehand_alloc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="train a small model without a budget, then under one")
    commands.add_parser("run", help="run a training script, unchanged, inside a budget")
    commands.add_parser("report", help="a table and a page of a telemetry file")
    commands.add_parser("advise", help="what other budgets would cost, by such a file")
    doctor = commands.add_parser(
        "doctor",
        help="what is here, how fast the link is, what works and what to change",
        epilog="exit code: 0 a real or the simulated GPU works, 1 neither does, 2 could not run",
    )
    doctor.add_argument("file", nargs="?", help="what pool(telemetry=...) wrote, to learn from")
    doctor.add_argument("--json", action="store_true", help="the same for programs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
