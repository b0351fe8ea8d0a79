"""The tensor library: pack and unpack without Python in between.

It is for every mode, and built on first use against the installed torch. Where it cannot be had,
pack and unpack ask torch through Python, which takes about five times as long; nothing here raises.
"""

from __future__ import annotations

from pathlib import Path

from stagehand_alloc._built import build as _build
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import side as _side
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Once

LIBRARY = _recipe.Library(
    name="tensors",
    words="tensor library",
    source=Path("torch_hook") / "tensors.cpp",
    link=("torch_python", "torch_cpu", "c10"),
    seconds=15,
    python=True,
)

_loaded = Once[str]()  # what the first try came to


def load(allowed: bool = True) -> str:
    """Use the library in this process from here on; the first call that may decides.

    "loaded", or why not. May take as long as a compiler does.
    """
    if not allowed or _build.forbidden():
        return _loaded.found or "forbidden"
    return _loaded.get(_load)


def _load() -> str:
    import torch

    with torch.inference_mode(False):  # a tensor of that mode has no version
        return _side.load(LIBRARY, "stagehand_tensor_side", native.use_tensor_side)


def outlook() -> str:
    """What `load` would find, in words; nothing is built or loaded. Raises CompilerError."""
    return _build.outlook(LIBRARY, ": pack and unpack take longer")
