"""`python -m stagehand_alloc demo | run SCRIPT | report FILE | doctor [FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stagehand_alloc import __version__
from stagehand_alloc._errors import StagehandError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 is a command that could not be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from stagehand_alloc._cli import demo as _demo

        return int(_demo.main(arguments[1:]))
    if arguments[:1] == ["run"]:
        from stagehand_alloc._cli import run as _run

        return _run.main(arguments[1:])
    options = _parse(arguments)
    if options.command == "report":
        return _report(options.file)
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
    report = commands.add_parser("report", help="print a table of a telemetry file")
    report.add_argument("file", help="what pool(telemetry=...) wrote")
    doctor = commands.add_parser(
        "doctor",
        help="what is here, how fast the link is, what works and what to change",
        epilog="exit code: 0 a real or the simulated GPU works, 1 neither does, 2 could not run",
    )
    doctor.add_argument("file", nargs="?", help="what pool(telemetry=...) wrote, to learn from")
    doctor.add_argument("--json", action="store_true", help="the same for programs")
    return parser.parse_args(arguments)


def _report(path: str) -> int:
    from stagehand_alloc._books import telemetry as _telemetry

    try:
        print(_telemetry.report(_telemetry.read_steps(path)))
    except StagehandError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
