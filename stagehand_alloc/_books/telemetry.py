"""One JSON line per step: Activation Stagehand v0's fields, and ours beside them.

`_books.steps` says what a step is and what a line holds. The step's own thread puts it into a list;
a thread of ours writes the list half a second later, and whatever is left is written at exit. Lines
are appended whole, by one call, so that several processes may write to one file.

Steps whose number is a power of two, and the last one, say what is known of their kind
(`_books.shape`).
"""

from __future__ import annotations

import atexit
import contextlib
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
from stagehand_alloc._errors import TelemetryError
from stagehand_alloc._tell import warn

_PAUSE = 0.5  # seconds that a line waits for others at most
_MOST_WAITING = 1024  # lines; then the step's own thread writes


class Writer:
    """Appends the lines of steps to one file. A failed write warns once and ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: Counter[int] = Counter()  # device -> lines so far
        self._waiting: deque[tuple[int, StepStats]] = deque()
        self._lock = threading.Lock()  # held while lines are written, so that they stay in order
        self._failure: str | None = None
        self._told = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
        if len(self._waiting) >= _MOST_WAITING or not _wake_writer():
            self.write()

    def write(self, last: bool = False) -> None:
        """Write what waits; ``last``: nothing comes after it."""
        with self._lock:
            lines = b""
            proposals: dict[int, Proposal] = {}
            while self._waiting:
                number, step = self._waiting.popleft()
                if step.device not in proposals:
                    proposals[step.device] = _stats.proposal_of(step.device)
                ends = last and number == self._numbers[step.device]
                shape = ends or number & (number - 1) == 0
                lines += _line(number, step, proposals[step.device], shape)
            try:
                while lines and self._failure is None:
                    lines = lines[os.write(self._file, lines) :]
            except OSError as error:
                self._failure = error.strerror

    def close(self) -> None:
        """Write what waits and close the file."""
        self.write(last=True)
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._warn_of_failure()

    def _warn_of_failure(self) -> None:
        if self._failure is not None and not self._told:
            self._told = True
            warn(
                f"Telemetry stopped: {self._path} cannot be written ({self._failure}). "
                "Training goes on."
            )


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


_lock = threading.Lock()  # the table of writers, and the thread
_writers: dict[str, Writer] = {}
_due = threading.Event()  # lines wait
_thread: threading.Thread | None = None


def writer_of(path: str | Path) -> Writer:
    """What appends to ``path``. Raises TelemetryError where that cannot be opened."""
    key = os.path.abspath(path)  # a third of the time that Path takes
    with _lock:
        writer = _writers.get(key)
        if writer is None:
            from multiprocessing import util

            writer = _writers[key] = Writer(Path(key))
            util.Finalize(None, close, exitpriority=0)  # its children skip atexit
        return writer


def flush() -> None:
    """Write the lines of all steps that have ended."""
    for writer in list(_writers.values()):
        writer.write()


def close() -> None:
    """End the steps that are open, write their lines, and close every file."""
    try:
        _steps.end_all()
    finally:
        with _lock:
            writers = list(_writers.values())
            _writers.clear()
        for writer in writers:
            writer.close()


def _wake_writer() -> bool:
    """False where there can be no thread: while the interpreter shuts down."""
    global _thread
    if not _due.is_set():
        _due.set()
    if _thread is not None:
        return True
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_write_on, name="stagehand-telemetry", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            _thread = thread
    return True


def _write_on() -> None:
    while True:
        _due.wait()
        time.sleep(_PAUSE)
        _due.clear()
        flush()


def _begin_child() -> None:
    """After a fork: files, lines and locks are the parent's."""
    global _lock, _due, _thread
    _lock, _due, _thread = threading.Lock(), threading.Event(), None
    _writers.clear()
    _steps.forget()


os.register_at_fork(after_in_child=_begin_child)
atexit.register(close)
