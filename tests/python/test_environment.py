"""Settings from the environment, where neither arguments nor a config say anything."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import stagehand_alloc
from stagehand_alloc import ConfigError, ModeError, SizeError, StagehandWarning
from stagehand_alloc._tell import slow, warn, warn_once

pytestmark = pytest.mark.usefixtures("gpu")
MIB = 1 << 20


def budget_of(pool: stagehand_alloc.Pool) -> tuple[int, int]:
    with pool:
        found = pool.stats()
    return found.high, found.low


def test_a_pool_takes_its_sizes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEHAND_ALLOC_HIGH", "64MiB")
    monkeypatch.setenv("STAGEHAND_ALLOC_LOW", "33554432")
    assert budget_of(stagehand_alloc.pool()) == (64 * MIB, 32 * MIB)


def test_arguments_and_a_config_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEHAND_ALLOC_HIGH", "64MiB")
    monkeypatch.setenv("STAGEHAND_ALLOC_LOW", "8MiB")
    monkeypatch.setenv("STAGEHAND_ALLOC_RECOMPUTE", "nodes")
    config = {"vram_high_watermark_mb": 48}
    assert budget_of(stagehand_alloc.pool(config=config)) == (48 * MIB, 8 * MIB)
    assert budget_of(stagehand_alloc.pool("32MiB", config=config)) == (32 * MIB, 8 * MIB)
    assert stagehand_alloc.pool()._config.recompute == "nodes"
    assert stagehand_alloc.pool(recompute=False)._config.recompute is False
    assert stagehand_alloc.pool(config=config)._config.recompute == "nodes"  # says nothing of it
    assert stagehand_alloc.pool(config={"recompute": False})._config.recompute is False


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("HIGH", "20 gigs", SizeError),
        ("LOW", "-1", SizeError),
        ("LIMIT", "nan", SizeError),
        ("RECOMPUTE", "perhaps", ConfigError),
    ],
)
def test_a_bad_one_is_named(
    name: str, text: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"STAGEHAND_ALLOC_{name}", text)
    with pytest.raises(error, match=f"STAGEHAND_ALLOC_{name}"):
        stagehand_alloc.pool()


@pytest.mark.parametrize("name", ["HIGH", "LOW", "LIMIT"])
@pytest.mark.parametrize(
    "text", ["0", "-5GiB", "1e400", "inf", "1.5", "0x10", "20GiB;", "high=20GiB", "$HIGH", "3"]
)
def test_nonsense_for_a_size_names_the_variable_and_says_what_a_size_is(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"STAGEHAND_ALLOC_{name}", text)
    with pytest.raises(SizeError) as caught:
        stagehand_alloc.pool()
    what, todo = str(caught.value).splitlines()
    assert what.startswith(f"STAGEHAND_ALLOC_{name}=")
    assert "GiB" in todo


def test_a_mode_there_is_none_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEHAND_ALLOC_MODE", "fast")
    with pytest.raises(ModeError, match="STAGEHAND_ALLOC_MODE=fast"):
        stagehand_alloc.pool()


def test_a_misspelt_one_is_warned_of_once_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warn_once, "said", set())
    monkeypatch.setenv("STAGEHAND_ALLOC_HIHG", "64MiB")
    with pytest.warns(StagehandWarning) as told:
        stagehand_alloc.pool()
    (said,) = told
    assert "STAGEHAND_ALLOC_HIHG" in str(said.message)
    assert "Did you mean STAGEHAND_ALLOC_HIGH?" in str(said.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stagehand_alloc.pool()


@pytest.mark.filterwarnings("error")
def test_every_variable_of_ours_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "said", set())
    for path in Path(stagehand_alloc.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bSTAGEHAND_ALLOC_[A-Z_]*[A-Z]\b", path.read_text()):
            monkeypatch.setenv(name, " ")
    stagehand_alloc.pool()


def test_an_empty_one_is_as_if_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIGH", "LOW", "LIMIT", "MODE", "RECOMPUTE", "TELEMETRY"):
        monkeypatch.setenv(f"STAGEHAND_ALLOC_{name}", " ")
    assert budget_of(stagehand_alloc.pool("64MiB", "32MiB")) == (64 * MIB, 32 * MIB)


# ---- what is told --------------------------------------------------------------------------------


def test_a_warning_names_the_users_line_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(StagehandWarning, match="no effect") as alone:
        stagehand_alloc.pool(config={"max_inflight_h2d": 1, "recompute_threshold_bytes": 5})
    assert alone[0].filename == __file__
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    with pytest.warns(StagehandWarning, match=r"^\[rank 3\] text") as one:
        warn("text")
    assert one[0].filename == __file__


def test_one_process_of_a_machine_says_that_it_builds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow("building")
    monkeypatch.setenv("LOCAL_RANK", "1")
    slow("building")
    assert caplog.messages == ["stagehand_alloc: building."]
