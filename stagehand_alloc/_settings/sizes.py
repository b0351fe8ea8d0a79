"""Sizes as people write them, read once: bytes, or a share of something.

`read_size` turns what was given into an `Amount`; `in_bytes` needs to know of how much.
"""

from __future__ import annotations

import numbers
import re
from typing import Any, TypeAlias

from stagehand_alloc._errors import ConfigError, SizeError

MIB = 1 << 20
UNLIMITED = 1 << 62  # the core's "no watermark" is above this
LEAST_PIECE = 64 << 10  # below it a copy costs the same however small
LEAST_RATE = 10 * 1000**2  # per second: below it a step takes minutes, and looks as if it hung

Size: TypeAlias = int | float | str
"""Bytes, a text with a unit ("20GiB", "20GB"), or a fraction of device memory: 0.8, "80%"."""

Amount: TypeAlias = int | float
"""A size that was read: bytes, an int, or a share in (0, 1], a float."""

_UNITS = {
    "b": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)},
    **{f"{p}i{b}": 1024**n for n, p in enumerate("kmgt", 1) for b in ("b", "")},
}
_LONGEST_TEXT = 64  # of a size: Python itself refuses numbers of thousands of digits
_LEAST_NUMBER = 1024  # bytes without a unit: fewer are meant as something else
_SIZE_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)
_PER_SECOND = re.compile(r"\s*/\s*s\s*$", re.IGNORECASE)
_HOW_TO_SIZE = (
    'Write bytes (an int), a text like "20GiB" or "512MB", or a fraction in (0, 1] or "80%".'
)
_HOW_TO_BYTES = 'Write bytes (an int), or a text like "20GiB" or "512MB".'


def format_bytes(count: int) -> str:
    """``count`` bytes for people, such as "16.00 GiB"."""
    if count >= UNLIMITED:
        return "unlimited"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def read_size(
    value: Size, name: str = "size", *, shares: bool = True, zero: bool = False
) -> Amount:
    """What ``value`` says. ``shares``: of a device or a machine, so that fractions mean something.

    Raises SizeError for anything that cannot be read, is not positive (``zero``: or 0), or is a
    fraction outside (0, 1].
    """
    how = _HOW_TO_SIZE if shares else _HOW_TO_BYTES
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SizeError(f"{name}={shown(value)} is a {type(value).__name__}, not a size.", how)
    read = _read_text(value, name, how) if isinstance(value, str) else value
    if isinstance(read, float):
        if not shares:
            raise SizeError(f"{name}={shown(value)} is a fraction, of nothing known.", how)
        if not 0.0 < read <= 1.0:
            raise SizeError(f"{name}={shown(value)}: a fraction must be in (0, 1].", how)
    elif read < (0 if zero else 1):
        raise SizeError(f"{name}={shown(value)} is {shown(read)} bytes: it must be positive.", how)
    elif shares and isinstance(value, int) and read < _LEAST_NUMBER:
        raise SizeError(
            f"{name}={value} is {value} bytes.",
            f'The whole device is 1.0, a part of it 0.8 or "80%"; and "{value}GiB" has a unit.',
        )
    return read


def in_bytes(amount: Amount, total: int) -> int:
    """Bytes of ``amount``; a share is of ``total``."""
    return max(1, int(amount * total)) if isinstance(amount, float) else amount


def parse_size(value: Size, total: int | None = None, name: str = "size") -> int:
    """Bytes that ``value`` means; ``total`` is what a fraction is of. Raises SizeError."""
    return in_bytes(read_size(value, name, shares=total is not None), total or 0)


def _read_text(text: str, name: str, how: str) -> Amount:
    match = _SIZE_TEXT.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if match is not None and match[2] == "%":
        return float(match[1]) / 100
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SizeError(f"{name}={shown(text)} cannot be read as a size.", how)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def plain_number(value: Any) -> Any:
    """Numbers of other libraries, such as numpy's, as Python's own; anything else as it is."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not _is_builtin(value) else value


def _is_builtin(value: object) -> bool:
    return isinstance(value, int | float)


def shown(value: object) -> str:
    """``value`` for an error: whatever it is, no longer than a line."""
    try:
        text = repr(value)
    except Exception:  # of its own __repr__, or an int of more digits than Python writes
        if isinstance(value, int):
            return f"a number of {int(value).bit_length()} bits"
        return type(value).__name__
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def is_int(value: object) -> bool:
    """A whole number, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_inflight(value: int | None, name: str) -> int | None:
    """A cap on queued copies; None is no cap. Raises ConfigError."""
    if value is None:
        return None
    how = f"Give {name} a whole number from 1 on, or None for no cap."
    if not is_int(value):
        raise ConfigError(f"{name}={value!r} is not an int.", how)
    if not 1 <= value < 1 << 32:
        raise ConfigError(f"{name}={value} copies cannot be a cap.", how)
    return value


def parse_rate(value: Size | None, name: str) -> int | None:
    """Bytes per second, such as 10e9 or "10GB/s"; None is no cap. Raises SizeError."""
    if value is None:
        return None
    how = f'Give {name} an int, a text like "10GB" (per second), or None for no cap.'
    given = plain_number(value)
    if isinstance(given, str):
        given = _PER_SECOND.sub("", given)
    elif isinstance(given, float):
        if not 1 < given < UNLIMITED:
            raise SizeError(f"{name}={value!r} is a fraction, and a rate is bytes a second.", how)
        given = int(given)
    rate = read_size(given, name, shares=False)
    if rate < LEAST_RATE:
        raise SizeError(
            f"{name}={value!r} is {rate} bytes per second, under {LEAST_RATE} (10 MB/s).", how
        )
    return min(int(rate), UNLIMITED)


def parse_piece(value: Size | None, name: str) -> int | None:
    """The largest part a copy is made in, in bytes; None is the default. Raises SizeError."""
    if value is None:
        return None
    how = f'Give {name} a size of 64 KiB or more, like "1MiB", or None for the default, 16 MiB.'
    if isinstance(value, float):
        raise SizeError(f"{name}={value!r} is a fraction, and a piece is a size in bytes.", how)
    size = int(read_size(value, name, shares=False))
    if size < LEAST_PIECE:
        raise SizeError(
            f"{name}={value!r} is {format_bytes(size)}, under {format_bytes(LEAST_PIECE)}.", how
        )
    return min(size, UNLIMITED)
