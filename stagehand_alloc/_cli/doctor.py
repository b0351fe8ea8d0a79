"""`python -m stagehand_alloc doctor`: what is here, what the link carries, and what to change.

What is broken is a finding, in words; nothing here raises but for a file that is no telemetry.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from stagehand_alloc import __version__, _driver
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books.table import pinned_lines
from stagehand_alloc._built import build as _build
from stagehand_alloc._built import cache as _cache
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import tensors as _tensors
from stagehand_alloc._built import trigger as _trigger
from stagehand_alloc._cli import link as _link
from stagehand_alloc._errors import NoCudaBuildError, StagehandError, TelemetryError, in_one_line
from stagehand_alloc._extension import native
from stagehand_alloc._settings.host_memory import (
    available_host_bytes,
    cgroup_limit,
    default_host_limit,
    local_ranks,
)
from stagehand_alloc._settings.sizes import format_bytes
from stagehand_alloc._step import proofs as _recompute

WORKS, DOES_NOT, COULD_NOT = 0, 1, 2  # 2 is a wrong command line, too
_SLOW_LINK = 10e9  # bytes per second: less than PCIe 3 x16 carries
_SLOW_PINNING = 1e9
_REPORT = "Report it, with what `python -m stagehand_alloc doctor --json` prints."
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Finding:
    """Something that costs time or memory, or does not work, and what to do about it."""

    what: str
    todo: str


@dataclass
class Findings:
    """All that was found; `asdict` of it is what ``--json`` prints."""

    version: str = __version__
    works: bool = False
    facts: dict[str, str] = field(default_factory=dict)
    links: list[_link.Rates] = field(default_factory=list)
    simulated: bool = False  # whether the links are the simulated GPU's
    ways: dict[str, str] = field(default_factory=dict)  # each begins with yes or no
    findings: list[Finding] = field(default_factory=list)


def main(telemetry: str | None = None, *, as_json: bool = False) -> int:
    """Print what was found; 0 where the real or the simulated GPU works, else 1.

    ``telemetry`` is a file of a run, for what it says of the pinned pool; 2 where it is none.
    Measuring takes some seconds.
    """
    try:
        found = look(telemetry)
    except TelemetryError as error:
        print(error, file=sys.stderr)
        return COULD_NOT
    print(json.dumps(asdict(found), indent=2) if as_json else _text(found))
    return WORKS if found.works else DOES_NOT


def look(telemetry: str | None = None) -> Findings:
    """Ask everything, measure the links, and judge. Raises TelemetryError for such a file."""
    last_run = {} if telemetry is None else {"last run": _last_run(telemetry)}
    found = Findings()
    found.facts = {name: _attempt(probe).text for name, probe in _FACTS.items()} | last_run
    for name, way in _WAYS.items():
        answer = _attempt(way)
        found.ways[name] = f"{'yes' if answer.good else 'no'}: {answer.text}"
        found.works = found.works or answer.good
        if not answer.good:
            found.findings.append(Finding(f"{name}: {answer.text}", answer.todo))
    _measure(found)
    found.findings += [one for judge in _JUDGES for one in _judged(judge, found)]
    return found


def _measure(found: Findings) -> None:
    """The links of the real GPUs, or else of the simulated one."""
    real, simulated = (text.startswith("yes") for text in found.ways.values())
    found.simulated = simulated and not real
    if not real and not simulated:
        return
    try:
        found.links = _link.measure(simulated=not real)
    except StagehandError as error:
        found.findings.append(Finding(error.what, error.todo))
        found.works = real


def _text(found: Findings) -> str:
    lines = ["This machine"]
    lines += [f"  {name:<16} {text}" for name, text in found.facts.items()]
    lines += ["", "The link to the host" + (", simulated" if found.simulated else "")]
    lines += [f"  device {one.device:<9} {_rates(one)}" for one in found.links]
    if not found.links:
        lines.append("  not measured")
    lines += ["", "What works"]
    lines += [f"  {name:<16} {text}" for name, text in found.ways.items()]
    lines += ["", "What to change" if found.findings else "Nothing to change."]
    for number, one in enumerate(found.findings, 1):
        lines += [f"  {number}. {one.what}", f"     {one.todo}"]
    return "\n".join(lines)


def _rates(one: _link.Rates) -> str:
    pinning = "" if one.pinning is None else f"; pinning {one.pinning / 1e9:.1f} GB/s"
    return f"{one.to_host / 1e9:.1f} GB/s to the host, {one.to_device / 1e9:.1f} GB/s back{pinning}"


def _judged(judge: Callable[[Findings], list[Finding]], found: Findings) -> list[Finding]:
    """What the judge says; nothing where what it asks about is not there to be asked."""
    try:
        return judge(found)
    except Exception:  # the fact of the same name says what is wrong
        return []


@dataclass(frozen=True)
class _Answer:
    good: bool
    text: str  # or what went wrong, in one line
    todo: str = ""


def _attempt(probe: Callable[[], str]) -> _Answer:
    try:
        return _Answer(True, probe())
    except StagehandError as error:
        return _Answer(False, error.what, error.todo)
    except ImportError as error:
        return _Answer(False, str(error), "Install it: pip install stagehand_alloc")
    except Exception as error:  # whatever is broken here is a finding
        return _Answer(False, in_one_line(error), _REPORT)


def _python() -> str:
    return f"{platform.python_version()} on {platform.platform()}"


def _torch() -> str:
    torch = _import_torch()

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
    return f"{found} available, of which saved activations may take half{shared}"


def _cgroup() -> str:
    limit = cgroup_limit()
    return "no limit" if limit is None else f"at most {format_bytes(limit)} for this process"


def _pinned_memory(huge_pages: Path = _HUGE_PAGES) -> str:
    limit = f"grows as needed, by default to {format_bytes(default_host_limit())}"
    return f"{limit}, in huge pages" if _has_huge_pages(huge_pages) else f"{limit}, in small pages"


def _has_huge_pages(path: Path) -> bool:
    try:
        return path.read_text().partition("[")[2].partition("]")[0] in ("always", "madvise")
    except OSError:
        return False


def _numa() -> str:
    found = _driver.host_nodes()
    if len(found) < 2:
        return "one node: all host memory is equally near"
    free = ", ".join(f"{node}: {format_bytes(_free_on(node))} free" for node in found)
    return f"{len(found)} nodes ({free}); {_attempt(_device_nodes).text}"


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
        return "none; the libraries below are not built then, and Python stands in for them"
    return f"{path}: {_recipe.compiler_version(path).splitlines()[0]}"


def _cache_folder() -> str:
    try:
        folder, there = _cache.look()
    except _cache.RefusedError as why:
        return f"not used, {why}; libraries are built into a temporary folder, for each process"
    return str(folder) if there else f"{folder}, not made yet"


def _segments(environment: Mapping[str, str] = os.environ) -> str:
    return "expandable" if _expandable(environment) else "not expandable"


def _expandable(environment: Mapping[str, str] = os.environ) -> bool:
    older = environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = environment.get("PYTORCH_ALLOC_CONF", older)
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def _extension() -> str:
    return f"{native.__file__}, Python {sys.version_info.major}.{sys.version_info.minor}"


def _import_torch() -> Any:
    import torch

    return torch


def _real_gpu() -> str:
    torch = _import_torch()
    if torch.version.cuda is None:
        raise NoCudaBuildError(
            f"torch {torch.__version__} was built without CUDA.",
            "Install a torch with CUDA to train on a GPU; without one the simulated GPU works.",
        )
    native.driver_symbols()  # the extension loads
    names = [_driver.require_virtual_memory(index).name for index in range(_driver.device_count())]
    return f"stagehand_alloc.pool(high=...), on {', '.join(names)}"


def _simulated_gpu() -> str:
    from stagehand_alloc import testing

    _import_torch()  # whose tensors go there
    testing.library_path()
    return "python -m stagehand_alloc demo, and stagehand_alloc.testing.simulated_gpu() in tests"


def _slow_links(found: Findings) -> list[Finding]:
    slow = []
    for one in [] if found.simulated else found.links:
        least = min(one.to_host, one.to_device)
        if least < _SLOW_LINK:
            slow.append(
                Finding(
                    f"The link of device {one.device} carries {least / 1e9:.1f} GB/s; PCIe 3 x16 "
                    "carries 12. Moving is slow there.",
                    "Use recompute=model, which drops what is sooner made again; and see with "
                    "`nvidia-smi -q` (Link Width) whether the GPU has all 16 lanes.",
                )
            )
        if one.pinning is not None and one.pinning < _SLOW_PINNING:
            slow.append(
                Finding(
                    f"Host memory is pinned at {one.pinning / 1e9:.2f} GB/s; first steps wait.",
                    "Ask for it ahead: slabs_per_class and pinned_pool_classes_mb in the config.",
                )
            )
    return slow


def _no_huge_pages(_: Findings, path: Path = _HUGE_PAGES) -> list[Finding]:
    if _has_huge_pages(path):
        return []
    return [
        Finding("There are no huge pages, so host memory is slow to pin.", f"echo madvise > {path}")
    ]


def _little_host_memory(_: Findings) -> list[Finding]:
    host = default_host_limit()
    devices = [_driver.device(index) for index in range(_driver.device_count())]
    most = max(device.total for device in devices)
    if host >= most // 2:
        return []
    return [
        Finding(
            f"Saved activations may take {format_bytes(host)} of host memory, less than half of "
            f"the device's {format_bytes(most)}.",
            "Give the container or job more memory, or say how much may be used: host_limit.",
        )
    ]


def _far_from_the_device(_: Findings) -> list[Finding]:
    mine = os.sched_getaffinity(0)
    far = []
    for device, node in enumerate(_driver.numa_nodes()):
        near = _processors(_driver.NODES / f"node{node}" / "cpulist") if node >= 0 else mine
        if not near & mine:
            far.append(
                Finding(
                    f"This process may not run on node {node}, which device {device} is near.",
                    f"Start it with numactl --cpunodebind={node} --preferred={node}.",
                )
            )
    return far


def _processors(path: Path) -> set[int]:
    """Of a list such as 0-3,8."""
    ends = [part.split("-") for part in path.read_text().strip().split(",") if part]
    return {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}


def _no_compiler(_: Findings) -> list[Finding]:
    if _build.forbidden():
        return [
            Finding(
                f"{_build.FORBID} forbids to build libraries: memory may go over high between "
                "two saves, and saving a tensor takes longer.",
                f"Unset {_build.FORBID} once at least; what is built is kept.",
            )
        ]
    if _recipe.find_compiler() is not None:
        return []
    return [
        Finding(
            "There is no C++ compiler: memory may go over high between two saves, and saving a "
            "tensor takes longer.",
            _recipe.INSTALL_COMPILER,
        )
    ]


def _not_expandable(found: Findings) -> list[Finding]:
    if _expandable() or found.ways["real GPU"].startswith("no"):
        return []
    return [
        Finding(
            "PyTorch's segments are not expandable: more is moved in mode native.",
            "export PYTORCH_ALLOC_CONF=expandable_segments:True",
        )
    ]


_FACTS = {
    "stagehand_alloc": lambda: __version__,
    "python": _python,
    "torch": _torch,
    "cuda-python": _cuda_python,
    "driver": _driver_version,
    "devices": _devices,
    "host memory": _host,
    "memory cgroup": _cgroup,
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
_JUDGES: tuple[Callable[[Findings], list[Finding]], ...] = (
    _slow_links,
    _little_host_memory,
    _far_from_the_device,
    _no_huge_pages,
    _no_compiler,
    _not_expandable,
)
