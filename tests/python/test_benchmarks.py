"""The benchmarks' arithmetic, and each of them whole with tiny models on the simulated GPU."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(FOLDER))  # last: its models.py is not the tests' own

import modes  # noqa: E402
import plot  # noqa: E402
import suite  # noqa: E402
import transfers  # noqa: E402
from digest import digest, seen_by_cublas  # noqa: E402
from harness import CUBLAS, Row, Worker  # noqa: E402
from host_samples import _library, described, sampled  # noqa: E402
from measures import (  # noqa: E402
    GIB,
    Budget,
    Link,
    agree,
    bound_ms,
    budget_of_need,
    budget_of_share,
    percentile,
    ratio_in_turn,
    window_bytes,
)

LINK = Link(d2h=50e9, h2d=25e9)
PROGRAMS = (
    "main_job.py",
    "transfers.py",
    "modes.py",
    "suite.py",
    "workloads.py",
    "micro.py",
    "weights.py",
)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


# --- Arithmetic


def test_a_share_is_of_what_lies_between_start_and_peak() -> None:
    assert budget_of_share(4 * GIB, 24 * GIB, 0.5) == Budget(14 * GIB, 13 * GIB)


def test_a_small_model_has_a_tenth_of_its_activations_between_the_watermarks() -> None:
    assert budget_of_share(1000, 2000, 0.75) == Budget(1750, 1650)


def test_a_budget_by_need_lets_so_many_bytes_not_fit() -> None:
    assert budget_of_need(1000, 2000, 250).high == 2000 - 250


def test_a_need_beyond_reason_leaves_the_least_share() -> None:
    assert budget_of_need(1000, 2000, 5000).high == 1250


def test_the_window_is_what_the_link_takes_away_during_forward() -> None:
    assert window_bytes(LINK, 80) == pytest.approx(4e9)


def test_what_fits_in_the_window_costs_nothing_in_the_bound() -> None:
    assert bound_ms(4e9, LINK, 80, 160) == pytest.approx(80 + 160)


def test_the_bound_takes_each_direction_with_its_own_bandwidth() -> None:
    assert bound_ms(8e9, LINK, 80, 160) == pytest.approx(160 + 320)


def test_a_ratio_is_the_median_of_the_ratios_inside_a_round() -> None:
    # The second round ran on a slower clock: its ratio counts, not its times.
    assert ratio_in_turn([[1, 2, 9], [20], [3]], [[1], [10], [1]]) == 2


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(v) for v in range(1, 1001)]
    assert [percentile(values, at) for at in (50, 99, 99.9)] == [500, 990, 999]
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf, math.inf], [1.0, 1.1]])
def test_losses_that_differ_or_are_not_finite_do_not_agree(values: list[float]) -> None:
    assert not agree(values, 1e-3)


def test_losses_equal_within_the_tolerance_agree() -> None:
    assert agree([1.0, 1.0005, 1.0], 1e-3)


def test_a_row_holds_at_its_bar_and_not_past_it() -> None:
    assert Row("slower", 1.01, at_most=1.01).holds
    assert not Row("slower", 1.011, at_most=1.01).holds
    assert not Row("rate", 11.9, at_least=12).holds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_tells_bits_and_their_places_apart(dtype: torch.dtype) -> None:
    x = torch.arange(6, dtype=dtype)
    other = {digest(y) for y in ([x.flip(0)], [-x], [x[3:], x[:3]], [x, x], [x[:5]])}
    assert digest([x.clone()]) == digest([x])
    assert len(other | {digest([x])}) == 6


def test_samples_count_a_library_for_the_innermost_frame_and_a_function_once_a_sample() -> None:
    found = described(
        [
            [("libc", "malloc"), ("torch", "mm"), ("torch", "mm")],
            [("torch", ""), ("torch", "mm")],
        ]
    )
    assert found["libraries"] == {"libc": 0.5, "torch": 0.5}
    assert found["functions"] == {"torch: mm": 1.0, "libc: malloc": 0.5}
    assert found["samples"] == 2
    assert described([]) == {"seen": False, "why": "there were no samples"}


def test_the_host_is_seen_where_its_time_goes() -> None:
    with sampled() as found:
        began = time.process_time()
        while time.process_time() - began < 0.2:
            torch.randn(256, 256) @ torch.randn(256, 256)
    assert found["samples"] >= 10
    assert any("libtorch" in name for name in found["libraries"])
    assert any("at::" in name for name in found["functions"])


def test_a_sample_that_cannot_be_unwound_ends_no_process() -> None:
    with sampled():
        assert _library().survives_a_fault() == 1
    code = (
        "import ctypes, faulthandler; from host_samples import sampled\n"
        "faulthandler.enable()\n"
        "with sampled(): ctypes.string_at(0)"
    )
    others = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert others.returncode == -signal.SIGSEGV  # what is not ours is left to whom it was for
    assert "Fatal Python error" in others.stderr


def test_torch_reads_the_setting_of_cublas_once_and_not_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in CUBLAS.items():
        monkeypatch.setenv(name, value)
    seen_by_cublas(torch.device("cpu"))
    assert not CUBLAS.keys() & os.environ.keys()


def test_a_digest_tells_a_zero_from_a_negative_zero() -> None:
    assert digest([torch.zeros(3)]) != digest([-torch.zeros(3)])


# --- What is claimed


def measured() -> transfers.Measured:
    found = transfers.Measured(links=[LINK, LINK])
    found.memory["unbudgeted"] = {"start": 0, "peak": 20 * 10**9, "gradient_norm": 1.0}
    for name, ms in (("native", 240.0), ("50", 480.0)):
        found.wall_ms[name] = [[ms, ms], [ms, ms]]
        found.forward_ms[name] = [[80.0], [80.0]]
        found.backward_ms[name] = [[160.0], [160.0]]
    found.budgets["50"] = Budget(12 * 10**9, 11 * 10**9)
    found.gained["50"] = {"evicted_bytes": 33 * 10**9, "stall_count": 2, "prefetch_lates": 1}
    return found


def test_counters_are_per_timed_step() -> None:
    assert measured().per_step("50", "evicted_bytes") / measured().need("50") == 33 / 4 / 8


def test_a_tight_budget_is_held_against_the_bound_and_not_against_native() -> None:
    assert measured().bound_ratio("50") == pytest.approx(1.0)  # 8 GB: 160 ms out, 320 ms back
    assert measured().native_ratio("50") == pytest.approx(2.0)


def test_a_late_restore_counts_whether_it_was_prefetched_or_not() -> None:
    assert transfers.late_row({"gpt": measured()}).value == 2


def test_losses_unlike_plain_torchs_are_named() -> None:
    found = measured()
    found.losses = {"native": [1.0], "50": [1.2]}
    assert "losses differ" in transfers.disagreements({"gpt": found})[0]


def modes_measured() -> modes.Measured:
    """Native mode as good as the process allocator, and 10 bytes over high as it learns."""
    found = modes.Measured(budgets={"75": Budget(1000, 900)})
    counters = {"overshoot_bytes": 0, "evicted_bytes": GIB}
    for name, phase in (
        ("torch", "free"),
        ("native", "free"),
        ("allocator", "75"),
        ("native", "75"),
    ):
        key = modes.key_of(name, phase)
        found.wall_ms[key] = [[100.0], [100.0]]
        found.gained[key] = dict(counters)
        found.learning[key] = {"wall_ms": 200.0, **counters}
        if phase != "free":
            found.settling[key] = {"wall_ms": [110.0], "gained": dict(counters)}
        found.life[key] = {"peak": 1000, "mapped_peak": 1000, "largest_segment": 10}
        found.memory[key] = {"mapped_peak": 1000}
        found.digests[key] = {"steps": [[1.5, "ab"], [1.5, "ab"]]}
    found.learning["native 75"]["overshoot_bytes"] = 10
    found.triggers["native 75"] = ["loaded"]
    return found


def missed(measured: modes.Measured) -> list[str]:
    return [row.claim for row in modes.rows_of(measured) if not row.holds]


def test_a_mode_at_its_bars_misses_none() -> None:
    rows = modes.rows_of(modes_measured())
    assert [row.claim for row in rows if not row.holds] == []
    assert sum(row.bar != "reported" for row in rows) == 6
    assert modes.wrong_of(modes_measured()) == []


def test_a_row_without_a_bar_is_reported_and_always_holds() -> None:
    row = Row("evicted", 7)
    assert row.as_dict() == {"claim": "evicted", "value": 7, "bar": "reported", "holds": True}


@pytest.mark.parametrize("where", ["counted", "while plans are tried", "seen"])
def test_a_byte_over_high_in_planned_steps_is_missed(where: str) -> None:
    found = modes_measured()
    if where == "counted":
        found.gained["native 75"]["overshoot_bytes"] = 1
    elif where == "while plans are tried":
        found.settling["native 75"]["gained"]["overshoot_bytes"] = 1
    else:
        found.memory["native 75"]["mapped_peak"] = 1001
    assert missed(found) == ["budget 75 %: bytes over high in planned steps, native"]


def test_a_learning_step_may_go_over_high_by_the_largest_segment_only() -> None:
    found = modes_measured()
    found.learning["native 75"]["overshoot_bytes"] = 11
    assert [claim.split(" / ")[0] for claim in missed(found)] == [
        "budget 75 %: bytes over high in the learning step"
    ]


def test_one_step_unlike_plain_torchs_is_enough_to_be_named() -> None:
    found = modes_measured()
    found.digests["native 75"] = {"steps": [[1.5, "ab"], [1.5, "ac"]]}
    assert modes.unlike_torch(found) == ["native 75"]
    assert len(missed(found)) == 1
    assert "losses or gradients differ" in modes.wrong_of(found)[0]


def test_nan_is_like_nothing() -> None:
    found = modes_measured()
    for one in found.digests.values():
        one["steps"] = [[math.nan, "ab"]]
    assert set(modes.unlike_torch(found)) == set(found.digests)


def test_native_mode_without_its_trigger_is_named() -> None:
    found = modes_measured()
    found.triggers["native 75"] = ["no compiler"]
    assert modes.wrong_of(found) == ["native 75: the trigger library: no compiler"]


def test_what_failed_is_forgotten_whole() -> None:
    found = modes_measured()
    found.forget("native 75")
    assert "native 75" not in json.dumps(modes.dataclasses.asdict(found))


# --- The programs


def test_every_program_says_that_there_is_no_gpu() -> None:
    for program in PROGRAMS:
        done = run(program)
        if done.returncode == 0:
            pytest.skip("this machine has a GPU")
        assert done.returncode == 3
        assert "no GPU was found" in done.stderr


def test_the_main_job_measures_what_it_is_told(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "main-job.json"
    chosen = ("--only", "native,ours_50", "--rounds", "1")
    done = run("main_job.py", "--simulated", *chosen, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    claims = [row["claim"] for row in json.loads(out.read_text())["rows"]]
    assert "budget 50% of the activation memory: step time / native" in claims


def test_transfers_measures_every_row_of_its_sections(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "transfers.json"
    done = run("transfers.py", "--simulated", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 10
    assert result["failed"] == {}
    assert set(result["rows"][0]) == {"claim", "value", "bar", "holds"}


def test_modes_measures_what_needs_no_gpu_and_compares_gradients(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "modes.json"
    done = run("modes.py", "--simulated", "--only", "75", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["failed"], result["wrong"]) == ({}, [])
    digests = result["raw"]["digests"]
    assert set(digests) == {"torch free", "allocator free", "torch 75", "allocator 75"}
    assert digests["allocator 75"]["gained"]["evicted_bytes"] > 0
    assert len({json.dumps(step) for one in digests.values() for step in one["steps"]}) == 1


Sent = list[tuple[str, str, Any]]  # the worker's name, the command, its mode


def listen(monkeypatch: pytest.MonkeyPatch, before: Callable[[Worker, str, Any], None]) -> Sent:
    """What is asked of workers from here on; `before` is called with each before it is sent."""
    sent: Sent = []
    send = Worker.send

    def heard(worker: Worker, command: str, **arguments: Any) -> None:
        before(worker, command, arguments.get("mode"))
        sent.append((worker.name, command, arguments.get("mode")))
        send(worker, command, **arguments)

    monkeypatch.setattr(Worker, "send", heard)
    return sent


def kill(worker: Worker) -> None:
    os.kill(worker._process.pid, signal.SIGKILL)
    while worker.alive:
        time.sleep(0.001)


def test_the_suite_goes_on_where_a_variant_ends_its_process(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(worker: Worker, command: str, mode: Any) -> None:
        if command == "memory" and mode in ("save_on_cpu", "ours:0.5"):
            kill(worker)

    sent = listen(monkeypatch, before)
    code = suite.main(["--simulated", "--model", "adapters", "--out", str(tmp_path)])
    assert code == 0
    result = json.loads((tmp_path / "suite-cpu-1.json").read_text())
    assert result["asked"] == ["adapters"]
    model = result["models"]["adapters"]
    ended = set(model["unavailable"]) - {"torchtune", "trl"}  # where they are not installed
    assert ended == {"save_on_cpu", "ours:0.5"}
    assert "host memory ran out" in model["unavailable"]["save_on_cpu"]
    modes = {point["mode"] for point in model["points"]}
    assert {"native", "checkpoint:1.0", "ours:0.6", "ours:0.35"} <= modes
    assert not modes & {"save_on_cpu", "ours:0.5"}
    # Plain torch never runs beside pinned memory of ours that holds nothing.
    pinned = False
    for name, command, _ in sent:
        if name == "adapters ours":
            pinned = command != "release_pinned" and (pinned or command in ("steps", "memory"))
        assert not (pinned and name == "adapters torch" and command in ("steps", "memory"))


@pytest.fixture(scope="module")
def failing_suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    """Where a suite of two models wrote, and what stood there when the second one failed."""
    folder = tmp_path_factory.mktemp("suite")
    written = []

    def before(worker: Worker, command: str, mode: Any) -> None:
        if worker.name == "gpt torch" and command == "modes":
            written.append(json.loads((folder / "suite-cpu-1.json").read_text()))
            kill(worker)

    with pytest.MonkeyPatch.context() as patch:
        listen(patch, before)
        code = suite.main(["--simulated", "--model", "adapters,gpt", "--out", str(folder)])
    assert code == 1
    return folder, written[0]


def test_the_suite_writes_a_numbered_result_the_newest_one_and_a_plot(
    failing_suite: tuple[pathlib.Path, Any],
) -> None:
    folder, _ = failing_suite
    names = {path.name for path in folder.iterdir()}
    assert {"suite-cpu-1.json", "suite.json"} <= names
    assert ("suite.svg" in names) == plot.available()
    points = json.loads((folder / "suite.json").read_text())["models"]["adapters"]["points"]
    modes = {point["mode"] for point in points}
    assert {"native", "save_on_cpu", "checkpoint:0.5", "ours:0.5"} <= modes
    assert all("bound_ms" in point for point in points if point["mode"].startswith("ours:"))
    assert suite.result_path(folder, "CPU").name == "suite-cpu-2.json"


def test_the_suite_has_written_the_models_before_the_one_that_fails(
    failing_suite: tuple[pathlib.Path, Any],
) -> None:
    folder, written = failing_suite
    assert list(written["models"]) == ["adapters"]
    assert written["asked"] == ["adapters", "gpt"]
    result = json.loads((folder / "suite-cpu-1.json").read_text())
    assert result == json.loads((folder / "suite.json").read_text())
    assert list(result["models"]) == ["adapters"]
    assert "host memory ran out" in result["failed"]["gpt"]
    assert not (folder / "suite-cpu-2.json").exists()


def test_a_dead_worker_can_be_closed_with_a_command_it_never_read() -> None:
    settings = {"ours": False, "model": "gpt", "shape": {}, "simulated": True}
    worker = Worker("torch", settings)
    kill(worker)
    assert worker._process.stdin is not None
    worker._process.stdin.write("half a line")
    worker.hang_up()
    assert worker.close() == -signal.SIGKILL
    assert worker.close() == -signal.SIGKILL


def test_results_of_several_calls_give_one_plot() -> None:
    place = {"device": "H100", "torch": "2.13"}
    both = plot.together([{**place, "models": {"gpt": 1}}, {**place, "models": {"vit": 2}}])
    assert both["models"] == {"gpt": 1, "vit": 2}
    newer = plot.together([{**place, "models": {"gpt": 1}}, {**place, "models": {"gpt": 2}}])
    assert newer["models"] == {"gpt": 2}
    with pytest.raises(ValueError, match="different places"):
        plot.together([{**place, "models": {}}, {**place, "torch": "2.12", "models": {}}])


def test_micro_times_every_call_and_counts_what_it_names(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "micro.json"
    done = run("micro.py", "--simulated", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    calls = json.loads(out.read_text())["calls"]
    for call in ("alloc, hit", "free, hit", "pack, hit", "unpack, hit", "alloc, grow"):
        assert calls[call]["ours"]["p50"] > 0
        assert calls[call]["torch"]["p50"] > 0
    assert calls["pack, hit"]["ours"]["events"] == 1
    assert calls["unpack, hit"]["ours"]["events"] == 1
    assert calls["alloc, evict one"]["ours"]["events"] == 1
    assert calls["alloc, evict many"]["ours"]["events"] > 1
    assert calls["unpack, restore"]["ours"]["events"] > 0


def test_recompute_compares_every_step_with_plain_torch(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "recompute.json"
    done = run("recompute.py", "--simulated", "--only", "gpt", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["models"]["gpt"]
    assert [one["share"] for one in found["checkpointed"]] == [0.25, 0.5, 1.0, 1.0]
    assert [one["selective"] for one in found["checkpointed"]] == [False, False, False, True]
    assert found["with_room"]["reruns"] == 0
    assert found["with_room"]["bitwise"]
    assert [one["recompute"] for one in found["ours"]] == [False, True]
    assert all(one["bitwise"] and one["over_bytes"] == 0 for one in found["ours"])
    for one in found["ours"]:
        assert len(one["timed"]) == 8
        assert all(ms > 0 for ms in one["host_ms"] + one["plain_host_ms"])
        assert len(one["host_ms"]) == len(one["plain_host_ms"]) == 2  # forward and backward


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--traces", "llama,lama"], "there is no 'lama'"),
        (["--modes", "fast"], "there is no 'fast'"),
        (["--before", "no-such-commit"], "there is no commit 'no-such-commit'"),
    ],
)
def test_replays_of_what_there_is_not_say_so_and_build_nothing(
    arguments: list[str], says: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "replays.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
