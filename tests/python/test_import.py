"""Importing stays light, and the public names are the ones promised."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest

import stagehand_alloc
from stagehand_alloc._cli import doctor as _doctor

PUBLIC = {
    *("allocator", "pool", "keep", "stats", "reset_peak_stats", "load_config"),
    *("checkpoint", "when_needed"),
    *("offload", "offload_optimizer", "restore", "resident", "visit"),
    *("timeline", "Timeline", "snapshot"),
    *("Pool", "PoolStats", "Config", "LaneLimits", "SavedTensorInfo"),
    *("StepPlan", "PlanLine", "StepStats", "StagehandWarning"),
}


def test_importing_loads_neither_torch_nor_cuda(run_fresh: Callable[..., Any]) -> None:
    run_fresh("""
        import sys
        import stagehand_alloc
        heavy = {"torch", "numpy", "cuda", "ctypes", "transformers", "lightning"}
        heavy |= {"pytorch_lightning", "stagehand_alloc.integrations"}
        heavy &= set(sys.modules)
        assert not heavy, heavy
        maps = open("/proc/self/maps").read()
        assert "libcuda.so" not in maps and "libtorch" not in maps
    """)


def test_importing_takes_a_blink(run_fresh: Callable[..., Any]) -> None:
    done = run_fresh("""
        import time
        began = time.process_time()
        import stagehand_alloc
        print(time.process_time() - began)
    """)
    assert float(done.stdout) < 0.5


def test_public_names_are_the_ones_promised() -> None:
    public = {name for name in vars(stagehand_alloc) if not name.startswith("_")}
    errors = {name for name in public if name.endswith("Error")}
    modules = {"testing", "integrations"}  # submodules, once somebody has imported them
    assert public - errors - modules == PUBLIC


def test_every_error_is_a_stagehand_error() -> None:
    for name, value in vars(stagehand_alloc).items():
        if name.endswith("Error"):
            assert issubclass(value, stagehand_alloc.StagehandError)


def test_version_is_the_distribution_s() -> None:
    try:
        installed = importlib.metadata.version("stagehand_alloc")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("used from the source folder, not installed")
    assert stagehand_alloc.__version__ == installed


def test_doctor_runs_without_a_gpu_and_names_what_would_work(run_fresh: Callable[..., Any]) -> None:
    done = run_fresh("""
        from stagehand_alloc.__main__ import main
        raise SystemExit(main(["doctor"]))
    """)
    assert "simulated GPU    yes" in done.stdout
    assert "No CUDA driver was found" in done.stdout
    for name in ("pinned memory", "NUMA"):
        assert f"\n  {name:<16} " in done.stdout


def test_doctor_says_which_segments_native_mode_has_to_work_with() -> None:
    assert _doctor._segments({}).startswith("not expandable")
    assert _doctor._segments({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}).startswith("not")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = {name: "max_split_size_mb:512, expandable_segments:True"}
        assert _doctor._segments(settings).startswith("expandable")
    settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    assert _doctor._segments(settings).startswith("not expandable")


def test_doctor_survives_anything_missing(run_fresh: Callable[..., Any]) -> None:
    done = run_fresh(
        """
        import sys
        for name in ("torch", "cuda", "cuda.bindings", "stagehand_alloc._native"):
            sys.modules[name] = None
        from stagehand_alloc.__main__ import main
        raise SystemExit(main(["doctor"]))
        """,
        exit_code=1,
    )
    assert "real GPU         no" in done.stdout
    assert "simulated GPU    no" in done.stdout
