"""The recipe library: saved tensors that their autograd node can make again need no copy.

Built on first use against the installed torch, for pools with ``recompute``. Where it cannot be
had, everything is moved as without it; nothing here raises.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from stagehand_alloc import _build, _driver, _recipe, _tensors
from stagehand_alloc._errors import CompilerError

LIBRARY = _recipe.Library(
    name="recipes",
    words="recipe library",
    source=Path("torch_hook") / "recipes.cpp",
    link=("torch_python", "torch_cpu", "c10"),
    seconds=25,
    python=True,
)

_lock = threading.Lock()
_state: str | None = None  # what the first try came to; a library once loaded stays


def load(allowed: bool = True) -> str:
    """Use the library in this process from here on; the first call that may decides.

    "loaded", or why not. May take as long as a compiler does.
    """
    global _state
    tensors = _tensors.load(allowed)
    if not allowed or tensors != "loaded":
        return _state or tensors
    with _lock:
        if _state is None:
            _state = _load()
        return _state


def outlook() -> str:
    """What `load` would find, in words; nothing is built or loaded. Raises CompilerError."""
    if _build.forbidden():
        return f"forbidden, {_build.FORBID}=0 is set: nothing is made again"
    path = _build.kept(LIBRARY)
    if path is not None:
        return f"built, {path}"
    return f"not built yet; built on first use, about {LIBRARY.seconds} s"


def _load() -> str:
    try:
        _, loaded = _build.load(LIBRARY)
        table = loaded.stagehand_recipe_side
        table.restype, table.argtypes = ctypes.c_void_p, []
        return _driver.native().use_recipe_side(table()) or "loaded"
    except CompilerError as error:
        return error.what
    except Exception as error:  # of a torch nobody has seen yet: whatever it is, training goes on
        return " ".join(str(error).splitlines()) or type(error).__name__
