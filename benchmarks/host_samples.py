"""Where the host's time goes: by library and by function, of all threads of this process.

A signal each half millisecond of CPU time, or as often as the kernel's clock ticks, notes the
frames that it meets (host_samples.cpp, built on first use). So it shows what no list of CUDA's
calls does: a step of a video transformer spent 30 % of the host's time in a regular expression of
torch's. A function without a name in its library's table counts for the library alone.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import pathlib
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from stagehand_alloc._built.compiler import find_compiler
from stagehand_alloc._errors import CompilerError

SOURCE = pathlib.Path(__file__).with_suffix(".cpp")
EVERY_US = 500
MOST = 40  # functions
NAME = 90  # characters of one
Frame = tuple[str, str]  # library, function


class NoSamplesError(Exception):
    """There is no compiler, or it failed."""


@contextlib.contextmanager
def sampled() -> Iterator[dict[str, Any]]:
    """What the host does while entered; known afterwards. Raises NoSamplesError."""
    library, found = _library(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "samples.txt"
        library.start_samples(ctypes.c_long(EVERY_US))
        try:
            yield found
        finally:
            count = library.stop_samples(str(path).encode())
        text = path.read_text(errors="replace") if count > 0 else ""
    found.update(described(read(text.splitlines())))


def read(lines: Iterable[str]) -> Iterator[list[Frame]]:
    """Samples, the innermost frame first."""
    frames: list[Frame] = []
    for line in lines:
        if line:
            library, _, function = line.partition("\t")
            frames.append((library, function[:NAME]))
        else:
            yield frames
            frames = []


def described(samples: Iterable[list[Frame]]) -> dict[str, Any]:
    """Shares of samples: libraries whose own code ran, functions that ran or that called it."""
    libraries: collections.Counter[str] = collections.Counter()
    functions: collections.Counter[str] = collections.Counter()
    count = 0
    for frames in samples:
        count += 1
        libraries.update({frames[0][0]} if frames else {"?"})
        functions.update({f"{library}: {name}" for library, name in frames if name})
    if count == 0:
        return {"seen": False, "why": "there were no samples"}
    return {
        "seen": True,
        "samples": count,
        "libraries": _shares(libraries, count),
        "functions": _shares(functions, count),
    }


def _shares(counted: collections.Counter[str], count: int) -> dict[str, float]:
    return {name: round(n / count, 4) for name, n in counted.most_common(MOST)}


@functools.cache
def _library() -> Any:
    try:
        compiler = find_compiler()
    except CompilerError as error:
        raise NoSamplesError(str(error)) from error
    if compiler is None:
        raise NoSamplesError("there is no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / "host_samples.so"
        flags = ("-std=c++20", "-O1", "-shared", "-fPIC")
        command = [compiler, *flags, str(SOURCE), "-o", str(made), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoSamplesError(f"{compiler} failed: {done.stderr[-500:]}")
        try:
            return ctypes.CDLL(str(made))
        except OSError as error:
            raise NoSamplesError(str(error)) from error
