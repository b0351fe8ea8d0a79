"""What is asked for wrongly: a typed error in two lines, which names what was given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagehand_alloc
from stagehand_alloc import ConfigError, SizeError, StagehandError, _native
from stagehand_alloc.__main__ import main
from stagehand_alloc._books import steps as _steps
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import trigger as _trigger
from stagehand_alloc._step import hooks as _hooks
from stagehand_alloc._step.module_names import ModuleWatch

Ask = Callable[[], Any]


def refused(ask: Ask, kind: type[StagehandError], *words: str) -> str:
    with pytest.raises(kind) as caught:
        ask()
    what, _, todo = str(caught.value).partition("\n")
    assert what.endswith((".", ":"))
    assert todo
    assert len(what) < 400
    for word in words:
        assert word in f"{what}\n{todo}"
    return f"{what}\n{todo}"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("what", "word"),
    [(None, "NoneType"), (3, "int"), ([torch.ones(2)], "list"), ("x", "str")],
)
def test_keep_of_what_is_no_tensor_is_refused(what: Any, word: str) -> None:
    refused(lambda: stagehand_alloc.keep(what), StagehandError, "keep()", word)


@pytest.mark.usefixtures("gpu")
def test_keep_of_a_sparse_tensor_is_refused() -> None:
    refused(lambda: stagehand_alloc.keep(torch.eye(3).to_sparse()), StagehandError, "sparse")


@pytest.mark.parametrize("source", [5, [], b"{}", 1.5])
def test_settings_of_another_type_are_refused(source: Any) -> None:
    refused(lambda: stagehand_alloc.load_config(source), ConfigError, type(source).__name__)
    refused(lambda: stagehand_alloc.pool(config=source), ConfigError, type(source).__name__)


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(lambda: stagehand_alloc.load_config(path), ConfigError, "nested too deeply")


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"activation_stagehand": {"enabled": true, "enabled": false}}')
    refused(lambda: stagehand_alloc.load_config(path), ConfigError, "'enabled' is set twice")
    path.write_text('{"other": {"x": 1, "x": 2}, "activation_stagehand": {"enabled": false}}')
    assert not stagehand_alloc.load_config(path).enabled  # what is outside is left alone


@pytest.mark.parametrize(
    "text",
    [
        '{"activation_stagehand": {}, "activation_stagehand": {"enabled": false}}',
        '{"a": {"activation_stagehand": {}}, "b": [{"activation_stagehand": {}}]}',
    ],
)
def test_two_blocks_of_settings_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(text)
    refused(lambda: stagehand_alloc.load_config(path), ConfigError, "2 blocks")


def test_a_block_inside_a_list_is_found() -> None:
    found = stagehand_alloc.load_config({"stages": [{"activation_stagehand": {"enabled": False}}]})
    assert not found.enabled


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("keep", "`keep` is no setting but an argument of pool()"),
        ("on_step", "`on_step` is no setting but an argument of pool()"),
        ("hgih", "Did you mean 'high'?"),
        ("modes", "Did you mean 'mode'?"),
        ("vram_high_watermark", "Did you mean 'vram_high_watermark_mb'?"),
        ("host_limits", "Did you mean 'host_limit'?"),
        ("zzzz", "The settings are: high, low, limit, mode, "),
        ("pinned", "pinned_pool_classes_mb"),
    ],
)
def test_an_unknown_setting_gets_a_hint_that_helps(key: str, words: str) -> None:
    refused(lambda: stagehand_alloc.load_config({key: 1}), ConfigError, repr(key), words)


@pytest.mark.parametrize(
    "settings",
    [
        {"slabs_per_class": 10**12},
        {"slabs_per_class": [10**30, 1, 1, 1, 1]},
        {"pinned_pool_classes_mb": [10**12]},
        {"telemetry_file": "a\0b"},
    ],
)
def test_settings_that_no_machine_has_are_refused(settings: dict[str, Any]) -> None:
    refused(lambda: stagehand_alloc.pool(config=settings), ConfigError, next(iter(settings)))


@pytest.mark.parametrize("telemetry", [5, b"x", ["a"], 1.5])
def test_a_telemetry_path_of_another_type_is_refused(telemetry: Any) -> None:
    refused(lambda: stagehand_alloc.pool(telemetry=telemetry), ConfigError, "telemetry=")


def test_a_size_of_thousands_of_digits_is_refused() -> None:
    refused(lambda: stagehand_alloc.pool(high="1" + "0" * 5000 + "B"), SizeError, "high=")
    refused(lambda: stagehand_alloc.pool(high=-(10**5000)), SizeError, "high=")


@pytest.mark.parametrize("name", ["d2h_bytes_per_second", "h2d_bytes_per_second"])
@pytest.mark.parametrize("rate", [10, 1, "1MB", 9_999_999])
def test_a_rate_that_would_hang_training_is_refused(name: str, rate: Any) -> None:
    words = ("bytes per second", "10 MB/s", repr(rate))
    refused(lambda: stagehand_alloc.pool(config={name: rate}), SizeError, name, *words)
    pool = stagehand_alloc.pool()
    before = pool.limits()
    refused(lambda: pool.limits(**{name: rate}), SizeError, name, *words)
    assert pool.limits() == before
    assert getattr(pool.limits(**{name: "10MB"}), name) == 10**7  # type: ignore[arg-type]


def test_what_cannot_be_a_fraction_is_not_said_to_be_one() -> None:
    pool = stagehand_alloc.pool()
    for ask in (
        lambda: pool.limits(d2h_bytes_per_second="fast"),
        lambda: pool.limits(piece="small"),
        lambda: pool.release_pinned("all"),
        lambda: pool.release_pinned(-1),
    ):
        assert "fraction" not in refused(ask, SizeError)


def test_numbers_of_numpy_are_sizes() -> None:
    numpy = pytest.importorskip("numpy")
    for size in (numpy.int64(1 << 20), numpy.uint32(1 << 20), numpy.float32(0.5)):
        stagehand_alloc.pool(high=size)
    refused(lambda: stagehand_alloc.pool(high=numpy.array([1])), SizeError, "high=")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["tpu", 1.5, [0], "", -1, 7, 10**9, "cuda:5", "cpu", True])
def test_statistics_of_a_device_there_is_none_of_are_refused(device: Any) -> None:
    torch.empty(1)
    refused(lambda: stagehand_alloc.stats(device), ConfigError, "evice")
    refused(lambda: stagehand_alloc.reset_peak_stats(device), ConfigError, "evice")
    with pytest.raises(ConfigError), stagehand_alloc.pool(device=device):
        pass


@pytest.mark.usefixtures("gpu")
def test_releasing_down_to_more_than_a_machine_has_releases_nothing() -> None:
    pool = stagehand_alloc.pool()
    with pool:
        pass
    assert pool.release_pinned(2**80) == 0


def test_a_compiler_that_is_asked_for_and_not_there_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(_recipe.find_compiler, stagehand_alloc.CompilerError, "CXX='no-such-compiler'")
    found, todo = _trigger._load(_trigger.LIBRARY, "13.0", None)
    assert found.state == "build failed"
    assert "no-such-compiler" in found.why
    assert "CXX" in todo


# --- the command line

GOOD = json.dumps(
    _steps.step_fields(1, stagehand_alloc.PoolStats(plan_state="learning"), {"kept": 1})
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "one"),
        ("vram_peak_mb", None),
        ("spill_bytes", []),
        ("restore_bytes", 10**400),
        ("stall_time_ms", float("nan")),
        ("pinned_bytes", "much"),
        ("pinned_bytes", [1]),
        ("plan_state", 3),
        ("plan_state", "\x1b[31mred"),
        ("proposed_classes_mb", "big"),
    ],
)
def test_a_line_of_telemetry_with_a_value_of_another_kind_is_skipped_and_counted(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({**json.loads(GOOD), name: value}) + "\n" + GOOD + "\n")
    assert main(["report", "--no-html", str(path)]) == 0
    shown = capsys.readouterr()
    # What every step has makes a line broken; else the value alone is nobody's.
    needed = name not in ("pinned_bytes", "proposed_classes_mb")
    assert ("1 line is broken" in shown.out) == needed
    assert "\x1b" not in shown.out + shown.err


@pytest.mark.parametrize("text", ["[1, 2]", "\0" * 1000, "hello", "[" * 100_000, "{}"])
def test_a_file_that_is_no_telemetry_is_an_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    assert main(["report", str(path)]) == 2
    assert "has no step in its 1 line" in capsys.readouterr().err


def test_a_last_line_that_was_cut_off_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    for cut in (3, 9, len(GOOD) // 2):
        path.write_text(GOOD + "\n" + GOOD[:cut])
        assert main(["report", str(path)]) == 0
        assert "1 steps" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert stagehand_alloc.__version__ in capsys.readouterr().out


def test_the_hooks_refuse_what_they_have_not_packed() -> None:
    hooks = _hooks.make_hooks(0, None, ModuleWatch())
    with pytest.raises(TypeError, match="no pack has returned"):
        hooks.unpack(object())
    with pytest.raises(TypeError, match="cannot create"):
        _native.Handle()
