"""`Config`: every setting, by the name that `pool()` has for it. `_settings.load` reads files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from stagehand_alloc._errors import ConfigError, ModeError
from stagehand_alloc._settings.budget import Budget, check_order, resolve_budget
from stagehand_alloc._settings.host_memory import available_host_bytes, default_host_limit
from stagehand_alloc._settings.sizes import (
    MIB,
    UNLIMITED,
    Amount,
    Size,
    format_bytes,
    in_bytes,
    is_int,
    parse_inflight,
    parse_piece,
    parse_rate,
    read_size,
    shown,
)

if TYPE_CHECKING:
    import torch

FIRST_SHARE = 16  # of a device's memory is pinned from the start, where nothing else is asked for
NODES = "nodes"  # Config.recompute: what autograd's own nodes can make, and nothing else

DeviceLike: TypeAlias = "int | str | torch.device | None"
Mode = Literal["allocator", "mempool", "native"]
MODES: tuple[Mode, ...] = ("allocator", "mempool", "native")

_CUDA_DEVICE = re.compile(r"cuda(:\d+)?")
_LARGEST_SLAB_MB = 1 << 20
_MOST_SLABS = 1 << 24


@dataclass(frozen=True)
class Config:
    """All settings: a file can hold them, and `pool` takes them. What is None was not said.

    Sizes are read here, once: a Config holds bytes, or shares as floats. The caps, the rates and
    ``piece`` are where a pool starts; `Pool.limits` says what they mean and changes them.

    Raises ConfigError, SizeError or ModeError, naming the key, for a value that cannot be.
    """

    high: Size | None = None
    """An allocation that would take mapped memory above it evicts. None: 0.90 of `limit`."""
    low: Size | None = None
    """Evicting goes on down to it. None: 8/9 of `high`, and at most 0.80 of `limit`."""
    limit: Size | None = None
    """Beyond it memory is refused. None: the device."""
    mode: str | None = None
    """`allocator`, `native` or `mempool`. None: the first where it is installed, else `native`."""
    device: DeviceLike = None
    """A number, or `cuda:1`. None: the current one at the first entry."""
    recompute: bool | str | None = None
    """Drop what is sooner made again: true, or `nodes` (no module runs twice). None: `nodes`; false in `mempool`."""
    telemetry: bool | str | None = None
    """A file to append one line a step to, or true for `telemetry_file`. None: no file."""
    telemetry_file: str = "activation_telemetry.jsonl"
    """What `telemetry` true stands for."""
    enabled: bool = True
    """False: a pool does nothing."""
    host_limit: Size | None = None
    """Of what is evicted and of offloaded weights. None: half of what is available, for the former."""
    pinned_pool_classes_mb: tuple[int, ...] = (1, 4, 16, 64, 256)
    """The sizes of pinned slabs in MiB, rising."""
    slabs_per_class: int | tuple[int, ...] = (512, 2, 2, 2, 2)
    """How many of each are pinned first: one number, or one for each."""
    max_inflight_d2h: int | None = None
    """With so many copies out in flight, those ahead of need wait. None: no cap."""
    max_inflight_h2d: int | None = None
    """The same for copies back."""
    d2h_bytes_per_second: Size | None = None
    """Of all copies out. None: what the link carries."""
    h2d_bytes_per_second: Size | None = None
    """Of all copies back."""
    piece: Size | None = None
    """Copies go in parts of at most so many bytes. None: 16 MiB, or 64 where weights stream."""
    debug_checksums: bool = False
    """A CRC of every host copy, checked before it is restored: slow, to find bugs."""
    build_trigger: bool = True
    """False: no library is built or loaded against torch. Modes without the process allocator then
    act at the next pack or unpack, and packing takes about five times as long."""

    def __post_init__(self) -> None:
        # Lists are what JSON has; a frozen Config holds tuples.
        for name in ("pinned_pool_classes_mb", "slabs_per_class"):
            if isinstance(getattr(self, name), list):
                self._read(name, tuple(getattr(self, name)))
        _check_types(self)
        _check_pool(self)
        for name in ("high", "low", "limit", "host_limit"):
            if getattr(self, name) is not None:
                self._read(name, read_size(getattr(self, name), name))
        check_order(*self._amounts())
        for name in ("max_inflight_d2h", "max_inflight_h2d"):
            parse_inflight(getattr(self, name), name)
        for name in ("d2h_bytes_per_second", "h2d_bytes_per_second"):
            self._read(name, parse_rate(getattr(self, name), name))
        self._read("piece", parse_piece(self.piece, "piece"))
        if self.host_limit is not None and not isinstance(self.host_limit, float):
            self._check_host_limit(cast("int", self.host_limit))

    def _read(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _amounts(self) -> tuple[Amount | None, Amount | None, Amount | None]:
        sizes: Any = (self.high, self.low, self.limit)
        return cast("tuple[Amount | None, Amount | None, Amount | None]", sizes)

    def budget(self, total: int) -> Budget:
        """The budget on a device of ``total`` bytes. Raises SizeError."""
        return resolve_budget(*self._amounts(), total)

    @property
    def telemetry_path(self) -> str | None:
        """The file to append to, or None."""
        return self.telemetry_file if self.telemetry is True else self.telemetry or None

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

    def host_limit_bytes(self, weights: int = 0) -> int:
        """How much host memory evicted bytes and, where it is set, host copies of weights may take.

        A share is of what is available and what ``weights`` have of it already.
        """
        if self.host_limit is None:
            return default_host_limit()
        limit = in_bytes(cast("Amount", self.host_limit), available_host_bytes() + weights)
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


def check_mode(mode: str | None, where: str = "") -> Mode | None:
    """``mode`` as `pool` takes it, said ``where``. Raises ModeError for a name there is none of."""
    if mode is None:
        return None
    for known in MODES:
        if mode == known:
            return known
    raise ModeError(
        f"{where}There is no mode {mode!r}.",
        'Use "allocator", "mempool" or "native", or leave it out.',
    )


def _check_types(config: Config) -> None:
    for name in ("enabled", "debug_checksums", "build_trigger"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not a bool.", f"Set {name} to true or false."
            )
    check_mode(config.mode)
    if isinstance(config.device, str) and not _CUDA_DEVICE.fullmatch(config.device):
        raise ConfigError(
            f"device={shown(config.device)} is no CUDA device.",
            'Give a number, "cuda:1", or nothing for the current device.',
        )
    if not isinstance(config.recompute, bool | None) and config.recompute != NODES:
        raise ConfigError(
            f"recompute={shown(config.recompute)} is neither a bool nor {NODES!r}.",
            f"Set it to true (modules run again too), {NODES!r} (none does) or false.",
        )
    if not isinstance(config.telemetry, bool | None):
        _check_path(config, "telemetry")
    _check_path(config, "telemetry_file")


def _check_path(config: Config, name: str) -> None:
    path: object = getattr(config, name)
    if isinstance(path, Path):
        config._read(name, path := str(path))
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(
            f"{name}={shown(path)} is not a path.", "Give the file that is to be written."
        )


def _check_pool(config: Config) -> None:
    classes: object = config.pinned_pool_classes_mb
    if not isinstance(classes, tuple) or not classes or not all(map(is_int, classes)):
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
    if not all(map(is_int, each)):
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
