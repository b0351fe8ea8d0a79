"""torch's side of the core: a table of functions, in a library built on the user's machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagehand_alloc._built import build as _build
from stagehand_alloc._built.compiler import Library
from stagehand_alloc._errors import CompilerError, in_one_line

Use = Callable[[int], str]  # takes the table's address; says why not, or nothing


def load(library: Library, symbol: str, use: Use) -> str:
    """Build the library where it has to be, and give the core its table; "loaded", or why not."""
    try:
        _, loaded = _build.load(library)
    except CompilerError as error:
        return error.what
    except Exception as error:  # as in `hand_over`
        return in_one_line(error)
    return hand_over(loaded, symbol, use) or "loaded"


def hand_over(loaded: Any, symbol: str, use: Use) -> str:
    """Give the core the table that ``symbol`` returns; why it does not take it, or nothing."""
    import ctypes

    try:
        table = getattr(loaded, symbol)
        table.restype, table.argtypes = ctypes.c_void_p, []
        address = table()
        return str(use(address)) if address else "the library has no table."
    except Exception as error:  # of a torch nobody has seen yet: whatever it is, training goes on
        return in_one_line(error)
