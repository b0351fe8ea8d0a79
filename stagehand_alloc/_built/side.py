"""torch's side of the core: a table of functions, in a library built on the user's machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagehand_alloc._built import build as _build
from stagehand_alloc._built.compiler import Library
from stagehand_alloc._errors import CompilerError, in_one_line
from stagehand_alloc._guarded import Once

Use = Callable[[int], str]  # takes the table's address; says why not, or nothing


def hand_over(library: Any, symbol: str, use: Use) -> str:
    """Give the core the table that ``symbol`` returns; why it does not take it, or nothing."""
    import ctypes

    try:
        table = getattr(library, symbol)
        table.restype, table.argtypes = ctypes.c_void_p, []
        address = table()
        return str(use(address)) if address else "the library has no table."
    except Exception as error:  # of a torch nobody has seen yet: whatever it is, training goes on
        return in_one_line(error)


class Side(Once[str]):
    """A library that is tried once; where it cannot be had, training goes on without."""

    def __init__(self, library: Library, symbol: str, use: Use) -> None:
        super().__init__()
        self._library = library
        self._symbol = symbol
        self._use = use

    def load(self) -> str:
        """ "loaded", or why not; the first call decides. May take as long as a compiler does."""
        return self.get(self._try)

    def _try(self) -> str:
        try:
            _, loaded = _build.load(self._library)
        except CompilerError as error:
            return error.what
        except Exception as error:  # as in `hand_over`
            return in_one_line(error)
        return hand_over(loaded, self._symbol, self._use) or "loaded"
