"""What limited a run, and what to change: pure functions from telemetry to findings."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence

from stagehand_alloc._books.runs import Run, counts, number
from stagehand_alloc._books.table import proposed
from stagehand_alloc._settings.sizes import format_bytes as size

# Shares of a step's time, or of what is used, from which on something is worth saying.
_WORTH = 0.03
_MUCH = 0.10
_WASTE = 0.15
_BUSY = 0.80  # of a step's time: a lane is as good as never idle
_FEW_KINDS = 0.25  # of the settled steps
_ROOM = 0.90  # a peak below this part of high leaves room
_MOSTLY = 0.50  # of what comes to the GPU

BACK = "back to the GPU"  # the lane that weights come on, too
_APART = 0.10  # of a step: one rank is slower than another


class Level(enum.Enum):
    """How a finding is meant."""

    PROBLEM = "problem"
    HINT = "hint"
    GOOD = "good"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a run shows; `kind` names it for programs."""

    kind: str
    level: Level
    what: str
    todo: str


# Why a tensor was passed through, where the user can do something about it.
_PASSED = {
    "foreign_storage": (
        "their memory does not come from the allocator that the pool watches",
        "Make the pool on the device that trains; give tensors of other libraries a clone().",
    ),
    "older_than_pool": (
        "they were made before the pool was entered",
        "Enter the pool before the forward pass begins.",
    ),
    "subclass": (
        "they are tensor subclasses",
        "Nothing: subclasses stay on the GPU.",
    ),
}
_MANY_PASSED = 0.5  # of all that reached the pool


def find(run: Run) -> list[Finding]:
    """All that one run shows, problems first. Never empty."""
    found = [finding for look in _LOOKS for finding in look(run)]
    order = list(Level)
    found.sort(key=lambda finding: order.index(finding.level))
    return found or [_fine(run)]


def across(runs: Sequence[Run]) -> list[Finding]:
    """What only shows where ranks and devices stand side by side."""
    return [*_times_apart([run for run in runs if run.step_ms() > 0]), *_budgets_apart(runs)]


def _budgets_apart(runs: Sequence[Run]) -> Iterator[Finding]:
    highs = {run.name: int(run.last("high")) for run in runs}
    if len(set(highs.values())) < 2:
        return
    least, most = min(highs, key=highs.__getitem__), max(highs, key=highs.__getitem__)
    yield Finding(
        "budgets_apart",
        Level.HINT,
        f"Budgets differ: {least} has {size(highs[least])} and {most} {size(highs[most])}.",
        "Give all ranks the same high, unless one of them holds more than the others.",
    )


def _times_apart(timed: Sequence[Run]) -> list[Finding]:
    if len(timed) < 2:
        return []
    slowest = max(timed, key=Run.step_ms)
    quickest = min(timed, key=Run.step_ms)
    if slowest.step_ms() - quickest.step_ms() <= _APART * quickest.step_ms():
        return []
    tight = ""
    if 0 < slowest.last("high") < quickest.last("high"):
        tight = " Its budget is the smaller one: raise it."
    return [
        Finding(
            "rank_apart",
            Level.PROBLEM,
            f"{slowest.name} takes {slowest.step_ms():.4g} ms a step and {quickest.name} "
            f"{quickest.step_ms():.4g} ms. Where they train together, all wait for the slowest.",
            f"Look at the page of {slowest.name}: it says what holds it up.{tight}",
        )
    ]


def _nothing_saved(run: Run) -> Iterator[Finding]:
    if run.total("activations_saved") == 0 and not run.has_weights():  # those stream without too
        yield Finding(
            "nothing_saved",
            Level.PROBLEM,
            f"No tensor was saved inside the pool in {len(run.steps)} steps, so nothing could "
            "be moved.",
            "Put the forward pass inside the `with`, or use pool.attach(model). Another "
            "offloading, such as activation_offloading=True, must be off.",
        )


def _never_pressed(run: Run) -> Iterator[Finding]:
    high, peak = run.last("high"), _peak(run)
    used = sum(run.total(f"{what}_bytes") for what in ("spill", "dropped"))
    streamed = run.typical("weights_loads") > 0
    if run.total("activations_saved") == 0 or used > 0 or streamed or not 0 < peak < high:
        return
    yield Finding(
        "never_pressed",
        Level.GOOD,
        f"Memory stayed below high: at most {size(int(peak))} of {size(int(high))}. Nothing was "
        "moved, and training ran as without a pool.",
        "Use a larger batch or a longer sequence, or lower high. " + _other_budgets(run),
    )


def _other_budgets(run: Run) -> str:
    """How to learn what they would cost."""
    if run.has_weights():
        return "Try other budgets for some steps each: with offloaded weights none is forecast."
    return "`python -m stagehand_alloc advise` says what other budgets would cost."


def _over_high(run: Run) -> Iterator[Finding]:
    over = [step for step in run.steps if number(step, "overshoot_bytes") > 0]
    if not over:
        return
    high = int(run.last("high"))
    worst = max(number(step, "mapped_peak") for step in over)
    live = max(number(step, "overshoot_live") for step in over)
    settled = [step for step in run.settled() if number(step, "overshoot_bytes") > 0]
    if live > high or (settled and any(s.get("plan_state") == "declined" for s in settled)):
        needed = size(int(live)) if live > high else f"more than {size(high)}"
        yield Finding(
            "live_above_high",
            Level.PROBLEM,
            f"high={size(high)} cannot be held: {needed} are in use at one moment, by weights, "
            f"gradients, optimizer state and the layer that runs. Memory went up to "
            f"{size(int(worst))}.",
            f"Raise high above {needed}, or use less at once: a smaller batch or sequence, "
            "zero_grad(set_to_none=True), a fused or sharded optimizer."
            if live > high
            else "Raise high, or use less at once: a smaller batch or sequence, a sharded "
            "optimizer.",
        )
    elif not settled:
        yield Finding(
            "over_high_at_first",
            Level.HINT,
            f"Memory went over high in {len(over)} of the first steps, up to {size(int(worst))}, "
            f"and no more after that: a first step of its kind has no plan.",
            "Nothing, where the device has that much. Else set limit, or lower high by "
            f"{size(int(worst) - high)}, or use mode='allocator'.",
        )
    else:
        yield Finding(
            "over_high",
            Level.PROBLEM,
            f"Memory went over high in {len(settled)} of {len(run.settled())} settled steps, up "
            f"to {size(int(worst))}.",
            _hold(run),
        )


def _hold(run: Run) -> str:
    """What to do where memory goes over high in each step."""
    if run.steps[-1].get("mode") == "allocator":
        return "Raise high by that much, or give recompute=model: too little can leave at once."
    return (
        "Set PYTORCH_ALLOC_CONF=expandable_segments:True, or use mode='allocator', which "
        "holds high to the byte."
    )


def _late(run: Run) -> Iterator[Finding]:
    step, late = run.step_ms(), waits_ms(run)
    if step <= 0 or late <= _WORTH * step:
        return
    share = late / step
    level = Level.PROBLEM if share > _MUCH else Level.HINT
    busy = max(share for _, _, _, share in lanes(run))
    if weights_share(run) > _MOSTLY:
        yield _late_weights(run, level, late, busy)
        return
    drops = run.total("drops") > 0
    recompute = "" if drops else ", or set recompute=model, so that less has to be copied"
    if busy > _BUSY:
        yield Finding(
            "link_full",
            level,
            f"The link is the limit: it is busy for {_percent(busy)} of a step, and the GPU waits "
            f"{late:.3g} ms of {step:.3g} ms for copies.",
            f"Raise high{recompute}. A larger batch at the same high does not help.",
        )
    else:
        yield Finding(
            "late_copies",
            level,
            f"The GPU waits {late:.3g} ms of {step:.3g} ms ({_percent(share)}) for copies, though "
            f"the link is busy for {_percent(busy)} of a step: they are needed sooner than they "
            "can be there.",
            f"Raise high a little{recompute}. In the first 40 steps plans are still tried.",
        )


def _late_weights(run: Run, level: Level, late: float, busy: float) -> Finding:
    """The GPU waits for copies, and most of what comes to it are weights."""
    step, loads = run.step_ms(), run.typical("weights_loads")
    come = (
        f"{size(int(run.typical('weights_loaded_bytes')))} of weights come in {loads:.0f} loads a "
        f"step, {_percent(weights_share(run))} of what comes to the GPU"
    )
    waits = f"the GPU waits {late:.3g} ms of {step:.3g} ms ({_percent(late / step)}) for copies"
    if busy > _BUSY:
        return Finding(
            "weights_link_full",
            level,
            f"The link is the limit, by the weights: {come}, it is busy for {_percent(busy)} of a "
            f"step, and {waits}.",
            "Raise high, so that more blocks stay, or load the frozen weights in 8 or 4 bits. A "
            "larger batch at the same high makes each load serve more, as long as what it saves "
            "fits.",
        )
    begun = run.typical("weights_late")
    return Finding(
        "weights_late",
        level,
        f"Weights come late: {come}, {begun:.0f} of them not begun before their block was reached. "
        f"The link is busy for {_percent(busy)} of a step, and {waits}.",
        "Raise high by a block or two: the next ones come as soon as there is room for them.",
    )


def _made_again(run: Run) -> Iterator[Finding]:
    shape, step = run.shape, run.step_ms()
    again = 0.0 if shape is None else max(shape.again_ms, shape.plan.again_ms)
    if step > 0 and again > _MUCH * step:
        yield Finding(
            "much_made_again",
            Level.HINT,
            f"{again:.3g} ms of {step:.3g} ms ({_percent(again / step)}) go into making again what "
            "was dropped.",
            "Raise high: what takes longest to make again for its bytes is kept first.",
        )


def _host_waits(run: Run) -> Iterator[Finding]:
    waits = run.typical("host_waits")
    step = run.step_ms()
    causes = {name: run.typical(name) for name in HOST_WAITS}
    waited = sum(causes.values())
    if waits < 1 or (waited > 0 and waited <= _WORTH * step):
        return
    worst = max(causes, key=lambda name: causes[name])
    what = f"The host waits {waits:.0f} times a step"
    told = f", {waited:.3g} ms in all, most of it {HOST_WAITS[worst]}" if waited > 0 else ""
    yield Finding(
        "host_waits",
        Level.HINT,
        f"{what}{told}. Meanwhile it queues no work for the GPU.",
        "Set PYTORCH_ALLOC_CONF=expandable_segments:True in mode native, and give the pinned "
        "pool what it needs from the start: pinned_pool_classes_mb and slabs_per_class below.",
    )


def _pageable(run: Run) -> Iterator[Finding]:
    most = run.most("pageable_bytes")
    if most > 0:
        yield Finding(
            "pageable",
            Level.PROBLEM,
            f"Pinned host memory ran out: up to {size(int(most))} went to pageable memory, for "
            "which the host waits.",
            'Raise host_limit (config={"host_limit": ...}), raise high, or free host memory.',
        )


def _pinned_waste(run: Run) -> Iterator[Finding]:
    pinned, waste = run.last("pinned_bytes"), run.last("pinned_waste_bytes")
    if pinned > 0 and waste > _WASTE * pinned:
        yield Finding(
            "pinned_waste",
            Level.HINT,
            f"{size(int(waste))} of {size(int(pinned))} pinned memory is empty: the slabs are of "
            "other sizes than the tensors.",
            f"Set {proposed(run) or 'other pinned_pool_classes_mb'}.",
        )


def _kinds(run: Run) -> Iterator[Finding]:
    settled = run.settled()
    unplanned = [s for s in settled if s.get("plan_state") in ("learning", "diverged")]
    if len(unplanned) > _FEW_KINDS * len(settled) and run.total("spill_bytes") > 0:
        yield Finding(
            "unlike_steps",
            Level.HINT,
            f"{len(unplanned)} of {len(settled)} settled steps were like none before, so no plan "
            "fits them: more is moved than has to be.",
            "Pad or bucket lengths to fewer sizes, such as multiples of 256.",
        )


def _passed(run: Run) -> Iterator[Finding]:
    passed: dict[str, int] = {}
    for step in run.settled():
        for reason, count in counts(step.get("passed_through")).items():
            passed[reason] = passed.get(reason, 0) + count
    saved = sum(number(step, "activations_saved") for step in run.settled())
    for reason, (why, todo) in _PASSED.items():
        count = passed.get(reason, 0)
        if saved > 0 and count > _MANY_PASSED * (saved + count):
            a_step = round(count / len(run.settled()))
            yield Finding(
                f"passed_{reason}",
                Level.HINT,
                f"{a_step} saved tensors a step stay on the GPU: {why}.",
                todo,
            )


_LOOKS: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    _nothing_saved,
    _over_high,
    _pageable,
    _late,
    _made_again,
    _host_waits,
    _pinned_waste,
    _kinds,
    _passed,
    _never_pressed,
)

HOST_WAITS = {
    "pinning_wait_ms": "for pinned memory to be made",
    "copy_wait_ms": "for copies",
    "gpu_wait_ms": "for all work of the GPU",
}


def _fine(run: Run) -> Finding:
    peak, high, step = _peak(run), run.last("high"), run.step_ms()
    waits = (
        f", and the GPU waits {waits_ms(run):.3g} ms of {step:.3g} ms for copies"
        if step > 0
        else ""
    )
    budget = f" of {size(int(high))}" if high > 0 else ""
    return Finding(
        "held",
        Level.GOOD,
        f"The budget was held: at most {size(int(peak))}{budget}{waits}.",
        "There may be room for a larger batch or sequence at the same high. " + _other_budgets(run),
    )


def _peak(run: Run) -> float:
    return run.most("mapped_peak") or run.most("vram_peak_mb") * (1 << 20)


def weights_share(run: Run) -> float:
    """Of the bytes that come to the GPU in a settled step, those that are weights."""
    moved = lanes(run)[1][1]
    return run.typical("weights_loaded_bytes") / moved if moved > 0 else 0.0


def waits_ms(run: Run) -> float:
    """Of a settled step: the GPU waits for copies, as the step clock saw, else as was counted."""
    measured = 0.0 if run.shape is None else run.shape.waited_ms
    return max(measured, run.typical("stall_time_ms"))


def lanes(run: Run) -> list[tuple[str, float, float, float]]:
    """Of each direction: its name, the bytes that a settled step moves, the bytes a second that it
    carries, and the share of the step for which it is busy. 0 where nothing was measured."""
    found = []
    for name, fields, rate_field in (
        ("to the host", ("d2h_bytes", "spill_bytes"), "d2h_rate"),
        (BACK, ("h2d_bytes", "restore_bytes"), "h2d_rate"),
    ):
        moved = next((one for one in map(run.typical, fields) if one > 0), 0.0)
        rate, step = rate_of(run, rate_field), run.step_ms()
        share = moved / rate / (step / 1e3) if rate > 0 and step > 0 else 0.0
        found.append((name, moved, rate, share))
    return found


def rate_of(run: Run, field: str) -> float:
    """Bytes a second that a lane carries, as was measured; 0 where it was not."""
    told = run.last(field)
    known = 0.0 if run.shape is None else float(getattr(run.shape, field))
    return told or known


def _percent(share: float) -> str:
    return f"{min(share, 1):.0%}"
