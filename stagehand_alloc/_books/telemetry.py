"""One JSON line per step: Activation Stagehand v0's fields, and ours beside them.

`_books.steps` says what a step is and what a line holds. The step's own thread puts it into a list;
a thread of ours writes the list half a second later, and whatever is left is written at exit. Lines
are appended whole, and under a lock of the file's, so that several processes may write to one file.

Steps whose number is a power of two, and the last one, say what is known of their kind
(`_books.shape`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from stagehand_alloc._books import shape as _shape
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._books import steps as _steps
from stagehand_alloc._books.proposal import Proposal
from stagehand_alloc._books.steps import StepStats
from stagehand_alloc._errors import TelemetryError, in_one_line
from stagehand_alloc._guarded import Guarded
from stagehand_alloc._tell import warn

_PAUSE = 0.5  # seconds that a line waits for others at most
_MOST_WAITING = 1024  # lines; then the step's own thread writes


class Writer:
    """Appends the lines of steps to one file. A failed write warns once and ends it.

    The file is open while lines are written only: there is no number to keep that could become
    another file's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: Counter[int] = Counter()  # device -> lines so far
        self._waiting: deque[tuple[int, StepStats]] = deque()
        # Held while lines are written, so that they stay in order.
        self._lock = threading.RLock()
        self._writing = False  # so that a signal handler leaves its lines to whom it interrupted
        self._failure: str | None = None
        self._told = False
        self._closed = False
        try:
            _append(path, b"")
        except OSError as error:
            raise TelemetryError(
                f"The telemetry file {path} cannot be written: {error.strerror}.",
                "Give a path in a folder that exists and can be written.",
            ) from error

    def listen(self, step: StepStats) -> None:
        """Take a step; it is written soon. Steps are numbered by the file, from 1 on."""
        self._warn_of_failure()
        self._numbers[step.device] += 1
        self._waiting.append((self._numbers[step.device], step))
        if self._closed or len(self._waiting) >= _MOST_WAITING or not _wake_writer():
            self.write()

    def write(self, last: bool = False) -> None:
        """Write what waits; ``last``: nothing comes after it. Raises nothing."""
        with self._lock:
            if self._writing:
                return  # in a signal handler: who was interrupted has the file, and writes on
            self._writing = True
            try:
                while lines := self._lines(last):
                    _append(self._path, lines)
            except OSError as error:
                self._failure = error.strerror or in_one_line(error)
            except Exception as error:  # the thread writes for other files too
                self._failure = in_one_line(error)
                self._waiting.clear()
            finally:
                self._writing = False

    def close(self) -> None:
        """Write what waits. A step that another thread ends later is written at once."""
        self._closed = True
        self.write(last=True)
        self._warn_of_failure()

    def _lines(self, last: bool) -> bytes:
        lines = b""
        proposals: dict[int, Proposal] = {}
        while self._waiting:
            number, step = self._waiting.popleft()
            if self._failure is not None:
                continue
            if step.device not in proposals:
                proposals[step.device] = _stats.proposal_of(step.device)
            ends = last and number == self._numbers[step.device]
            shape = ends or number & (number - 1) == 0
            lines += _line(number, step, proposals[step.device], shape)
        return lines

    def _warn_of_failure(self) -> None:
        if self._failure is not None and not self._told:
            self._told = True
            warn(
                f"Telemetry stopped: {self._path} cannot be written ({self._failure}). "
                "Training goes on."
            )


def _append(path: Path, lines: bytes) -> None:
    """Append to the file, which is made where it is not there. Raises OSError.

    A system may write a part of it and stop in a line: the lock keeps other processes' lines out.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        while lines:
            lines = lines[os.write(file, lines) :]
    finally:
        with contextlib.suppress(OSError):  # else it stays with a child forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _line(number: int, step: StepStats, proposal: Proposal, shape: bool) -> bytes:
    fields: dict[str, Any] = {
        **step.fields(),
        "step": number,
        "proposed_classes_mb": proposal.classes_mb,
        "proposed_slabs_per_class": proposal.slabs_per_class,
    }
    # Of the newest kind of step: in most runs there is one, or another one each time.
    if shape and (found := _shape.read(step.device)) is not None:
        fields["shape"] = _shape.to_json(found)
    return json.dumps(fields).encode() + b"\n"


class _Writers(Guarded):
    """The writers of the process, and the thread that writes for them."""

    def renew(self) -> None:
        """In a forked child files, lines and the thread are the parent's."""
        super().renew()
        self.by_path: dict[str, Writer] = {}  # guarded by the lock
        self.due = threading.Event()  # lines wait
        self.thread: threading.Thread | None = None  # guarded by the lock


_writers = _Writers()


def writer_of(path: str | Path) -> Writer:
    """What appends to ``path``. Raises TelemetryError where that cannot be opened."""
    key = os.path.abspath(path)  # a third of the time that Path takes
    with _writers.lock:
        writer = _writers.by_path.get(key)
        if writer is None:
            from multiprocessing import util

            writer = _writers.by_path[key] = Writer(Path(key))
            util.Finalize(None, close, exitpriority=0)  # its children skip atexit
        return writer


def flush() -> None:
    """Write the lines of all steps that have ended."""
    for writer in list(_writers.by_path.values()):
        writer.write()


def close() -> None:
    """End the steps that are open, and write the lines of every file."""
    try:
        _steps.all_steps.end()
    finally:
        with _writers.lock:
            writers = list(_writers.by_path.values())
            _writers.by_path.clear()
        for writer in writers:
            writer.close()


def _wake_writer() -> bool:
    """False where there can be no thread: while the interpreter shuts down."""
    if not _writers.due.is_set():
        _writers.due.set()
    if _writers.thread is not None:
        return True
    with _writers.lock:
        if _writers.thread is None:
            thread = threading.Thread(target=_write_on, name="stagehand-telemetry", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            _writers.thread = thread
    return True


def _write_on() -> None:
    while True:
        _writers.due.wait()
        time.sleep(_PAUSE)
        _writers.due.clear()
        flush()


atexit.register(close)
