"""The watermarks of one device."""

from __future__ import annotations

from dataclasses import dataclass

from stagehand_alloc._errors import SizeError
from stagehand_alloc._settings.sizes import Amount, format_bytes, in_bytes

DEFAULT_HIGH = 0.90
DEFAULT_LOW = 0.80


@dataclass(frozen=True)
class Budget:
    """The watermarks and the hard limit of one device, in bytes: 0 < low <= high <= limit."""

    high: int
    low: int
    limit: int


def resolve_budget(
    high: Amount | None, low: Amount | None, limit: Amount | None, total: int
) -> Budget:
    """The budget on a device of ``total`` bytes.

    ``limit`` defaults to the device and ``high`` to 0.90 of ``limit``. ``low`` defaults to 8/9 of
    ``high``, rounded down (0.80 where high is 0.90), and to no more than 0.80 of ``limit``.
    Raises SizeError where 0 < low <= high <= limit <= total does not hold.
    """
    limit_bytes = total if limit is None else in_bytes(limit, total)
    high_bytes = int(DEFAULT_HIGH * limit_bytes) if high is None else in_bytes(high, total)
    if low is None:
        low_bytes = max(1, min(high_bytes * 8 // 9, int(DEFAULT_LOW * limit_bytes)))
    else:
        low_bytes = in_bytes(low, total)
    for name, size in (("high", high_bytes), ("limit", limit_bytes)):
        if size > total:
            raise SizeError(
                f"{name} is {format_bytes(size)}, but the device has {format_bytes(total)}.",
                f"Lower {name} to {total} bytes or less, or give a fraction such as 0.9.",
            )
    check_order(high_bytes, low_bytes, limit_bytes)
    return Budget(high_bytes, low_bytes, limit_bytes)


def check_order(high: Amount | None, low: Amount | None, limit: Amount | None) -> None:
    """Raises SizeError where low <= high <= limit does not hold, as far as it can be said."""
    pairs = (
        ("low", low, "high", high, "eviction starts at high and goes on until low"),
        ("high", high, "limit", limit, "low <= high <= limit"),
        ("low", low, "limit", limit, "low <= high <= limit"),
    )
    for small_name, small, large_name, large, why in pairs:
        if small is None or large is None or isinstance(small, float) != isinstance(large, float):
            continue  # a share and bytes: once the device is known
        if small > large:
            raise SizeError(
                f"{small_name} is {_shown(small)}, above {large_name}, {_shown(large)}.",
                f"Lower {small_name} or raise {large_name}: {why}.",
            )


def _shown(amount: Amount) -> str:
    return f"{amount:.0%}" if isinstance(amount, float) else format_bytes(amount)
