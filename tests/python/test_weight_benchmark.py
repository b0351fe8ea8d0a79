"""weights.py: what it claims of its cases, what is run and kept, and the program on tiny models."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(FOLDER))  # last: its models.py is not the tests' own

import plot  # noqa: E402
import weights  # noqa: E402
from harness import Row, driver_version  # noqa: E402
from source_hash import source_hash  # noqa: E402
from weight_cases import GB, MODES, Case, Result, cases_of, chosen  # noqa: E402
from weight_rows import Missing, Rows, bound, full_bound, least_ms, unlike_torch  # noqa: E402

CASES = cases_of(MODES)
RATES = (50e6, 25e6)  # bytes per ms
# 1 GB stays, 5 GB are weights in blocks of 0.5, 10 GB are saved, 0.5 GB are in use for a moment.
PLAIN = Result(
    "plain 8192",
    *(260, 90, 160),
    start=6 * GB,
    held=16 * GB,
    peak=int(16.5 * GB),
    weights=5 * GB,
    group=GB // 2,
)


def of(name: str, base: Result = PLAIN, **found: Any) -> Result:
    """A case of ours that is exactly as good as can be."""
    high = int(CASES[name].high * GB)
    one = Result(name, high=high, reserved=high, bitwise=True)
    one.step = one.first = least_ms(CASES[name], high, base, RATES)
    return dataclasses.replace(one, **found)


def rows(*results: Result, fresh: set[str] | None = None) -> dict[str, Any]:
    found = {one.name: one for one in results}
    made = Rows("native", CASES, found, set(found) if fresh is None else fresh).all(RATES)
    return {row.claim.removeprefix("native: "): row for row in made}


def missed(*results: Result) -> list[str]:
    return [claim for claim, row in rows(*results).items() if not row.as_dict()["holds"]]


# --- The least time


def test_what_has_room_costs_nothing() -> None:
    assert bound(20 * GB, PLAIN, RATES).ms == PLAIN.step


def test_what_has_no_room_comes_back_in_backward_and_copies_go_on_beside_the_rest() -> None:
    # 8 - 1 - 0.5 - 0.5 = 6: 4 of what is saved leave, and 9 of 15 GB come back.
    assert bound(8 * GB, PLAIN, RATES).ms == pytest.approx(4e9 / 25e6 + 9e9 / 50e6)


def test_a_step_takes_no_less_than_plain_torchs_whose_parts_are_waited_for() -> None:
    waited = dataclasses.replace(PLAIN, step=PLAIN.forward + PLAIN.backward - 2)
    assert bound(20 * GB, waited, RATES).ms == waited.step
    assert bound(8 * GB, waited, RATES).ms == pytest.approx(4e9 / 25e6 + 9e9 / 50e6 - 2)


def test_a_slowed_link_is_what_the_bound_is_of() -> None:
    case = CASES["native 48 blocks at 25 GB/s"]
    faster = dataclasses.replace(case, link=0)
    slow, fast = (least_ms(one, 5 * GB, PLAIN, RATES) for one in (case, faster))
    assert slow > fast


def test_what_trains_all_has_three_parts() -> None:
    plain = dataclasses.replace(PLAIN, start=16 * GB, held=26 * GB)  # 1 GB stays: 3 x 5 of it go
    # Forward 10 - 10 of 11 GB; backward 10 + 10 - 10; AdamW 20 - 10.
    assert full_bound(11 * GB, plain, RATES) == pytest.approx(90 + 10e9 / 50e6 + 10e9 / 50e6)


# --- What is claimed


def test_at_its_bars_no_claim_is_missed() -> None:
    at_12 = of("native 12", step=PLAIN.step)
    at_12.first = 1.5 * at_12.step
    assert missed(PLAIN, of("native all fits"), at_12) == []


@pytest.mark.parametrize(
    ("worse", "claim"),
    [
        ({"overshoot": 1}, "12 GB, GB over high"),
        ({"host_waits": 0.1}, "12 GB, host waits a step"),
        ({"reserved": 13 * GB}, "12 GB, reserved of high"),
        ({"first": 1000}, "12 GB, first step of a later"),
    ],
)
def test_each_promise_of_a_budget_is_missed_by_itself(worse: dict[str, Any], claim: str) -> None:
    assert missed(PLAIN, of("native 12", step=PLAIN.step, **{"first": 300, **worse})) == [claim]


def test_a_library_that_is_not_here_is_in_its_row_and_holds_nothing() -> None:
    absent = Result("torchao full", absent="torchao is not installed")
    row = rows(absent)["full AdamW, of torchao's CPUOffloadOptimizer at the same peak"]
    assert isinstance(row, Missing)
    assert row.as_dict()["bar"] == "torchao is not installed"
    assert not row.as_dict()["holds"]


def test_what_trains_wrongly_is_compared_in_forward_alone() -> None:
    mine = [Result("native checkpoint as ring", 300), Result("native forward 3", 80)]
    theirs = [
        Result("diffusers block", 500, bitwise=False),
        Result("diffusers block forward", 100, bitwise=True),
    ]
    found = rows(*mine, *theirs)
    title = "of diffusers' group offload by block, with a stream"
    trained = found[f"checkpointing, forward and backward, {title}"].as_dict()
    assert (trained["value"], trained["holds"]) == (None, False)
    assert found[f"forward alone at 3 GB, {title}"].value == pytest.approx(0.8)


def test_plain_torch_of_an_earlier_call_is_compared_with_nothing() -> None:
    assert rows(PLAIN, of("native 12"), fresh={"native 12"}) == {}


def test_what_others_made_may_be_of_an_earlier_call() -> None:
    found = rows(of("native 12"), Result("ring checkpoint", 400), fresh={"native 12"})
    assert list(found) == ["12 GB without checkpointing, of a ring of two"]
    assert rows(of("native 12"), Result("ring checkpoint", 400), fresh=set()) == {}


def test_what_is_not_plain_torchs_is_named() -> None:
    assert unlike_torch({"a": Result("a", bitwise=False), "b": Result("b")}) == ["a"]


# --- What is run


def test_a_case_brings_what_its_rows_need() -> None:
    found = [case.name for case in chosen(CASES, ["native full as torchao"])]
    assert found == ["plain full", "torchao full", "native full as torchao"]
    assert "native 12" in [case.name for case in chosen(CASES, ["12"])]
    with pytest.raises(ValueError, match="no case '13'"):
        chosen(CASES, ["12", "13"])


def test_whatever_a_case_needs_comes_before_it() -> None:
    order = list(CASES)
    for case in CASES.values():
        assert all(order.index(name) < order.index(case.name) for name in case.before())


def test_the_48_blocks_are_as_large_as_they_are_said_to_be() -> None:
    case = CASES["plain 48 blocks"]
    frozen = 4 * case.width**2 + 2 * case.width * case.hidden
    assert (case.layers, round(frozen / 1e6)) == (48, 393)


class Run(weights.Weights):
    """Without processes: what has been measured is known."""

    def __init__(self, only: list[str], found: dict[str, Result], limit: float | None) -> None:
        self.cases, self.found, self.fresh = CASES, found, set()
        self.options = weights.parse(["--only", ",".join(only)])
        self.options.time_limit = limit
        self.waiting = [case.name for case in chosen(CASES, only)]
        self.not_run: dict[str, str] = {}
        self.measured: list[str] = []
        while self.waiting:
            self.measure_next()

    def seconds(self) -> float:
        return float(sum(CASES[name].seconds for name in self.measured))

    def _measure(self, case: Case) -> None:
        self.measured.append(case.name)
        self.fresh.add(case.name)
        self.found[case.name] = Result(case.name, 1, reserved=GB)


def test_plain_torch_is_measured_in_each_call_and_what_others_made_once() -> None:
    names = ("plain 8192", "plain checkpoint", "ring checkpoint")
    run = Run(["native checkpoint as ring"], {name: Result(name, 1) for name in names}, None)
    assert run.measured == ["plain 8192", "plain checkpoint", "native checkpoint as ring"]


def test_no_case_begins_that_would_not_end_in_time() -> None:
    run = Run(["native 12", "native 10"], {}, 40)
    assert run.measured == ["plain 8192", "native 12"]
    assert set(run.not_run) == {"native 10"}


def test_without_what_it_needs_a_case_is_not_run() -> None:
    run = Run(["native full as torchao"], {}, 30)
    assert run.measured == ["plain full"]
    assert run.not_run["native full as torchao"] == "'torchao full' was not measured"


def test_plain_torch_of_the_file_is_no_base_for_what_is_measured_now() -> None:
    run = Run(["native 12"], {"plain 8192": PLAIN}, 10)
    assert run.not_run["native 12"] == "'plain 8192' was not measured"


# --- The program


def test_a_file_without_a_step_of_plain_torch_has_no_plot(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "weights.svg"
    plot.draw_weights({"cases": {}}, path)
    assert not path.exists()


@pytest.mark.skipif(not plot.available(), reason="matplotlib is not installed")
def test_the_plot_says_of_which_device_it_is(tmp_path: pathlib.Path) -> None:
    cases = {
        "plain 8192": PLAIN,
        "native 12": of("native 12", to_plain=1.2, bound_to_plain=1.1),
        "ring checkpoint": Result("ring checkpoint", 400, reserved=3 * GB, to_plain=1.5),
    }
    named = {name: dataclasses.asdict(one) for name, one in cases.items()}
    path = tmp_path / "weights.svg"
    plot.draw_weights({"device": "H200", "torch": "2.13", "cases": named}, path)
    text = path.read_text()
    assert all(part in text for part in ("H200, torch 2.13", "ring of two", "bound"))


def called(only: str, out: pathlib.Path) -> dict[str, Any]:
    """What the program leaves in the file after a call on tiny models."""
    program = [sys.executable, str(FOLDER / "weights.py"), "--simulated", "--only", only]
    done = subprocess.run(
        [*program, "--out", str(out)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_second_call_adds_to_the_file(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "weights.json"
    head = {"device": "CPU", "torch": torch.__version__, "driver": driver_version()}
    first = {"plain forward": dataclasses.asdict(Result("plain forward", 50))}
    earlier = {"rows": [Row("of the first call", 1).as_dict()], "cases": first}
    out.write_text(json.dumps({**head, "sources": source_hash(), **earlier}))
    result = called("1024 at 4", out)
    assert set(result["cases"]) == {"plain 1024", "allocator 1024 at 4", "plain forward"}
    streamed = result["cases"]["allocator 1024 at 4"]
    assert streamed["bitwise"] is True
    assert streamed["loads"] > 0
    claims = [row["claim"] for row in result["rows"]]
    assert claims[0] == "of the first call"
    assert "allocator: 1024 tokens at 4 GB, GB over high" in claims


@pytest.mark.parametrize("same", [True, False])
def test_of_other_sources_what_others_made_stays_while_the_programs_are_the_same(
    tmp_path: pathlib.Path, same: bool
) -> None:
    out = tmp_path / "weights.json"
    head = {"device": "CPU", "torch": torch.__version__, "driver": driver_version()}
    head |= {"sources": "older", "programs": weights.programs() if same else "others"}
    names = ("ring checkpoint", "plain forward", "allocator 12")
    cases = {name: dataclasses.asdict(Result(name, 50)) for name in names}
    out.write_text(json.dumps({**head, "rows": [Row("older", 1).as_dict()], "cases": cases}))
    result = called("plain 1024", out)
    assert set(result["cases"]) == {"plain 1024"} | ({"ring checkpoint"} if same else set())
    assert "older" not in [row["claim"] for row in result["rows"]]
