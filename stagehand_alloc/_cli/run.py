"""`python -m stagehand_alloc run --high 20GiB train.py ...`: a script as it is, inside a budget.

The pool is around the forward of each model that the script calls with gradients on. What a script
saves outside of its models, such as of a loss, is outside of the pool.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from stagehand_alloc._errors import AllocatorTooLateError, StagehandError
from stagehand_alloc._settings.config import NODES
from stagehand_alloc._settings.environment import number
from stagehand_alloc._settings.sizes import Size
from stagehand_alloc._settings.sizes import format_bytes as size

if TYPE_CHECKING:
    from stagehand_alloc._step.pool import Pool

_RECOMPUTE: dict[str, bool | str] = {"no": False, NODES: NODES, "yes": True}


def main(arguments: list[str]) -> int:
    """Run the script; its exit code is that of the process. 2: it could not be begun."""
    options = _parse(arguments)
    if not options.module and not Path(options.script).is_file():
        print(f"There is no file {options.script}.", file=sys.stderr)
        return 2
    try:
        pool = _begin(options)
    except StagehandError as error:
        print(error, file=sys.stderr)
        return 2
    from stagehand_alloc._step.attach import Everywhere

    around = Everywhere(pool)
    sys.argv = [options.script, *options.arguments]
    ended = False
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).resolve().parent)
            runpy.run_path(options.script, run_name="__main__")
        ended = True
    except ImportError as error:
        if not _not_found(error):
            raise
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return 1  # all as `python -m` has it
    finally:
        around.remove()
        # That nothing was done says nothing of a script that failed, or was asked for its help.
        if ended or around.entered:
            print(_told(pool, around.entered), file=sys.stderr)
    return 0


def _not_found(error: ImportError) -> bool:
    """Whether runpy found no such module: no more ran than the packages that it would be in."""
    of_runpy = runpy.run_module.__code__.co_filename
    _, *frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and all(frame.filename == of_runpy for frame in frames)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stagehand_alloc run",
        description="Run a training script, unchanged, inside a VRAM budget.",
    )
    parser.add_argument("--high", help="20GiB, 80%%, or a fraction; default: 0.90 of the device")
    parser.add_argument("--low")
    parser.add_argument("--limit")
    parser.add_argument(
        "--mode",
        choices=("native", "allocator", "mempool"),
        help="native, the default: on torch's own allocator; allocator: ours in its place",
    )
    parser.add_argument(
        "--recompute",
        choices=_RECOMPUTE,
        help="drop what is sooner made again: yes, nodes (no module runs twice), or no",
    )
    parser.add_argument("--telemetry", metavar="FILE", help="one JSON line per step")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser.parse_args(arguments)


def _begin(options: argparse.Namespace) -> Pool:
    from stagehand_alloc._books import telemetry as _telemetry
    from stagehand_alloc._step import pool as _pool

    pool = _pool.pool(
        high=_given(options.high),
        low=_given(options.low),
        limit=_given(options.limit),
        mode=options.mode,
        recompute=None if options.recompute is None else _RECOMPUTE[options.recompute],
        # An empty name is that of this folder, and refused as such.
        telemetry=None if options.telemetry is None else os.path.abspath(options.telemetry),
    )
    if (path := pool._config.telemetry_path) is not None:
        # Of this folder, whichever the script goes to: the environment may have named it.
        absolute = os.path.abspath(path)
        pool._config = dataclasses.replace(pool._config, telemetry=absolute)
        _telemetry.writer_of(absolute)  # raises now, and not once the script has loaded its model
    if pool._mode_asked == "allocator":  # or the environment asks for it
        import torch

        from stagehand_alloc._torch_side import install as _install

        try:
            ours = _install.allocator()
        except AllocatorTooLateError as error:
            raise AllocatorTooLateError(
                error.what,
                "Something that Python imports at its start did so, such as a sitecustomize. Leave "
                "out --mode allocator (and STAGEHAND_ALLOC_MODE): native, the default, needs "
                "nothing installed.",
            ) from None
        torch.cuda.memory.change_current_allocator(ours)
    return pool


def _given(text: str | None) -> Size | None:
    return None if text is None else number(text)


def _told(pool: Pool, entered: bool) -> str:
    if not entered:
        return (
            "stagehand_alloc: no module's forward ran with gradients on, so nothing was done.\n"
            "Enter a pool around the forward pass yourself: with stagehand_alloc.pool(...)."
        )
    stats = pool.stats()
    return (
        f"stagehand_alloc: {size(stats.evicted_bytes)} were moved to the host and "
        f"{size(stats.dropped_bytes)} dropped; mapped at most {size(stats.mapped_peak)} of "
        f"{size(stats.high)}; {size(stats.overshoot_bytes)} over."
    )
