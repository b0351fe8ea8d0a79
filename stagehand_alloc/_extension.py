"""The one door to the extension module: ``native``, typed as `_native.pyi` says.

It is loaded at the first use, not at import. Raises NotBuiltError where it is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import NotBuiltError

if TYPE_CHECKING:
    from stagehand_alloc import _native

    native = _native
else:

    class _Native:
        def __getattr__(self, name: str) -> Any:
            return getattr(_loaded(), name)

    native = _Native()


def _loaded() -> Any:
    try:
        from stagehand_alloc import _native
    except ImportError as error:
        raise NotBuiltError(
            f"The extension stagehand_alloc._native cannot be loaded: {error}.",
            "Build it: `make setup` in the source folder, or `pip install stagehand_alloc`.",
        ) from error
    return _native
