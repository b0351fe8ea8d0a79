"""The storage library: takes the memory of a storage away, and gives it memory again.

It is for offloaded weights, in every mode, and built on first use against the installed torch.
There is nothing that stands in for it: without it nothing is offloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagehand_alloc._built import build as _build
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._errors import CompilerError, OffloadError
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Once

LIBRARY = _recipe.Library(
    name="storage",
    words="storage library",
    source=Path("torch_hook") / "storage.cpp",
    link=("torch_python", "torch_cpu", "c10"),
    seconds=20,
    python=True,
)

_loaded = Once[Any]()


def load() -> None:
    """Use the library in this process from here on. May take as long as a compiler does.

    Raises OffloadError where it cannot be built, or where the installed torch fails its trial.
    """
    _loaded.get(_load)


def _load() -> Any:
    try:
        _, library = _build.load(LIBRARY)
    except CompilerError as error:
        raise OffloadError(f"Weights cannot be offloaded: {error.what}", error.todo) from error
    if why := _try_out(library):
        raise OffloadError(
            f"Weights cannot be offloaded with this torch: {why}.",
            "Update stagehand_alloc, or report it with the versions of torch and of "
            "stagehand_alloc. Activations are held to the budget as ever.",
        )
    return library


def _try_out(library: Any) -> str:
    """Why it is not used; empty where it is from here on."""
    import ctypes

    import torch

    with torch.inference_mode(False):
        library.stagehand_storage_trial.restype = ctypes.c_char_p
        if found := library.stagehand_storage_trial():
            return str(found.decode())
    library.stagehand_storage_side.restype = ctypes.c_void_p
    return native.use_storage_side(library.stagehand_storage_side())
