"""The cases of weights.py: their models, budgets and what they are compared with. Without torch.

Sizes in GB of 1e9 bytes, times in ms, but for `Case.seconds`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

GB = 10**9
MODES = ("native", "allocator")


@dataclass(frozen=True)
class Case:
    """One process. `name` has the mode of ours before it."""

    name: str
    tokens: int
    kind: str = "plain"  # or "ours", "ring", or a library's name: weight_anchors.py
    high: float = 0  # 0: no pool
    as_much_as: str = ""  # `high` is what this case reserved
    offload: bool = False
    checkpoint: bool = False
    full: bool = False  # all is trained, and the optimizer's state streams
    expandable: bool = False  # torch's segments are
    forward_only: bool = False  # and no graph is made
    link: float = 0  # GB/s to which copies to the GPU are slowed down; 0: not
    mode: str = ""
    width: int = 4096
    hidden: int = 16384
    layers: int = 12
    heads: int = 32
    base: str = ""  # plain torch's case of the same steps
    needs: tuple[str, ...] = ()  # what else is measured first
    warm: int = 16  # steps before those that are timed
    steps: int = 8
    seconds: float = 22  # what it takes at full size on an H200, about

    @property
    def short(self) -> str:
        """Its name without the mode."""
        return self.name.removeprefix(f"{self.mode} ")

    @property
    def is_others(self) -> bool:
        """It runs nothing of this package."""
        return self.kind not in ("plain", "ours")

    def before(self) -> tuple[str, ...]:
        """The cases that its rows need, in the order in which they are to run."""
        return tuple(name for name in (self.base, *self.needs, self.as_much_as) if name)


@dataclass
class Result:
    """What a case measured: times in ms, bytes, counters of a step."""

    name: str
    step: float = 0
    forward: float = 0
    backward: float = 0
    first: float = 0
    high: int = 0
    start: int = 0
    held: int = 0  # at the end of forward
    peak: int = 0
    reserved: int = 0
    overshoot: int = 0
    host_waits: float = 0
    waited_ms: dict[str, float] = field(default_factory=dict)  # of the host, a step, by what for
    loads: float = 0
    late: float = 0
    loaded: float = 0
    h2d: float = 0
    d2h: float = 0
    dropped: float = 0
    written: float = 0  # weights and state
    map_calls: float = 0
    group: int = 0  # the largest block's weights
    weights: int = 0  # of all blocks
    load: float = 0  # the time of `offload`, of a model on the CPU
    pinned: int = 0  # for host copies of weights
    digests: list[str] = field(default_factory=list)  # of each compared step
    bitwise: bool | None = None  # whether they are those of the base; None: not compared
    to_plain: float = 0  # over the step of plain torch without checkpoints
    bound_to_plain: float = 0
    seconds: float = 0
    absent: str = ""  # what it needs and is not here
    error: str = ""

    @property
    def measured(self) -> bool:
        return not self.absent and not self.error

    @classmethod
    def of(cls, found: dict[str, Any]) -> Result:
        """From a file, which may be older than a field."""
        names = {one.name for one in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in found.items() if key in names})


@dataclass(frozen=True)
class Scale:
    """What is measured in place of the full size."""

    width: int  # of the GPT, whose size divides the budgets; of the 48 blocks too
    layers: int
    blocks: int
    heads: int
    long: int
    short: int
    budget: float  # budgets are divided by it


FULL = Scale(4096, 12, 48, 32, 8192, 1024, 1)
QUICK = Scale(1024, 12, 80, 8, 2048, 256, 16)
TINY = Scale(128, 6, 64, 4, 256, 32, 1024)


def cases_of(modes: tuple[str, ...], scale: Scale = FULL) -> dict[str, Case]:
    """All, in the order of what they are worth when time is short."""
    gpt: dict[str, Any] = {
        "width": scale.width,
        "hidden": 4 * scale.width,
        "layers": scale.layers,
        "heads": scale.heads,
    }
    long: dict[str, Any] = {"tokens": scale.long, **gpt}
    short: dict[str, Any] = {"tokens": scale.short, **gpt}
    shape: dict[str, Any] = {**gpt, "tokens": scale.short, "layers": scale.blocks}
    if scale is FULL:  # 393 M parameters a block
        shape = {"tokens": 768, "width": 5120, "hidden": 28160, "layers": 48, "heads": 40}
    blocks: dict[str, Any] = {**shape, "checkpoint": True, "warm": 6, "steps": 5}
    few: dict[str, Any] = {"warm": 2, "steps": 4}
    ours: dict[str, Any] = {"kind": "ours", "offload": True}

    made = [Case("plain 8192", **long, seconds=17)]
    lora: dict[str, Any] = {**long, **ours, "base": "plain 8192"}
    activations: dict[str, Any] = {**long, "kind": "ours", "base": "plain 8192"}
    of_checkpoint: dict[str, Any] = {"base": "plain checkpoint", "needs": ("plain 8192",)}
    for mode in modes:
        made += [
            Case(f"{mode} all fits", high=40, **lora, mode=mode),
            *(Case(f"{mode} {high}", high=high, **lora, mode=mode) for high in (12, 10, 8)),
        ]
    made += [Case("plain 1024", **short, seconds=12)]
    for mode in modes:
        made.append(
            Case(f"{mode} 1024 at 4", high=4, **short, **ours, base="plain 1024", mode=mode)
        )
    made += [
        Case("plain checkpoint", **long, checkpoint=True, needs=("plain 8192",), seconds=20),
        Case("ring checkpoint", **long, kind="ring", checkpoint=True, **of_checkpoint),
    ]
    for mode in modes:
        as_ring: dict[str, Any] = {
            "as_much_as": "ring checkpoint",
            "checkpoint": True,
            **of_checkpoint,
        }
        made.append(Case(f"{mode} checkpoint as ring", **long, **ours, **as_ring, mode=mode))
    made.append(Case("plain 48 blocks", **blocks, seconds=30))
    for mode in modes:
        held: dict[str, Any] = {**blocks, **ours, "high": 20 * 1.073741824, "mode": mode}
        held["base"] = "plain 48 blocks"
        made += [
            Case(f"{mode} 48 blocks", **held, seconds=55),
            Case(f"{mode} 48 blocks at 25 GB/s", **held, link=25, seconds=75),
        ]
    full: dict[str, Any] = {**long, "full": True}
    of_full: dict[str, Any] = {"base": "plain full"}
    made.append(Case("plain full", **full))
    for mode in modes:
        of_mode: dict[str, Any] = {**of_full, "mode": mode, "expandable": mode == "native"}
        made.append(Case(f"{mode} full 24", high=24, **full, **ours, **of_mode))
    made.append(Case("fsdp2 full", **{**full, **few}, kind="fsdp2", **of_full, seconds=75))
    made.append(Case("torchao full", **{**full, **few}, kind="torchao", **of_full, seconds=50))
    for mode in modes:
        as_torchao: dict[str, Any] = {
            "as_much_as": "torchao full",
            **of_full,
            "mode": mode,
            "expandable": mode == "native",
            "seconds": 45,
        }
        made.append(Case(f"{mode} full as torchao", **full, **ours, **as_torchao))
    forward: dict[str, Any] = {**long, "forward_only": True, "warm": 4}
    made.append(Case("plain forward", **forward, seconds=12))
    of_forward: dict[str, Any] = {"base": "plain forward"}
    for mode in modes:
        made.append(Case(f"{mode} forward 3", high=3, **forward, **ours, **of_forward, mode=mode))
    made.append(
        Case(
            "accelerate forward", **{**forward, **few}, kind="accelerate", **of_forward, seconds=30
        )
    )
    for level in ("block", "leaf"):
        kind: dict[str, Any] = {"kind": f"diffusers {level}", **few, "seconds": 25}
        made += [
            Case(f"diffusers {level}", **{**long, **kind}, checkpoint=True, **of_checkpoint),
            Case(f"diffusers {level} forward", **{**forward, **kind}, **of_forward),
        ]
    made += [
        Case(f"{mode} as diffusers", **lora, as_much_as="diffusers block", mode=mode)
        for mode in modes
    ]
    for high in (12, 10, 8):
        made += [
            Case(f"{mode} activations {high}", high=high, **activations, mode=mode)
            for mode in modes
        ]
    made = [dataclasses.replace(one, high=one.high / scale.budget) for one in made]
    if scale is TINY:  # to try the program
        made = [dataclasses.replace(one, warm=2, steps=2) for one in made]
    return {one.name: one for one in made}


def chosen(cases: dict[str, Case], names: list[str] | None) -> list[Case]:
    """Those asked for, by name or by what follows the mode, and what they need, in order.

    ValueError: one is not known.
    """
    if names is None:
        return list(cases.values())
    known = {key for one in cases.values() for key in (one.name, one.short)}
    if unknown := set(names) - known:
        raise ValueError(f"no case {sorted(unknown)[0]!r}")
    found: dict[str, None] = {}

    def take(name: str) -> None:
        for other in cases[name].before():
            take(other)
        found[name] = None

    for one in cases.values():
        if one.name in names or one.short in names:
            take(one.name)
    return [cases[name] for name in found]
