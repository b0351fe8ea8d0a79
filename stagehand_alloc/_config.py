"""Settings: sizes, watermarks, and the configuration keys of Activation Stagehand v0."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stagehand_alloc._errors import ConfigError, SizeError
from stagehand_alloc._host import available_host_bytes

MIB = 1 << 20
BLOCK_NAME = "activation_stagehand"
DEFAULT_HIGH = 0.90
DEFAULT_LOW = 0.80
UNLIMITED = 1 << 62  # the core's "no watermark" is above this
LEAST_PIECE = 64 << 10  # below it a copy costs the same however small
LEAST_RATE = 10 * 1000**2  # per second: below it a step takes minutes, and looks as if it hung

Size: TypeAlias = int | float | str
"""Bytes, a text with a unit ("20GiB", "20GB"), or a fraction of device memory in (0, 1]."""

_UNITS = {
    "b": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)},
}
_SIZE_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_HOW_TO_SIZE = 'Write bytes (an int), a text like "20GiB" or "512MB", or a fraction in (0, 1].'


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


def parse_size(value: Size, total: int | None = None, name: str = "size") -> int:
    """Bytes that ``value`` means; ``total`` is what a fraction is of.

    Raises SizeError for anything that cannot be read, is not positive, or is a fraction outside
    (0, 1] or of an unknown total.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SizeError(f"{name}={value!r} is a {type(value).__name__}, not a size.", _HOW_TO_SIZE)
    if isinstance(value, str):
        return _parse_text(value, name)
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise SizeError(f"{name}={value!r}: a fraction must be in (0, 1].", _HOW_TO_SIZE)
        if total is None:
            raise SizeError(f"{name}={value!r} is a fraction, of nothing known.", _HOW_TO_SIZE)
        return max(1, int(value * total))
    if value <= 0:
        raise SizeError(f"{name}={value} bytes: a size must be positive.", _HOW_TO_SIZE)
    return value


def _parse_text(text: str, name: str) -> int:
    match = _SIZE_TEXT.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SizeError(f"{name}={text!r} cannot be read as a size.", _HOW_TO_SIZE)
    count = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if count <= 0:
        raise SizeError(f"{name}={text!r} is {count} bytes: a size must be positive.", _HOW_TO_SIZE)
    return count


def parse_inflight(value: int | None, name: str) -> int | None:
    """A cap on queued copies; None is no cap. Raises ConfigError."""
    if value is None:
        return None
    how = f"Give {name} a whole number from 1 on, or None for no cap."
    if not _is_int(value):
        raise ConfigError(f"{name}={value!r} is not an int.", how)
    if not 1 <= value < 1 << 32:
        raise ConfigError(f"{name}={value} copies cannot be a cap.", how)
    return value


def parse_rate(value: Size | None, name: str) -> int | None:
    """Bytes per second; None is no cap. Raises SizeError."""
    if value is None:
        return None
    if isinstance(value, float):
        raise SizeError(
            f"{name}={value!r} is a fraction, and a rate is bytes per second.",
            f'Give {name} an int, a text like "10GB", or None for no cap.',
        )
    rate = parse_size(value, None, name)
    if rate < LEAST_RATE:
        raise SizeError(
            f"{name}={value!r} is {rate} bytes per second, under {LEAST_RATE} (10 MB/s).",
            f'Give {name} with its unit, like "10GB" (per second), or None for no cap.',
        )
    return min(rate, UNLIMITED)


def parse_piece(value: Size | None, name: str) -> int | None:
    """The largest part a copy is made in, in bytes; None is whole. Raises SizeError."""
    if value is None:
        return None
    how = f'Give {name} a size of 64 KiB or more, like "1MiB", or None for whole copies.'
    if isinstance(value, float):
        raise SizeError(f"{name}={value!r} is a fraction, and a piece is a size in bytes.", how)
    size = parse_size(value, None, name)
    if size < LEAST_PIECE:
        raise SizeError(
            f"{name}={value!r} is {format_bytes(size)}, under {format_bytes(LEAST_PIECE)}.", how
        )
    return min(size, UNLIMITED)


@dataclass(frozen=True)
class Budget:
    """The watermarks and the hard limit of one device, in bytes: 0 < low <= high <= limit."""

    high: int
    low: int
    limit: int


def resolve_budget(high: Size | None, low: Size | None, limit: Size | None, total: int) -> Budget:
    """The budget on a device of ``total`` bytes.

    ``limit`` defaults to the device and ``high`` to 0.90 of ``limit``. ``low`` defaults to 8/9 of
    ``high``, rounded down (0.80 where high is 0.90), and to no more than 0.80 of ``limit``.
    Raises SizeError where 0 < low <= high <= limit <= total does not hold.
    """
    limit_bytes = total if limit is None else parse_size(limit, total, "limit")
    high_bytes = (
        int(DEFAULT_HIGH * limit_bytes) if high is None else parse_size(high, total, "high")
    )
    if low is None:
        low_bytes = max(1, min(high_bytes * 8 // 9, int(DEFAULT_LOW * limit_bytes)))
    else:
        low_bytes = parse_size(low, total, "low")
    for name, size in (("high", high_bytes), ("limit", limit_bytes)):
        if size > total:
            raise SizeError(
                f"{name} is {format_bytes(size)}, but the device has {format_bytes(total)}.",
                f"Lower {name} to {total} bytes or less, or give a fraction such as 0.9.",
            )
    if high_bytes > limit_bytes:
        raise SizeError(
            f"high is {format_bytes(high_bytes)}, above limit, {format_bytes(limit_bytes)}.",
            "Lower high or raise limit: low <= high <= limit.",
        )
    if low_bytes > high_bytes:
        raise SizeError(
            f"low is {format_bytes(low_bytes)}, above high, {format_bytes(high_bytes)}.",
            "Lower low or raise high: eviction starts at high and goes on until low.",
        )
    return Budget(high_bytes, low_bytes, limit_bytes)


@dataclass(frozen=True)
class Config:
    """All settings; the keys of Activation Stagehand v0 keep their names.

    The caps and rates are where a pool starts; `Pool.limits` says what they mean and changes them.
    Without ``build_trigger``, and where STAGEHAND_ALLOC_BUILD=0 stands in the environment, modes
    without the process allocator act at the next pack or unpack instead of inside the allocation.
    ``recompute_threshold_bytes`` is read so that v0 files load unchanged, and has no effect.

    Raises ConfigError or SizeError, naming the key, for a value that cannot be.
    """

    enabled: bool = True
    vram_high_watermark_mb: int | None = None  # MiB; None: 0.90 of the device
    vram_low_watermark_mb: int | None = None  # MiB; None: 8/9 of high
    pinned_pool_classes_mb: tuple[int, ...] = (1, 4, 16, 64, 256)  # MiB, rising
    slabs_per_class: int | tuple[int, ...] = (512, 2, 2, 2, 2)  # one count for all, or one each
    max_inflight_d2h: int | None = None  # copies ahead of need wait beyond it; None: no cap
    max_inflight_h2d: int | None = None
    d2h_bytes_per_second: Size | None = None  # None: as fast as the link
    h2d_bytes_per_second: Size | None = None
    debug_checksums: bool = False  # a CRC of every host copy, checked before it is restored
    telemetry_enabled: bool = False
    telemetry_file: str = "activation_telemetry.jsonl"
    recompute_threshold_bytes: int = 0
    host_limit: Size | None = None  # of host memory; None: half of what the machine has available
    build_trigger: bool = True  # False: the trigger library is neither built nor loaded

    def __post_init__(self) -> None:
        # Lists are what JSON has; a frozen Config holds tuples.
        for name in ("pinned_pool_classes_mb", "slabs_per_class"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        _check_types(self)
        _check_pool(self)
        high, low = self.vram_high_watermark_mb, self.vram_low_watermark_mb
        if high is not None and low is not None and low > high:
            raise SizeError(
                f"vram_low_watermark_mb is {low}, above vram_high_watermark_mb, {high}.",
                "Lower the low one or raise the high one: eviction starts at high, ends at low.",
            )
        for name in ("max_inflight_d2h", "max_inflight_h2d"):
            parse_inflight(getattr(self, name), name)
        for name in ("d2h_bytes_per_second", "h2d_bytes_per_second"):
            parse_rate(getattr(self, name), name)
        if self.host_limit is not None:
            limit = parse_size(self.host_limit, 1 << 40, "host_limit")
            if not isinstance(self.host_limit, float):  # a fraction: once the machine is asked
                self._check_host_limit(limit)

    @property
    def high(self) -> int | None:
        """The high watermark in bytes, or None for the default."""
        mb = self.vram_high_watermark_mb
        return None if mb is None else mb * MIB

    @property
    def low(self) -> int | None:
        """The low watermark in bytes, or None for the default."""
        mb = self.vram_low_watermark_mb
        return None if mb is None else mb * MIB

    def pinned_classes(self) -> tuple[list[int], list[int]]:
        """Slab sizes in bytes, and how many slabs of each."""
        sizes = [mb * MIB for mb in self.pinned_pool_classes_mb]
        counts = self.slabs_per_class
        return sizes, [counts] * len(sizes) if isinstance(counts, int) else list(counts)

    def host_limit_bytes(self) -> int:
        """How much host memory evicted bytes may take; a fraction is of what is available."""
        available = available_host_bytes()
        if self.host_limit is None:
            return available // 2
        limit = parse_size(self.host_limit, available, "host_limit")
        self._check_host_limit(limit)
        return limit

    def _check_host_limit(self, limit: int) -> None:
        smallest = self.pinned_pool_classes_mb[0] * MIB
        if limit < smallest:
            raise ConfigError(
                f"host_limit is {format_bytes(limit)}, under one slab of the smallest class, "
                f"{format_bytes(smallest)}.",
                f"Raise host_limit to {smallest} bytes or more, or put a smaller class first in "
                "pinned_pool_classes_mb.",
            )

    def without_effect(self) -> list[str]:
        """The keys set to something else than their default that this version ignores."""
        return ["recompute_threshold_bytes"] if self.recompute_threshold_bytes else []


_INTS = {
    "vram_high_watermark_mb": 1,
    "vram_low_watermark_mb": 1,
    "recompute_threshold_bytes": 0,
}
_OPTIONAL = {"vram_high_watermark_mb", "vram_low_watermark_mb"}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(config: Config) -> None:
    for name in ("enabled", "debug_checksums", "telemetry_enabled", "build_trigger"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not a bool.", f"Set {name} to true or false."
            )
    if not isinstance(config.telemetry_file, str) or not config.telemetry_file:
        raise ConfigError(
            f"telemetry_file={config.telemetry_file!r} is not a path.",
            "Give the path of the file to write, as a text.",
        )
    for name, least in _INTS.items():
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        if not _is_int(value):
            raise ConfigError(f"{name}={value!r} is not an int.", f"Give {name} a whole number.")
        if value < least:
            raise ConfigError(f"{name}={value} is below {least}.", f"Raise {name} to {least}.")


def _check_pool(config: Config) -> None:
    classes: object = config.pinned_pool_classes_mb
    if not isinstance(classes, tuple) or not classes or not all(map(_is_int, classes)):
        raise ConfigError(
            f"pinned_pool_classes_mb={classes!r} is not a list of whole numbers.",
            "Give slab sizes in MiB, smallest first, such as [1, 4, 16, 64, 256].",
        )
    if min(classes) <= 0 or list(classes) != sorted(set(classes)):
        raise ConfigError(
            f"pinned_pool_classes_mb={list(classes)} is not positive and rising.",
            "Give slab sizes in MiB, smallest first, each once, such as [1, 4, 16, 64, 256].",
        )
    counts: object = config.slabs_per_class
    each = counts if isinstance(counts, tuple) else (counts,)
    if not all(map(_is_int, each)):
        raise ConfigError(
            f"slabs_per_class={counts!r} is not a whole number or a list of them.",
            f"Give one count for all classes, or a list of {len(classes)}.",
        )
    if isinstance(counts, tuple) and len(counts) != len(classes):
        raise ConfigError(
            f"slabs_per_class has {len(counts)} counts for {len(classes)} size classes.",
            f"Give {len(classes)} counts, one for each of {list(classes)} MiB, or one number.",
        )
    if any(count < 0 for count in each):
        raise ConfigError(f"slabs_per_class={counts!r} has a negative count.", "Use 0 or more.")


def load_config(source: str | Path | Mapping[str, Any]) -> Config:
    """Read settings from a mapping, or from a JSON or TOML file.

    The keys may stand at the top, or in an ``activation_stagehand`` block at any depth, as in a v0
    file, where everything outside the block is left alone.
    Raises ConfigError for a file that cannot be read and for an unknown key, naming the nearest.
    """
    data = source if isinstance(source, Mapping) else _read_file(Path(source))
    block = _find_block(data)
    settings = data if block is None else block
    known = [field.name for field in dataclasses.fields(Config)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ConfigError(f"Unknown setting {key!r}.", f"Did you mean {near[0]!r}?")
    return Config(**settings)


def _find_block(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if BLOCK_NAME in data:
        block = data[BLOCK_NAME]
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{BLOCK_NAME} is a {type(block).__name__}, not a block of settings.",
                f'Write "{BLOCK_NAME}": {{...}} with the settings inside.',
            )
        return block
    for value in data.values():
        if isinstance(value, Mapping) and (found := _find_block(value)) is not None:
            return found
    return None


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = _load_toml(path, text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Settings cannot be read from {path}: {error}.", "Give a readable JSON or TOML file."
        ) from error
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path} holds a {type(data).__name__}, not an object.",
            f'Put the settings in an object, or in its "{BLOCK_NAME}" block.',
        )
    return data


def _load_toml(path: Path, text: str) -> Mapping[str, Any]:
    if sys.version_info < (3, 11):
        raise ConfigError(f"{path}: TOML needs Python 3.11 or newer.", "Write the file as JSON.")
    import tomllib

    return tomllib.loads(text)
