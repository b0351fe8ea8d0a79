"""The doctor says what is here, measures the link, and turns what is bad into something to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from telemetry_lines import line, write

from stagehand_alloc import DriverError, _driver
from stagehand_alloc.__main__ import main
from stagehand_alloc._cli import doctor, link
from stagehand_alloc._settings import host_memory

GIB = 1 << 30
REAL = {"real GPU": "yes: here", "simulated GPU": "yes: here"}


def test_json_says_the_same_and_the_links_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == doctor.WORKS
    found = json.loads(capsys.readouterr().out)
    assert found["works"]
    assert found["simulated"]
    assert found["ways"]["simulated GPU"].startswith("yes")
    assert set(doctor._FACTS) == set(found["facts"])
    (one,) = found["links"]
    assert one["to_host"] > 1e9
    assert one["to_device"] > 1e9
    assert all(finding["what"] and finding["todo"] for finding in found["findings"])


@pytest.mark.parametrize("contents", ["no telemetry\n", None])
def test_a_file_that_is_no_telemetry_ends_with_2_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: str | None
) -> None:
    path = tmp_path / "other.txt"
    if contents is not None:
        path.write_text(contents)
    assert main(["doctor", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""  # nothing was measured first
    what, todo = printed.err.splitlines()
    assert f"The telemetry file {path}" in what
    assert "pool(telemetry=...)" in todo


def test_of_a_telemetry_file_the_settings_that_would_have_suited_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(pinned_bytes=GIB, proposed_classes_mb=[4], proposed_slabs_per_class=[3])]
    assert main(["doctor", "--json", str(write(tmp_path / "steps.jsonl", lines))]) == doctor.WORKS
    found = json.loads(capsys.readouterr().out)["facts"]["last run"]
    assert "pinned_pool_classes_mb=[4], slabs_per_class=[3]" in found


def test_what_is_missing_is_a_finding_with_something_to_do(
    run_fresh: Callable[..., Any],
) -> None:
    done = run_fresh(
        """
        import sys
        for name in ("torch", "cuda", "cuda.bindings", "stagehand_alloc._native"):
            sys.modules[name] = None
        from stagehand_alloc.__main__ import main
        raise SystemExit(main(["doctor", "--json"]))
        """,
        exit_code=doctor.DOES_NOT,
    )
    found = json.loads(done.stdout)
    assert not found["works"]
    assert {one["what"].split(":")[0] for one in found["findings"]} >= set(doctor._WAYS)
    assert all(one["todo"] for one in found["findings"])
    assert "Traceback" not in done.stderr


def test_a_wrong_argument_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--jsno"])
    assert ended.value.code == 2
    capsys.readouterr()


def test_a_simulated_gpu_that_cannot_be_used_is_not_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(simulated: bool) -> list[link.Rates]:
        raise DriverError("The simulated GPU does not work: it ended with -11.", "See more.")

    monkeypatch.setattr(link, "measure", broken)
    found = doctor.look()
    assert not found.works
    assert found.links == []
    assert found.findings[-1].what.endswith("-11.")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "ended with -6"),
        ("import time; time.sleep(60)", "nothing came back in 1 s"),
        ("raise SystemExit('no such card')", "no such card"),
    ],
    ids=["crashes", "hangs", "refuses"],
)
def test_a_driver_that_crashes_or_hangs_takes_only_the_measuring_down(
    code: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec python3 -c "{code}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(link.sys, "executable", str(program))
    monkeypatch.setattr(link, "TIMEOUT_S", 1.0)
    with pytest.raises(DriverError, match=why):
        link.measure(simulated=False)


def test_a_slow_link_and_slow_pinning_are_findings() -> None:
    slow = link.Rates(device=0, to_host=3.1e9, to_device=6e9, pinning=0.4e9)
    quick = link.Rates(device=1, to_host=25e9, to_device=25e9, pinning=8e9)
    found = doctor.Findings(links=[slow, quick], ways=REAL)
    one, other = doctor._slow_links(found)
    assert "device 0 carries 3.1 GB/s" in one.what
    assert "0.40 GB/s" in other.what
    assert doctor._slow_links(doctor.Findings(links=[slow], simulated=True)) == []


def test_less_host_memory_than_half_the_device_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = _driver.Device(0, "a GPU", 80 * GIB, True)
    monkeypatch.setattr(_driver, "device_count", lambda: 1)
    monkeypatch.setattr(_driver, "device", lambda index: device)
    monkeypatch.setattr(doctor, "default_host_limit", lambda: 39 * GIB)
    (one,) = doctor._little_host_memory(doctor.Findings())
    assert "39.00 GiB" in one.what
    assert "80.00 GiB" in one.what
    monkeypatch.setattr(doctor, "default_host_limit", lambda: 40 * GIB)
    assert doctor._little_host_memory(doctor.Findings()) == []


def test_a_process_bound_away_from_its_device_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("8-11,40\n")
    monkeypatch.setattr(_driver, "NODES", tmp_path)
    monkeypatch.setattr(_driver, "numa_nodes", lambda: [1])
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {0, 1})
    (one,) = doctor._far_from_the_device(doctor.Findings())
    assert "--cpunodebind=1" in one.todo
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {40})
    assert doctor._far_from_the_device(doctor.Findings()) == []


def test_the_least_limit_of_the_control_groups_is_the_one(tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("0::/job/task\n")
    for folder, limit in (("", "max"), ("job", str(8 * GIB)), ("job/task", "max")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(limit)
    assert host_memory.cgroup_limit(cgroup, tmp_path) == 8 * GIB
    (tmp_path / "job" / "memory.max").write_text("max")
    assert host_memory.cgroup_limit(cgroup, tmp_path) is None
    assert host_memory.cgroup_limit(tmp_path / "none", tmp_path) is None
