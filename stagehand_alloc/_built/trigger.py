"""The trigger library: lets the engine act on torch's own free-list misses.

It is for the modes without the process allocator. Where it cannot be had, they act at the next pack
or unpack instead; nothing here raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stagehand_alloc._built import build as _build
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import side as _side
from stagehand_alloc._errors import CompilerError
from stagehand_alloc._guarded import Once
from stagehand_alloc._settings.config import Config
from stagehand_alloc._tell import warn_once

State = Literal[
    "loaded", "forbidden", "no compiler", "build failed", "self-test failed", "not needed"
]

# Releases whose allocator's every function is handed on (torch_hook/requests.hpp). Not previews of
# them: one may lack functions that its release has.
_TELLS = re.compile(r"2\.1[1-4]\.\d+(\+.*)?")


def tells_requests(version: str) -> tuple[str, ...]:
    """What makes this torch tell how much a request asks for; empty where it is not known to us."""
    return ("STAGEHAND_TELLS_REQUESTS=1",) if _TELLS.fullmatch(version) else ()


LIBRARY = _recipe.Library(
    name="trigger",
    words="trigger library",
    source=Path("torch_hook") / "trigger.cpp",
    link=("torch_python", "torch_cpu", "torch_cuda", "c10_cuda", "c10"),
    seconds=30,
    cuda=True,
    python=True,
    defines=tells_requests,
)
_FORBIDDEN_BY_CONFIG = "build_trigger is False"
_REPORT = "Update stagehand_alloc, or report it with the versions of torch and of stagehand_alloc."
_QUIET = "build_trigger=False in the config keeps this quiet."


@dataclass(frozen=True)
class Trigger:
    """Whether the trigger library is in use; ``why`` not, in one line, empty where it is."""

    path: Path | None
    state: State
    why: str


NOT_NEEDED = Trigger(None, "not needed", "the process allocator sees every allocation")

_loaded = Once[tuple[Trigger, str]]()  # what loading came to, and what the user can do about it


def load(
    config: Config,
    *,
    library: _recipe.Library = LIBRARY,
    cuda: str | None = None,
    use: _side.Use,
) -> Trigger:
    """The trigger library of this process, built and loaded by the first call that may.

    ``use`` takes the library's table. ``library`` and ``cuda`` (torch's version of it) are the
    real ones unless they are given. May take as long as a compiler does.
    """
    if why := _forbidden(config):
        return Trigger(None, "forbidden", why)
    found, todo = _loaded.get(lambda: _load(library, cuda or _torch_cuda(), use))
    if todo:
        warn_once(
            f"The trigger library is not in use; acting at the next pack or unpack instead: "
            f"{found.why}\n{todo} {_QUIET}"
        )
    return found


def outlook() -> str:
    """What `load` would find, in words; nothing is built or loaded. Raises CompilerError."""
    if not _build.forbidden() and not _torch_cuda():
        return f"not needed, {_no_cuda()}"
    return _build.outlook(LIBRARY)


def needed() -> tuple[_recipe.Library, ...]:
    """What `load` builds: nothing where torch has no CUDA."""
    return (LIBRARY,) if _torch_cuda() else ()


def _load(library: _recipe.Library, cuda: str | None, use: _side.Use) -> tuple[Trigger, str]:
    """What was found, and what the user can do about it; empty where nothing is amiss."""
    if not cuda:
        return Trigger(None, "not needed", _no_cuda()), ""
    try:
        if _recipe.find_compiler() is None:
            why = "no C++ compiler was found."
            return Trigger(None, "no compiler", why), _recipe.INSTALL_COMPILER
        path, loaded = _build.load(library)
    except CompilerError as error:
        return Trigger(None, "build failed", error.what), error.todo
    if why := _side.hand_over(loaded, "stagehand_torch_side", use):
        return Trigger(path, "self-test failed", why), _REPORT
    return Trigger(path, "loaded", ""), ""


def _forbidden(config: Config) -> str:
    if not config.build_trigger:
        return _FORBIDDEN_BY_CONFIG
    return f"{_build.FORBID}=0 is set" if _build.forbidden() else ""


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _no_cuda() -> str:
    import torch

    return f"torch {torch.__version__} was built without CUDA"
