"""Small copies to the GPU beside training, as another user of the link makes them, each timed.

A thread of its own copies 64 KiB of pinned memory on a stream of its own, waits for it, and pauses.
The loop is C, compiled where it runs, so that it never waits for Python's lock.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

BYTES = 64 << 10
PAUSE_NS = 50_000
MOST = 400_000  # copies that are noted

SOURCE = r"""
#include <time.h>
typedef int (*copy_fn)(unsigned long long, const void*, unsigned long, void*);
typedef int (*stream_fn)(void*);
static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
/* Copies until *stop; began[i] and took[i] in ns. Returns how many, or -1 when a call fails. */
long copies(stream_fn enter, void* context, copy_fn copy, stream_fn wait, unsigned long long to,
            const void* from, unsigned long bytes, void* stream, long long pause,
            volatile int* stop, long long* began, long long* took, long most) {
  long count = 0;
  if (enter(context)) return -1;
  while (!*stop && count < most) {
    long long start = now();
    if (copy(to, from, bytes, stream) || wait(stream)) return -1;
    began[count] = start;
    took[count] = now() - start;
    ++count;
    while (now() - start < took[count - 1] + pause) { }
  }
  return count;
}
"""


class ForeignCopies:
    """The copies, while entered. `between` gives their times in microseconds."""

    def __init__(self, simulated: bool) -> None:
        self._stop = ctypes.c_int(0)
        self._began = (ctypes.c_longlong * MOST)()
        self._took = (ctypes.c_longlong * MOST)()
        self._count = 0
        if simulated:
            self._run = self._copy_in_memory
        else:
            self._prepare()
            self._run = self._copy_to_gpu
        self._thread = threading.Thread(target=self._main)

    def __enter__(self) -> ForeignCopies:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop. Raises RuntimeError where a copy failed."""
        self._stop.value = 1
        self._thread.join()
        if self._count < 0 and error is None:
            raise RuntimeError("a foreign copy failed in the driver")

    def between(self, spans: list[tuple[int, int]]) -> list[float]:
        """Microseconds of each copy that began within a span of time.perf_counter_ns()."""
        return [
            self._took[at] / 1e3
            for at in range(self._count)
            if any(start <= self._began[at] < end for start, end in spans)
        ]

    def _main(self) -> None:
        self._count = self._run()

    def _prepare(self) -> None:
        self._library = compiled(SOURCE)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(self._context))
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream()
        self._host = torch.ones(BYTES, dtype=torch.uint8, pin_memory=True)
        self._to = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def _copy_to_gpu(self) -> int:
        driver = self._driver
        copies: Any = self._library.copies
        copies.restype = ctypes.c_long
        addresses = [
            ctypes.cast(function, ctypes.c_void_p)
            for function in (
                driver.cuCtxSetCurrent,
                driver.cuMemcpyHtoDAsync_v2,
                driver.cuStreamSynchronize,
            )
        ]
        enter, copy, wait = addresses
        return int(
            copies(
                *(enter, self._context, copy, wait),
                *(ctypes.c_ulonglong(self._to.data_ptr()), ctypes.c_void_p(self._host.data_ptr())),
                *(ctypes.c_ulong(BYTES), ctypes.c_void_p(self._stream.cuda_stream)),
                *(ctypes.c_longlong(PAUSE_NS), ctypes.byref(self._stop)),
                *(self._began, self._took, ctypes.c_long(MOST)),
            )
        )

    def _copy_in_memory(self) -> int:
        """Where there is no GPU: something of the same form to time."""
        source, target = bytes(BYTES), bytearray(BYTES)
        count = 0
        while not self._stop.value and count < MOST:
            began = time.perf_counter_ns()
            target[:] = source
            self._began[count] = began
            self._took[count] = time.perf_counter_ns() - began
            count += 1
            time.sleep(1e-3)
        return count


def compiled(source_text: str) -> ctypes.CDLL:
    """The library that a text of C makes."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("this needs a C compiler (cc, gcc or clang)")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "copies.c", Path(folder) / "copies.so"
        source.write_text(source_text, encoding="utf-8")
        command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True, timeout=60)
        return ctypes.CDLL(str(library))
