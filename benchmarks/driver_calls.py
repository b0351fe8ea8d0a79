"""Host time inside calls to CUDA, by function and thread: everybody's, ours and torch's.

CUPTI, which comes with PyTorch, calls a function of ours at the start and the end of every call to
the driver and to the CUDA runtime, made by whatever library. That function is C, compiled where it
runs. Calls inside other calls count to the outer one. A call costs about a microsecond more
meanwhile, so steps are not timed beside it.

Not seen: what other processes do, and time in which the host waits for something that is no call to
CUDA, such as a lock. Only one program at a time may ask CUPTI for this: torch.profiler comes after
it in a process, never before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import subprocess
from types import TracebackType
from typing import Any

from foreign import compiled

DOMAINS = (1, 2)  # of CUPTI: the driver's functions, the runtime's
NAMES = ("libcupti.so", "libcupti.so.13", "libcupti.so.12")
MOST = 4096  # functions times threads
# What makes device memory appear at an address and go away again.
MAPPING = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")

SOURCE = r"""
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 48, IDS = 2048, NAME = 48 };
typedef struct { int leaving; const char* function; } Data; /* CUpti_CallbackData begins so */
typedef struct { const char* function; long long calls, ns, longest; } Sum;
typedef struct { char function[NAME]; long long thread, calls, ns, longest; } Row;

static Sum sums[THREADS][2 * IDS];
static long threads[THREADS];
static int known, round_now;
static __thread int slot, depth, round_mine; /* slot 0: none yet */
static __thread long long began;

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void start(void) {
  memset(sums, 0, sizeof sums);
  ++round_now;
}

void on_call(void* unused, int domain, unsigned id, const Data* data) {
  if (round_mine != round_now) { /* what was not closed when CUPTI was left */
    round_mine = round_now;
    depth = 0;
  }
  if (!data->leaving) {
    if (depth++ == 0) began = now();
    return;
  }
  if (depth == 0 || --depth > 0) return;
  if (slot == 0) {
    slot = __atomic_add_fetch(&known, 1, __ATOMIC_RELAXED);
    if (slot <= THREADS) threads[slot - 1] = syscall(SYS_gettid);
  }
  if (slot > THREADS || id >= IDS) return;
  Sum* sum = &sums[slot - 1][(domain == 2) * IDS + id];
  long long took = now() - began;
  sum->function = data->function;
  sum->calls += 1;
  sum->ns += took;
  if (took > sum->longest) sum->longest = took;
}

long rows(Row* out, long most) {
  long count = 0;
  for (int at = 0; at < known && at < THREADS; ++at)
    for (int i = 0; i < 2 * IDS; ++i) {
      const Sum* sum = &sums[at][i];
      if (!sum->calls || count == most) continue;
      strncpy(out[count].function, sum->function ? sum->function : "?", NAME - 1);
      out[count].function[NAME - 1] = 0;
      out[count].thread = threads[at];
      out[count].calls = sum->calls;
      out[count].ns = sum->ns;
      out[count].longest = sum->longest;
      ++count;
    }
  return count;
}
"""


class Row(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char * 48),
        ("thread", ctypes.c_longlong),
        ("calls", ctypes.c_longlong),
        ("ns", ctypes.c_longlong),
        ("longest", ctypes.c_longlong),
    )


class NotSeenError(RuntimeError):
    """Calls cannot be seen here; the message says why."""


class DriverCalls:
    """Counts the calls made while it is entered. Raises NotSeenError."""

    _library: ctypes.CDLL | None = None  # one for the process: its functions may still be running

    def __init__(self) -> None:
        if DriverCalls._library is None:
            try:
                DriverCalls._library = compiled(SOURCE)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise NotSeenError(str(error)) from error
        self._ours = DriverCalls._library
        self._cupti = _cupti()
        self._subscriber = ctypes.c_void_p()

    def __enter__(self) -> DriverCalls:
        self._ours.start()
        callback = ctypes.cast(self._ours.on_call, ctypes.c_void_p)
        self._must(self._cupti.cuptiSubscribe(ctypes.byref(self._subscriber), callback, None))
        for domain in DOMAINS:
            self._must(self._cupti.cuptiEnableDomain(1, self._subscriber, domain))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cupti.cuptiUnsubscribe(self._subscriber)

    def found(self) -> list[dict[str, Any]]:
        """Each function on each thread: calls, milliseconds of all and of the longest."""
        rows = (Row * MOST)()
        self._ours.rows.restype = ctypes.c_long
        count = self._ours.rows(ctypes.byref(rows), ctypes.c_long(MOST))
        return [
            {
                "function": plain_name(row.function.decode()),
                "thread": thread_name(row.thread),
                "calls": row.calls,
                "ms": row.ns / 1e6,
                "longest_ms": row.longest / 1e6,
            }
            for row in rows[:count]
        ]

    def _must(self, code: int) -> None:
        if code:
            raise NotSeenError(f"CUPTI refused, with error {code}")


def plain_name(function: str) -> str:
    """Without the version and the way streams are meant: "cuMemcpyHtoDAsync"."""
    return re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", function)


def thread_name(thread: int) -> str:
    """ "main", "backward" for autograd's threads, else what the system calls it."""
    try:
        name = pathlib.Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "ended"
    if thread == os.getpid():
        return "main"
    return "backward" if name.startswith("pt_autograd") else name


def summed(rows: list[dict[str, Any]], training: bool) -> dict[str, dict[str, float]]:
    """By function, dearest first: of the threads that train (main and backward's), or of others."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["thread"] in ("main", "backward")) == training:
            one = found.setdefault(row["function"], {"calls": 0, "ms": 0.0, "longest_ms": 0.0})
            one["calls"] += row["calls"]
            one["ms"] = round(one["ms"] + row["ms"], 4)
            one["longest_ms"] = round(max(one["longest_ms"], row["longest_ms"]), 4)
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def mapping(calls: dict[str, dict[str, float]]) -> dict[str, float]:
    """How many map, access and unmap calls there were, and their milliseconds."""
    chosen = [calls[name] for name in MAPPING if name in calls]
    return {key: sum(one[key] for one in chosen) for key in ("calls", "ms")}


def _cupti() -> ctypes.CDLL:
    """The CUPTI that torch has loaded, or another."""
    maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
    loaded = re.findall(r"\S*/libcupti\.so\S*", maps)
    for name in (*loaded[:1], *NAMES):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise NotSeenError("there is no CUPTI")
