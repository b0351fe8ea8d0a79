"""Settings: sizes, watermarks, and the configuration keys of Activation Stagehand v0."""

from __future__ import annotations

import dataclasses
import difflib
import json
import numbers
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stagehand_alloc._errors import ConfigError, SizeError
from stagehand_alloc._settings.host_memory import available_host_bytes, default_host_limit

MIB = 1 << 20
BLOCK_NAME = "activation_stagehand"
DEFAULT_HIGH = 0.90
DEFAULT_LOW = 0.80
UNLIMITED = 1 << 62  # the core's "no watermark" is above this
LEAST_PIECE = 64 << 10  # below it a copy costs the same however small
FIRST_SHARE = 32  # of a device's memory is pinned from the start, where nothing else is asked for
LEAST_RATE = 10 * 1000**2  # per second: below it a step takes minutes, and looks as if it hung

Size: TypeAlias = int | float | str
"""Bytes, a text with a unit ("20GiB", "20GB"), or a fraction of device memory: 0.8, "80%"."""

_UNITS = {
    "b": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)},
    **{f"{p}i{b}": 1024**n for n, p in enumerate("kmgt", 1) for b in ("b", "")},
}
_LONGEST_TEXT = 64  # of a size: Python itself refuses numbers of thousands of digits
_LEAST_NUMBER = 1024  # bytes without a unit: fewer are meant as something else
_SIZE_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)
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


def parse_size(value: Size, total: int | None = None, name: str = "size") -> int:
    """Bytes that ``value`` means; ``total`` is what a fraction is of.

    Raises SizeError for anything that cannot be read, is not positive, or is a fraction outside
    (0, 1] or of an unknown total.
    """
    how = _HOW_TO_BYTES if total is None else _HOW_TO_SIZE
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SizeError(f"{name}={shown(value)} is a {type(value).__name__}, not a size.", how)
    if isinstance(value, str):
        return _parse_text(value, total, name, how)
    if isinstance(value, float):
        return _part(value, total, name, how)
    if value <= 0:
        raise SizeError(f"{name}={shown(value)} bytes: a size must be positive.", how)
    if total is not None and value < _LEAST_NUMBER:
        raise SizeError(
            f"{name}={value} is {value} bytes.",
            f'The whole device is 1.0, a part of it 0.8 or "80%"; and "{value}GiB" has a unit.',
        )
    return value


def _part(share: float, total: int | None, name: str, how: str) -> int:
    if total is None:
        raise SizeError(f"{name}={share!r} is a fraction, of nothing known.", how)
    if not 0.0 < share <= 1.0:
        raise SizeError(f"{name}={share!r}: a fraction must be in (0, 1].", how)
    return max(1, int(share * total))


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
    except ValueError:  # an int of more digits than Python writes
        return f"a number of {int(value).bit_length()} bits" if isinstance(value, int) else "?"
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def _parse_text(text: str, total: int | None, name: str, how: str) -> int:
    match = _SIZE_TEXT.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if match is not None and match[2] == "%":
        return _part(float(match[1]) / 100, total, name, how)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SizeError(f"{name}={shown(text)} cannot be read as a size.", how)
    count = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if count <= 0:
        raise SizeError(f"{name}={text!r} is {count} bytes: a size must be positive.", how)
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
    value = plain_number(value)
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
    """The largest part a copy is made in, in bytes; None is the default. Raises SizeError."""
    if value is None:
        return None
    how = f'Give {name} a size of 64 KiB or more, like "1MiB", or None for the default, 16 MiB.'
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


NODES = "nodes"  # Config.recompute: what autograd's own nodes can make, and nothing else


@dataclass(frozen=True)
class Config:
    """All settings; the keys of Activation Stagehand v0 keep their names.

    The caps and rates are where a pool starts; `Pool.limits` says what they mean and changes them.
    Without ``build_trigger``, and where STAGEHAND_ALLOC_BUILD=0 stands in the environment, modes
    without the process allocator act at the next pack or unpack instead of inside the allocation,
    and packing and unpacking take about five times as long in any mode.
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
    host_limit: Size | None = None  # of host memory; None: default_host_limit()
    recompute: bool | str = "nodes"  # drop what is sooner made again: True, False, or NODES
    build_trigger: bool = True  # False: no library is built or loaded against torch

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
            object.__setattr__(self, "host_limit", plain_number(self.host_limit))
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

    def first_share(self) -> int:
        """Pinned first: one part in so many of the device. 0: no more than the slabs asked for."""
        asked = (self.pinned_pool_classes_mb, self.slabs_per_class)
        default = (Config.pinned_pool_classes_mb, Config.slabs_per_class)
        return FIRST_SHARE if asked == default else 0

    def host_limit_bytes(self) -> int:
        """How much host memory evicted bytes may take; a fraction is of what is available."""
        if self.host_limit is None:
            return default_host_limit()
        limit = parse_size(self.host_limit, available_host_bytes(), "host_limit")
        self._check_host_limit(limit)
        return min(limit, UNLIMITED)

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


_LARGEST_SLAB_MB = 1 << 20
_MOST_SLABS = 1 << 24
_INTS = {
    "vram_high_watermark_mb": 1,
    "vram_low_watermark_mb": 1,
    "recompute_threshold_bytes": 0,
}
_OPTIONAL = {"vram_high_watermark_mb", "vram_low_watermark_mb"}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(config: Config) -> None:
    for name in (
        "enabled",
        "debug_checksums",
        "telemetry_enabled",
        "build_trigger",
    ):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not a bool.", f"Set {name} to true or false."
            )
    if not isinstance(config.recompute, bool) and config.recompute != NODES:
        raise ConfigError(
            f"recompute={shown(config.recompute)} is neither a bool nor {NODES!r}.",
            f"Set it to true (modules run again too), {NODES!r} (none does) or false.",
        )
    path: object = config.telemetry_file
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(
            f"telemetry_file={shown(path)} is not a path.",
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
    if max(classes) > _LARGEST_SLAB_MB:
        raise ConfigError(
            f"pinned_pool_classes_mb={shown(list(classes))} has a slab above {_LARGEST_SLAB_MB} "
            "MiB.",
            "Give slab sizes in MiB, such as [1, 4, 16, 64, 256].",
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
    if max(each) > _MOST_SLABS:
        raise ConfigError(
            f"slabs_per_class={shown(counts)} has a count above {_MOST_SLABS}.",
            "Give how many slabs to pin ahead of need; more are made as they are used.",
        )


def load_config(source: str | Path | Mapping[str, Any]) -> Config:
    """Read settings from a mapping, or from a JSON or TOML file.

    The keys may stand at the top, or in an ``activation_stagehand`` block at any depth, as in a v0
    file, where everything outside the block is left alone.
    Raises ConfigError for a file that cannot be read and for an unknown key, naming the nearest.
    """
    if not isinstance(source, Mapping | str | Path):
        raise ConfigError(
            f"{shown(source)} is a {type(source).__name__}, not settings.",
            "Give a mapping of settings, or the path of a JSON or TOML file.",
        )
    data = source if isinstance(source, Mapping) else _read_file(Path(source))
    try:
        blocks = list(_blocks(data))
    except RecursionError as error:
        raise ConfigError("The settings are nested too deeply to be read.", _HOW_TO_NEST) from error
    if len(blocks) > 1:
        raise ConfigError(
            f'There are {len(blocks)} blocks "{BLOCK_NAME}" in the settings.', "Leave one of them."
        )
    settings = blocks[0] if blocks else data
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{BLOCK_NAME} is a {type(settings).__name__}, not a block of settings.",
            f'Write "{BLOCK_NAME}": {{...}} with the settings inside.',
        )
    if twice := getattr(settings, "twice", None):
        raise ConfigError(f"{twice[0]!r} is set twice.", "Leave one of them.")
    known = [field.name for field in dataclasses.fields(Config)]
    for key in settings:
        if key not in known:
            raise ConfigError(f"Unknown setting {shown(key)}.", _instead_of(str(key), known))
    return Config(**settings)


class _JsonObject(dict[str, Any]):
    """What a JSON object holds, and which keys it has more than once: Python takes the last."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.pairs = pairs
        self.twice = [name for at, name in enumerate(names) if name in names[:at]]


def _blocks(data: Any) -> Iterator[Any]:
    """Every block of ours in the settings, at whatever depth."""
    if isinstance(data, Mapping):
        for key, value in getattr(data, "pairs", None) or data.items():
            if key == BLOCK_NAME:
                yield value
            else:
                yield from _blocks(value)
    elif isinstance(data, list):
        for value in data:
            yield from _blocks(value)


def _instead_of(key: str, known: list[str]) -> str:
    """What was likely meant by a setting there is none of."""
    arguments = {"high": "pool()", "low": "pool()", "limit": "pool()", "mode": "pool()"}
    arguments |= {"keep": "pool()", "device": "pool()", "telemetry": "pool()"}
    arguments |= {"piece": "Pool.limits()"}
    near = difflib.get_close_matches(key.lower(), [*known, *arguments], n=1, cutoff=0.6)
    if not near:
        return f"The settings are: {', '.join(known)}."
    if near[0] not in arguments:
        return f"Did you mean {near[0]!r}?"
    given = f"`{near[0]}` is no setting but an argument of {arguments[near[0]]}: give it there."
    if near[0] != key:
        return f"Did you mean `{near[0]}`? {given}"
    others = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"{given} Or did you mean {others[0]!r}?" if others else given


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            data = _load_toml(path, text)
        else:
            data = json.loads(text, object_pairs_hook=_JsonObject)
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be read.", _HOW_TO_NEST) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Settings cannot be read from {str(path)!r}: {error}.",
            "Give a readable JSON or TOML file.",
        ) from error
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path} holds a {type(data).__name__}, not an object.",
            f'Put the settings in an object, or in its "{BLOCK_NAME}" block.',
        )
    return data


_HOW_TO_NEST = f'Put the settings at the top, or in one "{BLOCK_NAME}" block.'


def _load_toml(path: Path, text: str) -> Mapping[str, Any]:
    if sys.version_info < (3, 11):
        raise ConfigError(f"{path}: TOML needs Python 3.11 or newer.", "Write the file as JSON.")
    import tomllib

    return tomllib.loads(text)
