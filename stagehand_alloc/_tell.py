"""What users are told while training goes on: warnings of one class, and one logger.

A warning names the line of the user's that led to it, and the rank where there are several.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

_PACKAGE = str(Path(__file__).parent) + os.sep
_TORCH = os.sep + "torch" + os.sep

logger = logging.getLogger("stagehand_alloc")


class StagehandWarning(RuntimeWarning):
    """Training goes on, but not as it was meant to: line one says how, line two what to do."""


def warn(text: str) -> None:
    """A StagehandWarning. Whoever calls says it once; `warn_once` sees to that."""
    warnings.warn(_of_rank() + text, StagehandWarning, stacklevel=_users_level())


def slow(text: str) -> None:
    """Something begins that takes seconds; said by one process of a machine, through the logger.

    A logger that nobody has set up writes it to stderr.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("stagehand_alloc: %s.", text)


class _Once:
    """Says each text once in a process."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self._say(text)


warn_once = _Once(warn)
slow_once = _Once(slow)


def _of_rank() -> str:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"[rank {os.environ.get('RANK', '?')}] " if several else ""


def _users_level() -> int:
    """``stacklevel`` of the user's own line, seen from `warn`.

    That is the innermost frame outside of Python's library and of what is installed; where there is
    none, the innermost that is neither ours nor torch's.
    """
    outside_ours = 0
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_installed()):
            return level
        if not outside_ours and not name.startswith(_PACKAGE) and _TORCH not in name:
            outside_ours = level
        level, frame = level + 1, frame.f_back
    return outside_ours or level


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return (_PACKAGE, "<frozen ", *(path + os.sep for path in sorted(folders)))
