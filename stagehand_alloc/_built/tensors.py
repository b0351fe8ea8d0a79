"""The tensor library: pack and unpack without Python in between.

It is for every mode, and built on first use against the installed torch. Where it cannot be had,
pack and unpack ask torch through Python, which takes about five times as long; nothing here raises.
"""

from __future__ import annotations

import threading
from pathlib import Path

from stagehand_alloc._built import build as _build
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._errors import CompilerError, in_one_line
from stagehand_alloc._extension import native

LIBRARY = _recipe.Library(
    name="tensors",
    words="tensor library",
    source=Path("torch_hook") / "tensors.cpp",
    link=("torch_python", "torch_cpu", "c10"),
    seconds=15,
    python=True,
)

_lock = threading.Lock()
_state: str | None = None  # what the first try came to; a library once loaded stays


def load(allowed: bool = True) -> str:
    """Use the library in this process from here on; the first call that may decides.

    "loaded", or why not. May take as long as a compiler does.
    """
    global _state
    if not allowed or _build.forbidden():
        return _state or "forbidden"
    with _lock:
        if _state is None:
            _state = _load()
        return _state


def outlook() -> str:
    """What `load` would find, in words; nothing is built or loaded. Raises CompilerError."""
    if _build.forbidden():
        return f"forbidden, {_build.FORBID}=0 is set: pack and unpack take longer"
    path = _build.kept(LIBRARY)
    if path is not None:
        return f"built, {path}"
    return f"not built yet; built on first use, about {LIBRARY.seconds} s"


def _load() -> str:
    import ctypes

    import torch

    try:
        _, loaded = _build.load(LIBRARY)
        table = loaded.stagehand_tensor_side
        table.restype, table.argtypes = ctypes.c_void_p, []
        with torch.inference_mode(False):  # a tensor of that mode has no version
            return native.use_tensor_side(table()) or "loaded"
    except CompilerError as error:
        return error.what
    except Exception as error:  # of a torch nobody has seen yet: whatever it is, training goes on
        return in_one_line(error)
