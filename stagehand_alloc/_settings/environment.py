"""Settings from environment variables: for launchers, and scripts that are not one's own.

``STAGEHAND_ALLOC_HIGH=20GiB`` is what a pool takes where neither its arguments nor its config say
anything. `_settings.config` has what is in a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.config import NODES, Config, check_mode
from stagehand_alloc._settings.sizes import Size, read_size, shown
from stagehand_alloc._tell import warn_once

PREFIX = "STAGEHAND_ALLOC_"
_NAMES = ("HIGH", "LOW", "LIMIT", "MODE", "RECOMPUTE", "TELEMETRY", "BUILD")
_RECOMPUTE: dict[str, bool | str] = {
    **dict.fromkeys(("0", "no", "false", "off"), False),
    **dict.fromkeys(("1", "yes", "true", "on"), True),
    NODES: NODES,
}


def filled(config: Config) -> Config:
    """``config``, with what it leaves open as the environment says. Raises what Config does.

    A variable that begins like ours and is none is warned of, once.
    """
    _warn_of_unknown()
    said: dict[str, Any] = {
        **{name: _size(name) for name in ("high", "low", "limit")},
        "mode": _mode(),
        "telemetry": _read("telemetry")[1],
        "recompute": _recompute(),
    }
    open_ = {k: v for k, v in said.items() if v is not None and getattr(config, k) is None}
    return dataclasses.replace(config, **open_) if open_ else config


def _warn_of_unknown() -> None:
    known = [PREFIX + name for name in _NAMES]
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0)[0]
            warn_once(
                f"The environment sets {shown(variable)}, which means nothing here.\n"
                f"Did you mean {near}? The others: {', '.join(k for k in known if k != near)}."
            )


def _size(name: str) -> Size | None:
    variable, text = _read(name)
    return None if text is None else read_size(number(text), variable)


def _mode() -> str | None:
    variable, found = _read("mode")
    return check_mode(found, f"{variable}={found}: ")


def _recompute() -> bool | str | None:
    variable, found = _read("recompute")
    if found is None:
        return None
    if found.lower() not in _RECOMPUTE:
        raise ConfigError(
            f"{variable}={shown(found)} says nothing of recompute.",
            f'Set it to "yes", "no" or "{NODES}", or unset it.',
        )
    return _RECOMPUTE[found.lower()]


def number(given: str) -> Size:
    """A text as `pool` reads sizes: "20GiB", or a number, of bytes or a fraction."""
    if given.isdecimal():
        return int(given)
    try:
        return float(given)
    except ValueError:
        return given


def _read(name: str) -> tuple[str, str | None]:
    variable = PREFIX + name.upper()
    return variable, os.environ.get(variable, "").strip() or None
