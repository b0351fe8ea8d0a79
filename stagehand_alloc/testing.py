"""The whole product without a GPU: torch's CPU tensors on a simulated one.

    from stagehand_alloc import testing
    with testing.simulated_gpu(memory="64MiB", seed=7) as gpu:
        with stagehand_alloc.pool(high="16MiB"):
            loss = model(batch)  # CPU tensors, which live in the simulated GPU's memory
        loss.backward()
    assert not gpu.hazards()

The simulator is a library that cuda-python takes for the driver's, libcuda.so.1; a bridge in it
routes torch's CPU tensors to the process allocator. No compiler is needed.
"""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stagehand_alloc import _driver
from stagehand_alloc._errors import SimulatorError
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Once
from stagehand_alloc._settings.sizes import Size, parse_size
from stagehand_alloc._torch_side import install as _install

_HOST_SYNCHRONOUS = 1  # native/sim/control.hpp: STAGEHAND_SIM_HOST_SYNCHRONOUS
_NO_POISON = 2  # STAGEHAND_SIM_NO_POISON
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@dataclass(frozen=True)
class Settings:
    """What a simulated GPU is made with; sizes in bytes, bandwidths in bytes per second."""

    memory: int
    seed: int
    devices: int
    d2h_bytes_per_s: int
    h2d_bytes_per_s: int
    poison: bool


class SimulatedGpu:
    """The simulated GPU of this process; made by `simulated_gpu`.

    As a context manager, tensors go to it inside the ``with`` and no longer after. Tensors that
    live on it stay valid when routing ends.
    """

    def __init__(self, settings: Settings, library: ctypes.CDLL) -> None:
        self.settings = settings
        self._sim = _with_prototypes(library)

    def __enter__(self) -> SimulatedGpu:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def memory(self) -> int:
        """Bytes of the device."""
        return self.settings.memory

    def open(self) -> None:
        """Make torch's new CPU tensors on the simulated GPU."""
        self._sim.stagehand_cpu_route(1)
        _install.set_simulated(True)

    def close(self) -> None:
        """Make torch's new CPU tensors in ordinary memory again."""
        _install.set_simulated(False)
        self._sim.stagehand_cpu_route(0)

    def hazards(self) -> list[str]:
        """Every ordering mistake seen so far, in words; empty is right."""
        found = []
        for index in range(self._sim.stagehand_sim_hazards(0)):
            size = self._sim.stagehand_sim_hazard_text(index, None, 0) + 1
            text = ctypes.create_string_buffer(size)
            self._sim.stagehand_sim_hazard_text(index, text, size)
            found.append(text.value.decode(errors="replace"))
        return found

    def clear_hazards(self) -> None:
        """Forget the hazards seen so far."""
        self._sim.stagehand_sim_clear_hazards()

    def fail(self, symbol: str, nth: int = 1, times: int = 1, result: int = OUT_OF_MEMORY) -> None:
        """Let calls ``nth`` (1: the next) to ``nth + times - 1`` of a driver function fail.

        ``times=0`` takes the fault back. Raises SimulatorError for a function there is not.
        """
        if self._sim.stagehand_sim_fail(symbol.encode(), nth, times, result) != 0:
            raise SimulatorError(
                f"The simulated GPU has no function {symbol!r}.",
                "Name one of stagehand_alloc._native.driver_symbols().",
            )

    def call_count(self, symbol: str) -> int:
        """How often a driver function was called."""
        return int(self._sim.stagehand_sim_call_count(symbol.encode()))

    def host_waits(self) -> int:
        """How many calls really had to wait for the device."""
        return int(self._sim.stagehand_sim_host_waits())

    def physical_bytes(self, device: int = 0) -> int:
        """Device memory created and not given back, in bytes."""
        return int(self._sim.stagehand_sim_physical_bytes(device))

    def mapped_bytes(self, device: int = 0) -> int:
        """Device memory mapped, in bytes; an alias counts again."""
        return int(self._sim.stagehand_sim_mapped_bytes(device))

    def drain(self) -> None:
        """Let all queued work finish."""
        self._sim.stagehand_sim_drain()

    def clock_ns(self) -> int:
        """The host's virtual time."""
        return int(self._sim.stagehand_sim_clock_ns())

    def set_seed(self, seed: int) -> None:
        """Let all work finish; from here on the scheduler draws what this seed draws."""
        self._sim.stagehand_sim_seed(seed)

    def set_progress(self, probability: float) -> None:
        """How likely the device makes unasked progress where it may (0.25 at first)."""
        self._sim.stagehand_sim_progress(probability)


_running = Once[SimulatedGpu]()


def simulated_gpu(
    memory: Size = "1GiB",
    seed: int = 0,
    *,
    devices: int = 1,
    d2h_bytes_per_s: int = 0,
    h2d_bytes_per_s: int = 0,
    poison: bool = True,
) -> SimulatedGpu:
    """Put torch's CPU tensors on a simulated GPU from here on, or for a ``with``.

    One per process: asked again with the same settings it returns the same one, open.

    Args:
        memory: bytes, or a text with a unit. Host memory of that size must be there.
        seed: of the scheduler that picks which stream goes next.
        devices: tensors go to device 0; more are there for the core.
        d2h_bytes_per_s, h2d_bytes_per_s: what the virtual clock charges; 0 is the default.
        poison: fill fresh device memory with a pattern, so that reading it shows.

    Raises SimulatorError where a real driver is loaded, one with other settings is running, or the
    CPU tensors of this torch cannot be routed.
    """
    if isinstance(memory, float):
        raise SimulatorError(f"memory={memory!r} is a fraction, of nothing.", 'Say "1GiB".')
    settings = Settings(
        parse_size(memory, None, "memory"), seed, devices, d2h_bytes_per_s, h2d_bytes_per_s, poison
    )
    gpu = _running.get(lambda: _start(settings))
    if gpu.settings != settings:
        raise SimulatorError(
            f"A simulated GPU is running in this process with {gpu.settings}.",
            "Use the same settings, or another process.",
        )
    gpu.open()
    return gpu


def _start(settings: Settings) -> SimulatedGpu:
    library = library_path()
    loaded = loaded_drivers()
    if _driver.started() or loaded:
        raise SimulatorError(
            f"A CUDA driver is loaded in this process already ({', '.join(loaded) or 'in use'}).",
            "Call simulated_gpu() before anything uses CUDA, or in another process.",
        )
    import torch

    # Of a torch with CUDA, which asks the simulator how many GPUs there are and is told none.
    warnings.filterwarnings("ignore", "CUDA initialization: Unexpected error", module="torch.cuda")
    sim = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    flags = _HOST_SYNCHRONOUS | (0 if settings.poison else _NO_POISON)
    result = sim.stagehand_sim_configure(
        ctypes.c_uint64(settings.memory),
        ctypes.c_int(settings.devices),
        ctypes.c_uint64(settings.seed),
        ctypes.c_uint64(settings.d2h_bytes_per_s),
        ctypes.c_uint64(settings.h2d_bytes_per_s),
        ctypes.c_uint(flags),
    )
    if result != 0:
        raise SimulatorError(
            f"The simulated GPU refuses {settings}.",
            "Give memory of at least 2 MiB and at least one device.",
        )
    sim.stagehand_cpu_install.restype = ctypes.c_char_p
    points = native.entry_points()
    if why := sim.stagehand_cpu_install(
        ctypes.c_void_p(points["alloc"]), ctypes.c_void_p(points["free"])
    ):
        raise SimulatorError(
            f"CPU tensors of torch {torch.__version__} cannot be routed: {why.decode()}.",
            "Update stagehand_alloc, or report it with the versions of torch and stagehand_alloc.",
        )
    _driver.start()
    return SimulatedGpu(settings, sim)


def library_path() -> Path:
    """The simulator's library. Raises SimulatorError where it is not there."""
    path = Path(native.__file__).parent / "_sim" / "libstagehand_sim.so"
    if not path.exists():
        raise SimulatorError(
            f"The simulator's library is not at {path}.",
            "Build it: `make setup` in the source folder, or `pip install stagehand_alloc`.",
        )
    return path


def loaded_drivers(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the CUDA driver libraries in this process."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith("libcuda.so"))


def _with_prototypes(library: Any) -> Any:
    """ctypes takes and returns ints of 32 bits unless told otherwise."""
    u64, text = ctypes.c_uint64, ctypes.c_char_p
    prototypes: dict[str, tuple[Any, list[Any]]] = {
        "stagehand_sim_progress": (None, [ctypes.c_double]),
        "stagehand_sim_seed": (None, [u64]),
        "stagehand_sim_drain": (None, []),
        "stagehand_sim_clock_ns": (u64, []),
        "stagehand_sim_hazards": (u64, [ctypes.c_int]),
        "stagehand_sim_hazard_text": (ctypes.c_size_t, [u64, text, ctypes.c_size_t]),
        "stagehand_sim_clear_hazards": (None, []),
        "stagehand_sim_fail": (ctypes.c_int, [text, u64, u64, ctypes.c_int]),
        "stagehand_sim_call_count": (u64, [text]),
        "stagehand_sim_host_waits": (u64, []),
        "stagehand_sim_physical_bytes": (u64, [ctypes.c_int]),
        "stagehand_sim_mapped_bytes": (u64, [ctypes.c_int]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
