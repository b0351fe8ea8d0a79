"""What the link to the host carries, measured through the driver in a process of its own.

`python -m stagehand_alloc._cli.link [simulated]` prints a line of JSON. A driver that crashes or
hangs takes that process down, and not the one that asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from stagehand_alloc import _driver
from stagehand_alloc._errors import DriverError, StagehandError

TIMEOUT_S = 60.0
_BYTES = 256 << 20
_SIMULATED_BYTES = 16 << 20
_TIMES = 4  # the first warms up


@dataclass(frozen=True)
class Rates:
    """Of one device; bytes per second. On the simulated GPU times are those of its own clock."""

    device: int
    to_host: float
    to_device: float
    pinning: float | None  # None on the simulated GPU, which pins nothing


def measure(simulated: bool) -> list[Rates]:
    """The rates of each device, or of the simulated GPU. Raises DriverError."""
    words = [sys.executable, "-m", __name__, *(["simulated"] if simulated else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        why = f"nothing came back in {TIMEOUT_S:.0f} s."
    else:
        if done.returncode == 0:
            return [Rates(**one) for one in json.loads(done.stdout)]
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else f"the process ended with {done.returncode}."
    what = "The simulated GPU does not work" if simulated else "The link cannot be measured"
    raise DriverError(
        f"{what}: {why}", f"See more with `{sys.executable} -m {' '.join(words[2:])}`."
    )


def _measured(device: int, size: int, simulated: bool) -> Rates:
    """Rates of copies of ``size`` bytes between ``device`` and host memory pinned for it."""
    call = _driver.call
    handle = call("cuDeviceGet", device)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", handle))
    with mmap.mmap(-1, size) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = (ctypes.c_char * size).from_buffer(memory)
        host = ctypes.addressof(buffer)
        began = time.perf_counter()
        call("cuMemHostRegister", host, size, 0)
        pinning = size / (time.perf_counter() - began)
        there = call("cuMemAlloc", size)
        stream = call("cuStreamCreate", 1)
        to_host = _rate(lambda: call("cuMemcpyDtoHAsync", host, there, size, stream), size, stream)
        to_device = _rate(
            lambda: call("cuMemcpyHtoDAsync", there, host, size, stream), size, stream
        )
        call("cuMemFree", there)
        call("cuMemHostUnregister", host)
        del buffer
    return Rates(device, to_host, to_device, None if simulated else pinning)


def _rate(copy: Callable[[], object], size: int, stream: Any) -> float:
    """Bytes per second of the quickest copy, between two events on the device."""
    call = _driver.call
    start, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    seconds = []
    for _ in range(_TIMES):
        call("cuEventRecord", start, stream)
        copy()
        call("cuEventRecord", end, stream)
        call("cuEventSynchronize", end)
        seconds.append(call("cuEventElapsedTime", start, end) / 1e3)
    return float(size / min(seconds[1:]))


def _main(simulated: bool) -> int:
    try:
        if simulated:
            from stagehand_alloc import testing

            testing.simulated_gpu(memory="128MiB").close()
            found = [_measured(0, _SIMULATED_BYTES, True)]
        else:
            devices = range(_driver.device_count())
            found = [_measured(device, _BYTES, False) for device in devices]
    except StagehandError as error:
        print(error.what, file=sys.stderr)
        return 1
    print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(_main("simulated" in sys.argv[1:]))
