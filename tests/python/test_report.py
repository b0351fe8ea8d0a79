"""`report`: its table, its page in a real browser, and what it says of files it cannot use."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from telemetry_lines import GIB, MIB, line, shape, with_shape, write

from stagehand_alloc.__main__ import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


WEIGHTS: dict[str, Any] = {
    "weights_bytes": 9 * GIB,
    "weights_home_peak": 6 * GIB,
    "weights_loaded_bytes": 7 * GIB,
    "weights_loads": 14,
    "weights_late": 2,
    "weights_wait_ms": 1.5,
    "h2d_bytes": 9 * GIB,
}


def training(
    rank: int = 0, high: int = 20 * GIB, steps: int = 60, **fields: Any
) -> list[dict[str, Any]]:
    lines = [
        line(
            n,
            rank=rank,
            high=high,
            stall_time_ms=30.0 / n,
            wall_time_ms=400.0 + 300.0 / n,
            pinned_bytes=4 * GIB,
            proposed_classes_mb=[4, 16],
            proposed_slabs_per_class=[9, 3],
            **fields,
        )
        for n in range(1, steps + 1)
    ]
    return [*lines[:-1], with_shape(lines[-1], shape())]


def test_the_table_is_printed_and_the_page_stands_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "steps.jsonl", training())
    assert main(["report", str(path)]) == 0
    printed = capsys.readouterr()
    assert "60 steps: peak" in printed.out
    assert "The budget was held" in printed.out
    assert f"page: {tmp_path / 'steps.html'}" in printed.err
    page = (tmp_path / "steps.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    for heading in ("Memory over one step", "Where the time goes", "Copies against the link"):
        assert f"<h2>{heading}</h2>" in page
    assert "Block · Gelu" in page
    assert "{&quot;pinned_pool_classes_mb&quot;: [4, 16]" in page
    for outside in ("<script", "src=", "http://cdn", "https://", "@import"):
        assert outside not in page.replace("http://www.w3.org", "")


def test_weights_are_a_part_of_what_comes_back_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "steps.jsonl", training(**WEIGHTS))
    assert main(["report", str(path)]) == 0
    line = (
        "eights 9.00 GiB, at most 6.00 GiB of them on the GPU: 7.00 GiB come a step in 14 loads, "
        "2 late, and the GPU waits 1.5 ms for them"
    )
    assert f"w{line}" in capsys.readouterr().out
    page = (tmp_path / "steps.html").read_text()
    assert f"<p>W{line}.</p>" in page
    assert "of it weights, 7.00 GiB" in page
    assert "Weights count only while a block holds them; at most 6.00 GiB" in page
    assert "var(--weights)" in page.split("Bytes by direction")[1]


def test_the_same_file_makes_the_same_page(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", training())
    pages = []
    for name in ("a.html", "b.html"):
        assert main(["report", str(path), "--html", str(tmp_path / name)]) == 0
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert len(pages[0]) < 400_000


def test_a_page_of_somebody_else_s_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "steps.jsonl", training())
    other = tmp_path / "steps.html"
    other.write_text("mine")
    assert main(["report", str(path)]) == 0
    assert other.read_text() == "mine"
    assert "is no page of ours" in capsys.readouterr().err
    assert main(["report", str(path), "--no-html"]) == 0


def test_a_page_that_cannot_be_written_is_told_before_the_files_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "steps.jsonl", training())
    assert main(["report", str(path), "--html", str(tmp_path / "no" / "page.html")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"There is no folder {tmp_path / 'no'}." in printed.err
    assert main(["report", str(path), "--html", str(tmp_path)]) == 2
    assert "It is a folder." in capsys.readouterr().err
    for name in ("", f"{tmp_path}/new/"):
        assert main(["report", str(path), "--html", name]) == 2
        assert "It names no file." in capsys.readouterr().err


def test_the_page_takes_no_telemetry_s_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "steps.jsonl", training())
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path), "--html", "steps.jsonl"]) == 2
    assert "would take the place of the telemetry" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_json_has_the_findings_of_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = training() + training(rank=1, high=10 * GIB)
    path = write(tmp_path / "steps.jsonl", lines, tail="broken\n")
    assert main(["report", "--json", "--no-html", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["high"] for run in found["runs"]] == [20 * GIB, 10 * GIB]
    assert {one["kind"] for one in found["runs"][0]["findings"]} == {"held"}
    assert found["skipped"] == [{"file": "steps.jsonl", "lines": 1, "first": 121}]


def test_a_file_with_several_runs_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path / "steps.jsonl", training() + training(pid=2)))
    assert main(["report", path, "--no-html"]) == 0
    said = capsys.readouterr().out
    assert "steps.jsonl holds 2 runs of a device; the one that began last is shown." in said
    assert main(["report", path, "--no-html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["left_out"]
    assert found == [{"file": "steps.jsonl", "runs": 2}]


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write(tmp_path / "steps.jsonl", training())
    assert main(["report", str(path)]) == 0
    printed = capsys.readouterr()
    assert "60 steps: peak" in printed.out
    assert "pip install 'stagehand_alloc[plot]'" in printed.err
    assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 2


def test_a_file_of_another_kind_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert main(["report", str(path)]) == 2
    assert "notes.txt has no step in its 1 lines" in capsys.readouterr().err
    assert not (tmp_path / "notes.html").exists()


def test_a_run_without_shapes_has_a_page_too(tmp_path: Path) -> None:
    hostile = line(1, mapped_peak=0, high=0, wall_time_ms=0, passed_through={"<b>x</b>": 5})
    path = write(tmp_path / "<i>.jsonl", [hostile])
    assert main(["report", str(path), "--html", str(tmp_path / "p.html")]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "The run ended before its second step" in page
    assert "<i>.jsonl" not in page


# ---- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: that of the system, else playwright's own."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next(filter(None, map(shutil.which, BROWSERS)), None) or (
            own if Path(own).exists() else None
        )
        if found is None:
            pytest.skip("no Chromium here: `apt-get install chromium`")
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_and_loads_nothing(
    tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    lines = training() + training(rank=1, high=10 * GIB, **WEIGHTS)
    name = "a_very_long_name_of_a_telemetry_file_without_a_space_in_it_at_all_anywhere.jsonl"
    path = write(tmp_path / name, lines)
    assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.on("request", lambda request: complaints.append(request.url)
            if not request.url.startswith(("file:", "data:")) else None)  # fmt: skip
    page.goto((tmp_path / "page.html").as_uri())
    page.click("details summary >> nth=0")
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    shown = page.evaluate(
        "[...document.querySelectorAll('svg')].filter(one => one.clientWidth > 0)"
        ".map(one => one.getBoundingClientRect().right)"
    )
    assert len(shown) == page.evaluate("document.querySelectorAll('figure').length")
    assert max(shown) <= width
    texts = page.evaluate(
        "[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect())"
        ".filter(one => one.width > 0).map(one => [one.left, one.right, one.height])"
    )
    assert min(left for left, _, _ in texts) >= 0
    assert max(right for _, right, _ in texts) <= width
    assert min(height for _, _, height in texts) >= 12  # to be read on a phone
    page.close()


def test_small_models_are_told_in_their_own_unit(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [line(n, mapped_peak=3 * MIB, high=4 * MIB) for n in (1, 2)])
    assert main(["report", str(path)]) == 0
    assert "peak, MiB" in (tmp_path / "s.html").read_text()
