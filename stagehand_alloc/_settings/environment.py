"""Settings from environment variables: for launchers, and scripts that are not one's own.

``STAGEHAND_ALLOC_HIGH=20GiB`` is what a pool takes where neither its arguments nor its config say
anything. `_settings.config` has what is in a file.
"""

from __future__ import annotations

import os

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.config import NODES, Size, parse_size, shown

PREFIX = "STAGEHAND_ALLOC_"
_RECOMPUTE: dict[str, bool | str] = {
    **dict.fromkeys(("0", "no", "false", "off"), False),
    **dict.fromkeys(("1", "yes", "true", "on"), True),
    NODES: NODES,
}


def size(name: str) -> Size | None:
    """The size in ``STAGEHAND_ALLOC_<NAME>``; None where it is not set. Raises SizeError."""
    variable, text = _read(name)
    if text is None:
        return None
    found = number(text)
    parse_size(found, 1 << 40, variable)  # its bounds need the device
    return found


def text(name: str) -> str | None:
    """What ``STAGEHAND_ALLOC_<NAME>`` says; None where it is not set or empty."""
    return _read(name)[1]


def recompute() -> bool | str | None:
    """``STAGEHAND_ALLOC_RECOMPUTE``: yes, no or nodes; None where not set. Raises ConfigError."""
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
