"""`python -m stagehand_alloc doctor`: what is here, and what would work. Never fails itself."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from stagehand_alloc import _driver
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books.table import pinned_lines
from stagehand_alloc._built import build as _build
from stagehand_alloc._built import cache as _cache
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import tensors as _tensors
from stagehand_alloc._built import trigger as _trigger
from stagehand_alloc._errors import StagehandError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.host_memory import (
    available_host_bytes,
    default_host_limit,
    local_ranks,
)
from stagehand_alloc._settings.sizes import format_bytes
from stagehand_alloc._step import proofs as _recompute


def main(telemetry: str | None = None) -> int:
    """Print the findings; 0 where the real or the simulated GPU would work, else 1.

    ``telemetry`` is a file of a run, for what it says of the pinned pool.
    """
    for name, probe in _FACTS.items():
        print(f"{name:<16} {_attempt(probe)[1]}")
    if telemetry is not None:
        print(f"{'last run':<16} {_attempt(lambda: _last_run(telemetry))[1]}")
    print()
    works = False
    for name, check in _WAYS.items():
        good, text = _attempt(check)
        works = works or good
        print(f"{name:<16} {'yes' if good else 'no'}: {text}")
    return 0 if works else 1


def _attempt(probe: Callable[[], str]) -> tuple[bool, str]:
    """The probe's answer, or what went wrong in one line."""
    try:
        return True, probe()
    except StagehandError as error:
        return False, error.what
    except Exception as error:  # whatever is broken here is a finding
        return False, " ".join(str(error).splitlines()) or type(error).__name__


def _python() -> str:
    return f"{platform.python_version()} on {platform.platform()}"


def _torch() -> str:
    import torch

    cuda = torch.version.cuda
    return f"{torch.__version__}, " + (f"CUDA {cuda}" if cuda else "no CUDA")


def _cuda_python() -> str:
    return metadata.version("cuda-python")


def _driver_version() -> str:
    count = _driver.device_count()
    version = _driver.driver_version()
    return f"CUDA {version // 1000}.{version % 1000 // 10}, {count} device(s)"


def _devices() -> str:
    found = [_driver.device(index) for index in range(_driver.device_count())]
    return "; ".join(
        f"{device.index}: {device.name}, {format_bytes(device.total)}, virtual memory "
        f"{'yes' if device.virtual_memory else 'NO'}"
        for device in found
    )


def _host() -> str:
    ranks = local_ranks()
    shared = f", shared by {ranks} processes" if ranks > 1 else ""
    found = format_bytes(available_host_bytes())
    return f"{found} available for evicted activations, half used{shared}"


def _pinned_memory(
    huge_pages: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> str:
    limit = f"grows as needed, by default to {format_bytes(default_host_limit())}"
    try:
        mode = huge_pages.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        mode = ""
    if mode in ("always", "madvise"):
        return f"{limit}, in huge pages"
    return f"{limit}, WITHOUT huge pages, so it is slow to pin: set {huge_pages} to madvise"


def _numa() -> str:
    found = _driver.host_nodes()
    if len(found) < 2:
        return "one node: all host memory is equally near"
    free = ", ".join(f"{node}: {format_bytes(_free_on(node))} free" for node in found)
    return f"{len(found)} nodes ({free}); {_attempt(_device_nodes)[1]}"


def _free_on(node: int) -> int:
    lines = (_driver.NODES / f"node{node}" / "meminfo").read_text().splitlines()
    return next((int(line.split()[3]) * 1024 for line in lines if "MemFree:" in line), 0)


def _device_nodes() -> str:
    return ", ".join(
        f"device {index} is near " + (f"node {node}" if node >= 0 else "no known node")
        for index, node in enumerate(_driver.numa_nodes())
    )


def _last_run(path: str) -> str:
    lines = pinned_lines(_runs.read([path]).runs[-1])
    return "; ".join(lines) or f"{path} says nothing of pinned memory"


def _compiler() -> str:
    path = _recipe.find_compiler()
    if path is None:
        return "none (needed for the trigger library and for the simulated GPU)"
    return f"{path}: {_recipe.compiler_version(path).splitlines()[0]}"


def _cache_folder() -> str:
    try:
        folder, there = _cache.look()
    except _cache.RefusedError as why:
        return f"not used, {why}; libraries are built into a temporary folder, for each process"
    return str(folder) if there else f"{folder}, not made yet"


def _segments(environment: Mapping[str, str] = os.environ) -> str:
    older = environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = environment.get("PYTORCH_ALLOC_CONF", older)
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        return "expandable, as is best for mode native"
    return (
        "not expandable; mode native evicts less and is quicker with "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def _extension() -> str:
    return f"{native.__file__}, Python {sys.version_info.major}.{sys.version_info.minor}"


def _real_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    native.driver_symbols()  # the extension loads
    names = [_driver.require_virtual_memory(index).name for index in range(_driver.device_count())]
    return f"pool() as it is, or through allocator(), on {', '.join(names)}"


def _simulated_gpu() -> str:
    import torch  # noqa: F401  # whose tensors go there

    from stagehand_alloc import testing

    testing._library_path()
    if _build.kept(testing._CPU_BRIDGE) is None and _build.forbidden():
        raise RuntimeError(f"{_build.FORBID} forbids to build the CPU bridge")
    return "stagehand_alloc.testing.simulated_gpu(), python -m stagehand_alloc demo"


_FACTS = {
    "python": _python,
    "torch": _torch,
    "cuda-python": _cuda_python,
    "driver": _driver_version,
    "devices": _devices,
    "host memory": _host,
    "pinned memory": _pinned_memory,
    "NUMA": _numa,
    "compiler": _compiler,
    "cache folder": _cache_folder,
    "trigger library": _trigger.outlook,
    "tensor library": _tensors.outlook,
    "recipe library": _recompute.outlook,
    "torch's segments": _segments,
    "extension": _extension,
}
_WAYS = {"real GPU": _real_gpu, "simulated GPU": _simulated_gpu}
