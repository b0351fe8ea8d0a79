"""What a pool asks of the lanes, for whoever else uses the link. Changed while running."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from stagehand_alloc._settings.config import Config
from stagehand_alloc._settings.sizes import Size, parse_inflight, parse_piece, parse_rate


class Unchanged(enum.Enum):
    """Stands for an argument that was not given: None already means no limit."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "unchanged"


UNCHANGED = Unchanged.UNCHANGED


@dataclass(frozen=True)
class LaneLimits:
    """The limits of a pool's lanes; None is no limit.

    ``max_inflight_d2h``, ``max_inflight_h2d``: with so many copies queued on the lane and not yet
    finished, copies ahead of need (write-back, prefetch) hold back; a copy somebody waits for
    always goes. The rates, in bytes per second, hold for all copies of the lane. ``piece``: copies
    go in parts of at most so many bytes, so that others' copies get in between; None is
    16 MiB, or 64 where steps wait for weights that stream and no limit is set.
    """

    max_inflight_d2h: int | None = None
    max_inflight_h2d: int | None = None
    d2h_bytes_per_second: int | None = None
    h2d_bytes_per_second: int | None = None
    piece: int | None = None

    @classmethod
    def of(cls, config: Config) -> LaneLimits:
        """What the settings say."""
        return cls().changed(
            config.max_inflight_d2h,
            config.max_inflight_h2d,
            config.d2h_bytes_per_second,
            config.h2d_bytes_per_second,
            config.piece,
        )

    def changed(
        self,
        max_inflight_d2h: int | Unchanged | None,
        max_inflight_h2d: int | Unchanged | None,
        d2h_bytes_per_second: Size | Unchanged | None,
        h2d_bytes_per_second: Size | Unchanged | None,
        piece: Size | Unchanged | None = UNCHANGED,
    ) -> LaneLimits:
        """These with some changed. Raises ConfigError or SizeError, and then nothing is."""
        changes: dict[str, int | None] = {}
        for name, cap in (
            ("max_inflight_d2h", max_inflight_d2h),
            ("max_inflight_h2d", max_inflight_h2d),
        ):
            if not isinstance(cap, Unchanged):
                changes[name] = parse_inflight(cap, name)
        for name, rate in (
            ("d2h_bytes_per_second", d2h_bytes_per_second),
            ("h2d_bytes_per_second", h2d_bytes_per_second),
        ):
            if not isinstance(rate, Unchanged):
                changes[name] = parse_rate(rate, name)
        if not isinstance(piece, Unchanged):
            changes["piece"] = parse_piece(piece, "piece")
        return dataclasses.replace(self, **changes)

    def for_native(self) -> tuple[int, int, int, int, int]:
        """As the core takes them: 0 is no limit, and of ``piece`` the default."""
        return (
            self.max_inflight_d2h or 0,
            self.max_inflight_h2d or 0,
            self.d2h_bytes_per_second or 0,
            self.h2d_bytes_per_second or 0,
            self.piece or 0,
        )
