"""Sizes, budgets and configuration: what is read, and what is refused with which words."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import stagehand_alloc
from stagehand_alloc import Config, ConfigError, SizeError, load_config
from stagehand_alloc._settings import outer
from stagehand_alloc._settings.budget import Budget, resolve_budget
from stagehand_alloc._settings.host_memory import available_host_bytes, local_ranks
from stagehand_alloc._settings.load import ALIASES, KEYS
from stagehand_alloc._settings.sizes import format_bytes, parse_rate, parse_size, read_size

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
TOTAL = 24 * GIB
V0_FILE = {
    "learning_rate": 1e-4,
    "memory": {
        "strategy": "stagehand",
        "stagehand": {
            "pinned_pool_mb": 8192,
            "activation_stagehand": {
                "enabled": True,
                "vram_high_watermark_mb": 16000,
                "vram_low_watermark_mb": 12000,
                "pinned_pool_classes_mb": [1, 4, 16, 64, 256],
                "slabs_per_class": [512, 2, 2, 2, 2],
                "max_inflight_d2h": 1,
                "max_inflight_h2d": 1,
                "debug_checksums": False,
                "telemetry_enabled": True,
                "telemetry_file": "activation_telemetry.jsonl",
            },
        },
    },
}


def budget_of(high: Any = None, low: Any = None, limit: Any = None) -> Budget:
    return Config(high=high, low=low, limit=limit).budget(TOTAL)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        (12345, 12345),
        ("20GiB", 20 * GIB),
        ("20GB", 20 * 10**9),
        ("512MiB", 512 << 20),
        ("512 mb", 512 * 10**6),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("100B", 100),
        ("4KiB", 4096),
        ("1TiB", 1 << 40),
        (1.0, TOTAL),
        (0.5, TOTAL // 2),
        ("20Gi", 20 * GIB),
        ("50%", TOTAL // 2),
        (" 100 %", TOTAL),
    ],
)
def test_sizes_are_bytes_or_texts_or_fractions(value: Any, expected: int) -> None:
    assert parse_size(value, TOTAL) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, None, [1], b"1GiB"),
        *(1, 80, "0%", "101%", "%"),
        *("", "20", "GiB", "-1GiB", "20 XB", "1e3MB", "twenty GiB", "0GiB", "0.0001B"),
    ],
)
def test_what_is_no_size_is_refused_and_named(value: Any) -> None:
    with pytest.raises(SizeError) as caught:
        parse_size(value, TOTAL, "high")
    assert "high=" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_a_fraction_of_nothing_known_is_refused() -> None:
    for value in (0.5, "50%"):
        with pytest.raises(SizeError, match="fraction"):
            parse_size(value, None)


def test_default_budget_is_90_and_80_percent_of_the_device() -> None:
    budget = budget_of()
    assert budget.high == int(0.9 * TOTAL)
    assert abs(budget.low - int(0.8 * TOTAL)) <= 1
    assert budget.limit == TOTAL


def test_low_follows_high_where_only_high_is_given() -> None:
    assert budget_of("9GiB").low == 8 * GIB
    assert budget_of(1.0).low == int(0.8 * TOTAL)
    assert resolve_budget(1, None, None, TOTAL).low == 1


def test_high_follows_limit_where_only_limit_is_given() -> None:
    budget = budget_of(limit="10GiB")
    assert (budget.high, budget.low, budget.limit) == (9 * GIB, 8 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (("8GiB", "9GiB", None), ("low", "high")),
        (("25GiB", None, None), ("high", "device")),
        ((None, None, "25GiB"), ("limit", "device")),
        (("10GiB", None, "9GiB"), ("high", "limit")),
        ((None, "23GiB", None), ("low", "high")),
    ],
)
def test_contradictions_name_both_sides_with_numbers(sizes: Any, names: tuple[str, str]) -> None:
    with pytest.raises(SizeError) as caught:
        budget_of(*sizes)
    message = str(caught.value)
    assert all(name in message for name in names)
    assert "GiB" in message


def test_defaults_are_those_of_v0() -> None:
    config = Config()
    assert config.enabled
    assert config.pinned_classes() == (
        [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20],
        [512, 2, 2, 2, 2],
    )
    assert (config.high, config.low) == (None, None)


def test_a_v0_file_is_read_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(V0_FILE))
    config = load_config(path)
    assert config == load_config(str(path)) == load_config(V0_FILE)
    assert config.high == 16000 << 20
    assert config.low == 12000 << 20
    assert config.slabs_per_class == (512, 2, 2, 2, 2)
    assert config.telemetry is True
    assert config.telemetry_path == "activation_telemetry.jsonl"
    assert config.max_inflight_d2h == 1


def around(inside: Any = None, **block: Any) -> dict[str, Any]:
    """A trainer's settings with a `stagehand` block, and ours in it where there is one."""
    if inside is not None:
        block["activation_stagehand"] = inside
    return {"memory": {"strategy": "stagehand", "stagehand": block}}


def told_of(settings: dict[str, Any]) -> list[str]:
    """Reads them, and gives the lines of the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_config(settings)
    return [line for one in told for line in str(one.message).splitlines()]


def test_what_our_block_does_not_say_is_taken_from_the_stagehand_block_around_it() -> None:
    block = {
        "vram_high_watermark_mb": 20000,
        "vram_low_watermark_mb": 16000,
        "max_inflight_transfers": 2,
        "telemetry_enabled": True,
        "telemetry_file": "weights.jsonl",
        "host_limit": "30GiB",
    }
    expected = Config(
        high=20000 << 20,
        low=16000 << 20,
        max_inflight_h2d=2,
        telemetry=True,
        telemetry_file="weights.jsonl",
        host_limit="30GiB",
    )
    assert load_config(around(**block)) == load_config(around({}, **block)) == expected
    assert told_of(around({"recompute": True}, **block)) == []
    inside = load_config(around({"max_inflight_h2d": 1, "telemetry": "mine.jsonl"}, **block))
    assert (inside.max_inflight_h2d, inside.telemetry_path) == (1, "mine.jsonl")
    assert inside.high == 20000 << 20


def test_a_budget_is_of_one_block_alone() -> None:
    # Mixed, this low would be above this high.
    settings = around({"high": "10GiB"}, vram_high_watermark_mb=22000, vram_low_watermark_mb=18000)
    with pytest.warns(stagehand_alloc.StagehandWarning):
        config = load_config(settings)
    assert (config.high, config.low) == (10 * GIB, None)
    assert [line.split(":")[0].strip() for line in told_of(settings)[1:]] == [
        "vram_high_watermark_mb",
        "vram_low_watermark_mb",
    ]
    assert told_of(around({"high": 22000 << 20}, vram_high_watermark_mb=22000)) == []


def test_a_budget_beside_a_stagehand_block_is_refused_and_another_block_in_it_is_no_setting() -> (
    None
):
    with pytest.raises(ConfigError, match='vram_high_watermark_mb, low beside a "stagehand" block'):
        load_config({"vram_high_watermark_mb": 9000, "low": "7GiB", "stagehand": {"high": "9GiB"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        within = {"activation": {"activation_stagehand": {"high": "8GiB"}}}
        assert load_config({"stagehand": within}).high == 8 << 30


@pytest.mark.parametrize("key", outer.WITHOUT_EFFECT)
def test_a_key_of_the_stagehand_block_without_effect_is_named_with_what_is_done_instead(
    key: str,
) -> None:
    kind, why = outer.WITHOUT_EFFECT[key]
    value, wrong = {"bool": (True, 3), "int": (7, True), "str": ("static", 1), "share": (0.3, 2)}[
        kind
    ]
    first, second = told_of(around({}, **{key: value}))
    assert "1 setting had no effect" in first
    assert second == f"  {key}: {why.replace('`', '')}"
    with pytest.raises(ConfigError, match=f"{key}={wrong}") as caught:
        load_config(around({}, **{key: wrong}))
    assert len(str(caught.value).splitlines()) == 2


def test_all_keys_without_effect_are_in_one_warning_at_the_users_line() -> None:
    settings = around(pinned_pool_mb=8192, two_stage=True, family="ltx2", strict_bf16=True)
    with pytest.warns(stagehand_alloc.StagehandWarning, match="4 settings had no effect") as told:
        stagehand_alloc.pool(config=settings)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "two_stage: there is no such setting" in str(told[0].message)


def test_what_asks_for_no_more_than_is_done_is_not_warned_of() -> None:
    quiet = {"nan_inf_check": False, "debug_trace": False, "telemetry_interval_steps": 1}
    assert told_of(around({}, **quiet)) == []
    assert told_of({"activation_stagehand": {}, "stage": {"pinned_pool_mb": 1}}) == []


def test_keys_may_stand_at_the_top() -> None:
    assert load_config({"slabs_per_class": 3}).pinned_classes()[1] == [3] * 5
    assert load_config({}) == Config()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_toml_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('lr = 1.0\n[activation_stagehand]\nhost_limit = "4GiB"\n')
    assert load_config(path).host_limit_bytes() == 4 * GIB


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vram_hi_watermark_mb": 1}, "vram_high_watermark_mb"),
        ({"slabs": 1}, "slabs_per_class"),
        ({"activation_stagehand": {"telemetry": 5}}, "telemetry=5"),
        ({"telemetry_enabled": "yes"}, "telemetry_enabled='yes'"),
        ({"high": "20GiB", "vram_high_watermark_mb": 5}, "'high' and 'vram_high_watermark_mb'"),
        ({"vram_high_watermark_mb": 5, "high": "20GiB"}, "one setting, and both are given"),
        ({"low": "2GiB", "high": "1GiB"}, "low is 2.00 GiB, above high, 1.00 GiB"),
        ({"low": 0.9, "limit": "50%"}, "low is 90%, above limit, 50%"),
        ({"high": "plenty"}, "high='plenty'"),
        ({"device": "cpu"}, "device='cpu' is no CUDA device"),
        ({"piece": 5}, "piece=5"),
        ({"recompute": "blocks"}, "recompute='blocks'"),
        ({"activation_stagehand": 3}, "activation_stagehand"),
        ({"stagehand": 3}, "stagehand is a int"),
        ({"a": {"stagehand": {}}, "b": {"stagehand": {}}}, '2 blocks "stagehand"'),
        ({"stagehand": {"vram_high_watermark_mb": "20000"}}, "vram_high_watermark_mb='20000'"),
        ({"stagehand": {"max_inflight_transfers": 0}}, "max_inflight_transfers=0"),
        ({"stagehand": {"telemetry_enabled": 1}}, "telemetry_enabled=1"),
        (
            {"stagehand": {"telemetry_file": 5, "activation_stagehand": {"telemetry_file": "a"}}},
            "telemetry_file=5",
        ),
        (
            {"stagehand": {"vram_high_watermark_mb": 1, "vram_low_watermark_mb": 2}},
            "low is 2.00 MiB, above high",
        ),
        ({"stagehand": {"activation_stagehand": {"slabs": 1}}}, "slabs_per_class"),
        ({"slabs_per_class": [1, 2]}, "2 counts for 5"),
        ({"slabs_per_class": -1}, "negative"),
        ({"slabs_per_class": [1, 1, 1, 1, -1]}, "negative"),
        ({"slabs_per_class": "many"}, "slabs_per_class"),
        ({"pinned_pool_classes_mb": []}, "pinned_pool_classes_mb"),
        ({"pinned_pool_classes_mb": [4, 1], "slabs_per_class": 1}, "rising"),
        ({"pinned_pool_classes_mb": [-1, 1], "slabs_per_class": 1}, "positive"),
        ({"pinned_pool_classes_mb": 4}, "pinned_pool_classes_mb"),
        ({"vram_high_watermark_mb": -5}, "vram_high_watermark_mb"),
        ({"vram_high_watermark_mb": "16000"}, "vram_high_watermark_mb"),
        ({"vram_high_watermark_mb": 1, "vram_low_watermark_mb": 2}, "low is 2.00 MiB, above high"),
        ({"max_inflight_d2h": 0}, "max_inflight_d2h"),
        ({"max_inflight_h2d": True}, "max_inflight_h2d"),
        ({"recompute_threshold_bytes": -1}, "recompute_threshold_bytes"),
        ({"enabled": 1}, "enabled"),
        ({"telemetry_file": ""}, "telemetry_file"),
        ({"host_limit": "plenty"}, "host_limit"),
        ({"host_limit": -1}, "host_limit"),
        ({"d2h_bytes_per_second": 0}, "d2h_bytes_per_second=0"),
        ({"h2d_bytes_per_second": 0.5}, "h2d_bytes_per_second=0.5"),
        ({"d2h_bytes_per_second": "10 Gbit"}, "d2h_bytes_per_second"),
        ({"host_limit": "1000KiB"}, "host_limit is 1000.00 KiB"),
        (
            {"host_limit": "3MiB", "pinned_pool_classes_mb": [4], "slabs_per_class": 1},
            "class, 4.00 MiB",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["", "[1, 2]", "{not json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load_config(tmp_path / "absent.json")


def test_settings_without_effect_are_warned_of() -> None:
    with pytest.warns(stagehand_alloc.StagehandWarning, match=r"recompute_threshold_bytes") as told:
        stagehand_alloc.pool(config={"recompute_threshold_bytes": 3})
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stagehand_alloc.pool(config={"recompute_threshold_bytes": 0})


WHOLE = {
    "high": "20GiB",
    "low": 0.5,
    "limit": "22GiB",
    "mode": "native",
    "device": "cuda:1",
    "recompute": "nodes",
    "telemetry": "steps.jsonl",
    "host_limit": "80%",
    "piece": "1MiB",
    "d2h_bytes_per_second": "10GB",
}


def test_a_file_holds_a_whole_configuration(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    path.write_text(json.dumps(WHOLE))
    config = load_config(path)
    assert config == Config(**WHOLE)  # type: ignore[arg-type]
    assert (config.high, config.low, config.limit) == (20 * GIB, 0.5, 22 * GIB)
    assert config.telemetry_path == "steps.jsonl"
    pool = stagehand_alloc.pool(config=path)
    assert (pool.limits().piece, pool.limits().d2h_bytes_per_second) == (1 << 20, 10**10)
    assert pool._mode_asked == "native"
    # The arguments win, and a size is the same however it is written.
    assert stagehand_alloc.pool(20 << 30, config=path)._config == config
    assert stagehand_alloc.pool("21GiB", telemetry=False, config=path)._config.telemetry is False


def test_every_argument_of_a_pool_that_a_file_can_hold_is_a_setting_of_that_name() -> None:
    arguments = set(inspect.signature(stagehand_alloc.pool).parameters)
    assert arguments - {"config", "keep", "on_step"} <= set(KEYS)
    assert not set(ALIASES) & set(KEYS)
    assert {name for name, _ in ALIASES.values()} <= set(KEYS)


def test_telemetry_of_v0_keeps_its_file_s_name_while_it_is_off() -> None:
    config = {"telemetry_enabled": False, "telemetry_file": "mine.jsonl"}
    assert stagehand_alloc.pool(config=config)._config.telemetry_path is None
    assert (
        stagehand_alloc.pool(config=config, telemetry=True)._config.telemetry_path == "mine.jsonl"
    )
    assert stagehand_alloc.pool(config=config, telemetry=Path("x"))._config.telemetry_path == "x"


def test_a_rate_is_what_people_write_for_one() -> None:
    for value in ("10GB", "10GB/s", "10 GB / s", 10**10, 10e9):
        assert parse_rate(value, "rate") == 10**10


def test_nothing_to_keep_may_be_written_as_a_size() -> None:
    assert stagehand_alloc.pool().release_pinned("0GiB") == 0
    assert read_size("0B", zero=True, shares=False) == 0


def test_the_table_of_settings_is_made_from_the_code() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "settings.py"), "--check"], check=False
    )
    assert done.returncode == 0, "run python tools/settings.py"


def test_a_host_limit_as_a_fraction_is_held_against_the_machine() -> None:
    config = Config(host_limit=1e-9)
    with pytest.raises(ConfigError, match=r"host_limit is \d+ B, under one slab"):
        config.host_limit_bytes()


def test_the_host_limit_defaults_to_half_of_what_is_available() -> None:
    available = available_host_bytes()
    assert abs(Config().host_limit_bytes() - available // 2) < available // 4
    assert Config(host_limit=0.25).host_limit_bytes() < available // 2


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_ranks_on_one_machine_are_counted_by_the_launchers_word(
    environment: dict[str, str], ranks: int
) -> None:
    assert local_ranks(environment) == ranks


def test_ranks_on_one_machine_share_the_default_host_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Config().host_limit_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert alone // 8 < Config().host_limit_bytes() < alone // 2


def test_available_host_memory_respects_control_groups(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 4194304 kB\n")
    cgroup.write_text("0::/job/step\n")
    assert available_host_bytes(meminfo, cgroup, tmp_path) == 4 * GIB
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "job" / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "job" / "memory.current").write_text(f"{GIB}\n")
    assert available_host_bytes(meminfo, cgroup, tmp_path) == GIB
    (tmp_path / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    assert available_host_bytes(meminfo, cgroup, tmp_path) == 3 * GIB // 2


def test_version_1_control_groups_count_too(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemAvailable: 4194304 kB\n")
    cgroup.write_text("5:cpu,memory:/job\n2:devices:/\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text(str(GIB))
    assert available_host_bytes(meminfo, cgroup, tmp_path) == GIB


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (20 * GIB, "20.00 GiB"),
        (1 << 42, "4.00 TiB"),
    ],
)
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_a_share_of_the_device_is_pinned_first_unless_slabs_were_asked_for() -> None:
    assert Config().first_share() > 0
    assert Config(slabs_per_class=2).first_share() == 0
    asked = Config(pinned_pool_classes_mb=(2,), slabs_per_class=(2,))
    assert asked.first_share() == 0
