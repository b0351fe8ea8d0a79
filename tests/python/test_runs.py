"""Telemetry files read back: runs apart, broken lines counted, other files refused."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from pathlib import Path

import pytest
from telemetry_lines import GIB, line, shape, with_shape, write

from stagehand_alloc import TelemetryError
from stagehand_alloc._books import runs
from stagehand_alloc._books import shape as _shape


def test_a_file_holds_the_last_run_of_each_rank_and_device(tmp_path: Path) -> None:
    first = [line(n, high=GIB) for n in (1, 2, 3)]
    last = [
        line(n, rank=rank, device=device, high=(1 + rank) * GIB)
        for n in (1, 2)
        for rank in (0, 1)
        for device in (0, 1)
    ]
    found = runs.read([write(tmp_path / "steps.jsonl", first + last)])
    assert [(run.rank, run.device, len(run.steps)) for run in found.runs] == [
        (rank, device, 2) for rank in (0, 1) for device in (0, 1)
    ]
    assert [run.last("high") for run in found.runs] == [GIB, GIB, 2 * GIB, 2 * GIB]
    assert found.notes() == [
        "steps.jsonl holds 2 runs of a device; the one that began last is shown."
    ]


def test_a_run_whose_first_line_is_broken_is_not_the_end_of_the_one_before(tmp_path: Path) -> None:
    lines = [line(n, high=GIB) for n in (1, 2, 3)] + [line(n) for n in (2, 3)]
    found = runs.read([write(tmp_path / "steps.jsonl", lines)])
    assert [step["step"] for step in found.runs[0].steps] == [2, 3]
    assert [one.runs for one in found.left_out] == [2]


def test_what_two_processes_write_at_once_are_two_runs(tmp_path: Path) -> None:
    kind = shape()
    lines = [line(1, pid=7), with_shape(line(1, pid=8), kind), line(2, pid=7), line(2, pid=8)]
    lines += [line(3, pid=8), line(3, pid=7), line(4, pid=7)]
    found = runs.read([write(tmp_path / "steps.jsonl", lines)])
    assert [(step["pid"], step["step"]) for step in found.runs[0].steps] == [(8, 1), (8, 2), (8, 3)]
    assert found.runs[0].shape == kind
    assert [one.runs for one in found.left_out] == [2]


def test_a_run_of_another_process_is_one_of_its_own_though_its_steps_go_on(tmp_path: Path) -> None:
    lines = [line(1, pid=7), line(2, pid=7), line(3, pid=8)]
    found = runs.read([write(tmp_path / "steps.jsonl", lines)])
    assert [step["step"] for step in found.runs[0].steps] == [3]


def test_several_files_are_told_apart_by_name_where_ranks_are_not(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [line()]) for name in ("a", "b")]
    names = [name for name, _ in runs.by_name(runs.read(paths).runs)]
    assert names == ["a.jsonl, rank 0, device 0", "b.jsonl, rank 0, device 0"]
    (name,) = (name for name, _ in runs.by_name(runs.read(paths[:1]).runs))
    assert name == ""


@pytest.mark.parametrize(
    "broken",
    [
        '{"step": 2, "activa',
        "null",
        "[" * 100_000,
        json.dumps({**line(2), "spill_bytes": "much"}),
        json.dumps({**line(2), "wall_time_ms": -1}),
        json.dumps({**line(2), "plan_state": "\x1b[2J"}),
        '{"step": 2, "a": NaN}',
        json.dumps({**line(2), "rank": "x"}),
        json.dumps({**line(2), "device": None}),
        json.dumps({**line(2), "pid": "x"}),
    ],
)
def test_broken_lines_are_left_out_and_counted(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path / "steps.jsonl", [line(1)], tail=broken + "\n")
    with path.open("a") as file:
        file.write(json.dumps(line(3)) + "\n" + broken)
    found = runs.read([path])
    assert [step["step"] for step in found.runs[0].steps] == [1, 3]
    assert str(found.skipped[0]) == (
        "steps.jsonl: 2 lines are broken and left out, the first one at line 2."
    )


@pytest.mark.parametrize("contents", [b"", b"hello\nworld\n", b"\x7fELF\x02\x01\xff\x00" * 40])
def test_another_file_is_refused_by_name(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(contents)
    with pytest.raises(TelemetryError, match=r"other\.bin"):
        runs.read([path])
    with pytest.raises(TelemetryError, match="cannot be read"):
        runs.read([tmp_path])


def test_a_later_version_s_fields_are_no_broken_lines(tmp_path: Path) -> None:
    later = {**line(), "mode": "native", "news": {"a": [1, None]}, "on": True, "drops": "none"}
    (run,) = runs.read([write(tmp_path / "steps.jsonl", [later])]).runs
    assert run.total("drops") == 0


def test_a_kind_of_step_comes_back_as_it_was_written(tmp_path: Path) -> None:
    of = shape()
    (run,) = runs.read([write(tmp_path / "s.jsonl", [line(1), with_shape(line(2), of)])]).runs
    assert run.shape == of
    assert _shape.from_json(_shape.to_json(dataclasses.replace(of, known=None))) is not None


def test_a_kind_of_step_of_an_older_version_has_calls_that_take_nothing(tmp_path: Path) -> None:
    of = shape()
    assert of.known is not None
    known = [[row[:9] for row in of.known.records], *list(of.known.__dict__.values())[1:]]
    text = base64.b64encode(zlib.compress(json.dumps(known).encode())).decode()
    assert _shape.from_json({**_shape.to_json(of), "packed": text}) == of


def test_a_broken_kind_of_step_is_none(tmp_path: Path) -> None:
    good = _shape.to_json(shape())
    for name, bad in (
        ("curve", {}),
        ("plan", {"lines": [{"region": 5}]}),
        ("packed", "!!"),
        ("packed", good["packed"][:40]),
        ("high", "much"),
    ):
        assert _shape.from_json({**good, name: bad}) is None, name
    assert _shape.from_json(None) is None


def test_settled_steps_are_the_later_half(tmp_path: Path) -> None:
    lines = [line(n, wall_time_ms=900.0 if n <= 5 else 300.0 + n) for n in range(1, 11)]
    (run,) = runs.read([write(tmp_path / "s.jsonl", lines)]).runs
    assert [step["step"] for step in run.settled()] == [6, 7, 8, 9, 10]
    assert run.step_ms() == 307.5  # without the last, which ends where the process did
