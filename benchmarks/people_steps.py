"""Of steps on one GPU: what telemetry costs, and whether `advise` foresees other budgets."""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from harness import Row
from recompute import TIMED, Bench
from shapes import MODELS, TINY_GPT

LISTENING = 1.001
SHARE = 0.75  # of the activation memory, where telemetry is timed
ADVISED = ("gpt", "llama", "vit")
SHARES = (0.8, 0.65, 0.5)
STEP_OFF = 0.10  # how far off a forecast may be
BYTES_OFF = 0.05
SETTLING = 40  # steps, by which plans were tried out
ROOM_STEPS = 12  # of the run that is advised on: a kind of step must be known, and timed


def _bench(name: str, simulated: bool) -> Bench:
    return Bench(*(("gpt", TINY_GPT) if simulated else MODELS[name]), simulated)


Found = Iterator[tuple[list[Row], dict[str, Any]]]


def telemetry(simulated: bool, pairs: int) -> Found:
    """Steps in turn, with telemetry and a listener and without; each is ended as it is timed."""
    import stagehand_alloc

    bench = _bench("gpt", simulated)
    high = bench.start + int(SHARE * (bench.peak - bench.start))
    heard: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "steps.jsonl"
        pools = {
            "off": stagehand_alloc.pool(high=high),
            "on": stagehand_alloc.pool(
                high=high,
                telemetry=path,
                on_step=lambda step: heard.append(step.numbers()["spill_bytes"]),
            ),
        }

        def timed(which: str) -> float:
            pool = pools[which]

            def end() -> None:  # as `Pool.step_stats` does, without making its numbers
                assert pool._device is not None
                pool._device.steps.end_if_over(pool)

            return bench.step(pool, end)

        for _ in range(3 if simulated else 12):  # plans are made, and tried
            timed("off"), timed("on")
        found: list[dict[str, float]] = []
        for at in range(pairs):
            order = ("off", "on") if at % 2 else ("on", "off")
            found.append({which: timed(which) for which in order})
    ratio = statistics.median(one["on"] / one["off"] for one in found)
    yield (
        [
            Row("telemetry and a listener, on over off, a step", ratio, at_most=LISTENING),
            Row("telemetry: steps heard of", len(heard), at_least=pairs),
        ],
        {"pairs": found, "high": high},
    )


def advise(simulated: bool, models: Sequence[str]) -> Found:
    """What `advise` says of each budget, from a run with room, beside steps inside that budget.

    Both pools are as they are by default. Bytes are those that leave, by a copy or dropped: which
    of the two costs less is often nearly the same, so how they are shared out is reported only.
    """
    for name in models:
        yield _foreseen(name, simulated)  # in a frame of its own: a model is gone before the next


def _foreseen(name: str, simulated: bool) -> tuple[list[Row], dict[str, Any]]:
    bench = _bench(name, simulated)
    highs = [bench.start + int(share * (bench.peak - bench.start)) for share in SHARES]
    told, plain_ms = _advised(bench, highs, simulated)
    measured = [_measured(bench, high, simulated) for high in highs]
    plain = abs(told["plain_ms"] / plain_ms - 1)
    rows = [Row(f"advise, {name}: a step with room off by", plain)]
    for share, said, was in zip(SHARES, told["budgets"], measured, strict=True):
        of = f"advise, {name}, {share:.0%} of the activation memory"
        leave = was["moved"] + was["dropped"]
        step = abs(said["step_ms"] / was["step_ms"] - 1)
        off = abs(said["moved"] + said["dropped"] - leave) / max(leave, 1)
        rows += [
            Row(f"{of}: step time off by", step, at_most=STEP_OFF),
            Row(f"{of}: bytes that leave off by", off, at_most=BYTES_OFF),
            Row(f"{of}: of those moved, told", said["moved"] / max(leave, 1)),
            Row(f"{of}: of those moved, measured", was["moved"] / max(leave, 1)),
        ]
    return rows, {
        name: {
            "advised": told,
            "measured": measured,
            "plain_ms": plain_ms,
            "start": bench.start,
            "peak": bench.peak,
        }
    }


def _advised(bench: Bench, highs: list[int], simulated: bool) -> tuple[dict[str, Any], float]:
    """What is told, and what a step of that run took."""
    import stagehand_alloc
    from stagehand_alloc._books import telemetry as books

    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "steps.jsonl")
        pool = stagehand_alloc.pool(high=2 * bench.peak, telemetry=path)
        times = [_whole(bench, pool) for _ in range(ROOM_STEPS)]
        pool.step_stats()  # ends the last one
        books.close()
        words = [sys.executable, "-m", "stagehand_alloc", "advise", path, "--json"]
        listed = ",".join(map(str, highs))
        rates = ",".join(str(round(rate)) for rate in _link(simulated))
        done = subprocess.run(
            [*words, "--high", listed, "--link", rates],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"advise said: {done.stderr}")
    (found,) = json.loads(done.stdout)
    return dict(found), statistics.median(times[ROOM_STEPS // 2 :])


def _whole(bench: Bench, pool: Any) -> float:
    """A step and all that is around it, in ms: what telemetry's wall time is of."""
    began = time.perf_counter()
    bench.step(pool)
    return (time.perf_counter() - began) * 1e3


def _link(simulated: bool) -> tuple[float, float]:
    from stagehand_alloc._cli import link

    rates = link.measure(simulated)[0]
    return rates.to_host, rates.to_device


def _measured(bench: Bench, high: int, simulated: bool) -> dict[str, Any]:
    import stagehand_alloc

    pool = stagehand_alloc.pool(high=high)
    for _ in range(SETTLING):
        _whole(bench, pool)
    before = pool.stats()
    times = [_whole(bench, pool) for _ in range(TIMED)]
    since = pool.stats().since(before)
    return {
        "high": high,
        "step_ms": statistics.median(times),
        "moved": since.evicted_bytes / len(times),
        "dropped": since.dropped_bytes / len(times),
        "over": since.overshoot_bytes,
    }
