"""Builds the small libraries that need the headers of the torch that is installed.

They are built on first use and kept in the user's cache folder, under a name that changes with
everything they depend on: torch, the compiler, the flags and the text of every file of ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from stagehand_alloc._built import cache as _cache
from stagehand_alloc._built.compiler import Library, Recipe, recipe
from stagehand_alloc._errors import CompilerError
from stagehand_alloc._guarded import Guarded
from stagehand_alloc._settings.host_memory import available_host_bytes
from stagehand_alloc._tell import slow_once

FORBID = "STAGEHAND_ALLOC_BUILD"  # the environment variable; 0 forbids
TIMEOUT_S = 300.0

_BYTES_EACH = 2 << 30  # of host memory that a compiler takes for torch's headers, at most
_LOCK_MARGIN_S = 30.0  # who waits for another's build waits longer than that may take
_SEAL = b"\nstagehand_alloc sha256 "  # after it the sum of all before: a cut file cannot have one
_FAILED = "failed: "  # begins the last line of the log of a build that failed


class _Failures:
    """Builds that failed in this process, which are not tried again."""

    def __init__(self) -> None:
        self._by_stem: dict[str, tuple[str, str]] = {}  # two libraries may be of one source

    def add(self, plan: Recipe, what: str, todo: str) -> CompilerError:
        """``plan`` failed; the error to raise."""
        self._by_stem[plan.stem] = (what, todo)
        return CompilerError(what, todo)

    def check(self, plan: Recipe) -> None:
        """Raises CompilerError where ``plan`` failed."""
        if plan.stem in self._by_stem:
            raise CompilerError(*self._by_stem[plan.stem])


class _EndedError(RuntimeError):
    """The compiler was ended by `_Compilers.end`: that says nothing of the library."""


class _Compilers(Guarded):
    """Those that run in this process, on whichever thread."""

    def __init__(self) -> None:
        super().__init__()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended: set[int] = set()

    def start(self, command: list[str], log: IO[str]) -> subprocess.Popen[bytes]:
        """In a session of its own: its own children can be ended with it. Raises OSError."""
        with self.lock:  # whoever ends them finds each that has been started
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code. Raises TimeoutExpired, and _EndedError where it was ended from here."""
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            self._running.discard(process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.pid in self._ended:
            raise _EndedError
        return code

    def end(self) -> None:
        """All of them, with what they have started."""
        with self.lock:
            running = list(self._running)
        for process in running:
            self._ended.add(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class _Beside:
    """Libraries that were asked for in this process, to be built beside each other."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def new(self, libraries: tuple[Library, ...]) -> list[Library]:
        """Those that were not yet."""
        found = [library for library in libraries if library.name not in self._names]
        self._names.update(library.name for library in found)
        return found


_failures = _Failures()
_beside = _Beside()
_compilers = _Compilers()


def load(library: Library) -> tuple[Path, Any]:
    """The library, loaded with ctypes, and where it is; built where it has to be.

    Raises CompilerError.
    """
    import ctypes

    path = build(library)
    try:
        return path, ctypes.CDLL(str(path))
    except OSError:
        path = build(library, again=True)
    try:
        return path, ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(
            f"The {library.words} cannot be loaded, built again or not: {error}.",
            "Build with the compiler and the libraries that torch runs with.",
        ) from error


def build(library: Library, *, again: bool = False) -> Path:
    """The library's file, built unless it is kept from before or ``again`` is set.

    Two processes that ask at once build once. Where the cache folder cannot be used, or holds what
    others may have put there, the library goes to a temporary folder. Raises CompilerError, for one
    that failed in this process without another try.
    """
    plan = recipe(library)
    _failures.check(plan)
    try:
        try:
            return _build_in(_cache.open_user_folder(), plan, again)
        except (_cache.RefusedError, OSError) as why:
            folder = _cache.private.folder()
            slow_once(  # of each library that is built there, but it is the same folder
                f"{why}: what is built on first use is kept in {folder}, for this process only"
            )
            return _build_in(folder, plan, again)
    except (_cache.RefusedError, OSError) as error:
        raise CompilerError(
            f"No folder can hold the {library.words}: {error}.",
            "Name a folder of yours that can be written to in XDG_CACHE_HOME or TMPDIR.",
        ) from error


def beside(*libraries: Library) -> None:
    """Build those that are not kept yet beside each other, as far as cores and memory go.

    For who is about to load them all: one after the other they take a minute or more. Each is asked
    for once in a process. What cannot be built is no error here: `load` says why.
    """
    new = _beside.new(libraries)
    missing = [library for library in new if not forbidden() and _is_missing(library)]
    at_once = min(len(missing), _cores())
    if at_once >= 2:  # else the machine is not asked: that reads a dozen files, for each new pool
        at_once = min(at_once, available_host_bytes() // _BYTES_EACH)
    if at_once < 2:
        return
    threads = ThreadPoolExecutor(at_once, "stagehand_alloc builds")
    try:
        for building in [threads.submit(build, library) for library in missing]:
            with contextlib.suppress(CompilerError, OSError, _EndedError):
                building.result()
        threads.shutdown()
    except RuntimeError:  # no thread is to be had: who loads one builds it
        threads.shutdown(cancel_futures=True)
    except BaseException:  # whoever interrupts it does not wait for compilers
        threads.shutdown(wait=False, cancel_futures=True)
        _compilers.end()
        raise


def _cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_missing(library: Library) -> bool:
    """Whether it is still to be built, and can be."""
    try:
        return kept(library) is None
    except CompilerError:
        return False


def kept(library: Library) -> Path | None:
    """The library's file where the cache folder has it; nothing is made. Raises CompilerError."""
    try:
        path = _cache.user_folder() / f"{recipe(library).stem}.so"
        _cache.check_trusted(path.parent)
        return path if _is_whole(path) else None
    except (_cache.RefusedError, OSError):
        return None


def outlook(library: Library, without: str = "") -> str:
    """What `load` would find, in words; nothing is built or loaded. Raises CompilerError.

    ``without``: what follows where it is forbidden.
    """
    if forbidden():
        return f"forbidden, {FORBID}=0 is set{without}"
    if (path := kept(library)) is not None:
        return f"built, {path}"
    return f"not built yet; built on first use, about {library.seconds} s"


def forbidden() -> bool:
    """Whether the environment forbids to build."""
    return os.environ.get(FORBID, "").strip().lower() in {"0", "false", "no", "off"}


def _build_in(folder: Path, plan: Recipe, again: bool) -> Path:
    """The file in ``folder``. Raises RefusedError or OSError where that cannot be used."""
    path = folder / f"{plan.stem}.so"
    if not again and _is_whole(path):
        return path
    words = plan.library.words
    if forbidden():
        raise CompilerError(
            f"The {words} is not built, and {FORBID}={os.environ[FORBID]} forbids to build it.",
            f"Unset {FORBID}, once at least: the library is kept.",
        )
    log = folder / f"{plan.stem}.log"
    before = _failure(log)
    try:
        with _cache.locked(folder / f"{plan.library.name}.lock", TIMEOUT_S + _LOCK_MARGIN_S):
            if not again and _is_whole(path):
                return path  # another process built it meanwhile
            failure = _failure(log)
            if failure is None or failure == before:  # else another process tried meanwhile
                failure = _compile(plan, path, log)
    except TimeoutError as error:
        raise _failures.add(
            plan,
            f"The {words} was waited for, {TIMEOUT_S + _LOCK_MARGIN_S:.0f} s: {error}.",
            "Let the process that builds it finish, or end it.",
        ) from error
    if failure is not None:
        raise _failures.add(
            plan,
            f"The {words} could not be built (log: {log}): {failure[1]}",
            "A C++20 compiler and torch's headers are needed; CXX names another compiler.",
        )
    return path


def _compile(plan: Recipe, path: Path, log: Path) -> tuple[int, str] | None:
    """Build beside ``path`` and rename: others see all of it or nothing. None, or the failure."""
    slow_once(
        f"building the {plan.library.words} for torch {plan.torch_version}, about "
        f"{plan.library.seconds} s, kept in {path.parent}"
    )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        output = Path(folder) / path.name
        why = _run([*plan.command, "-o", str(output)], log)
        if why:
            with log.open("a") as file:
                file.write(f"\n{_FAILED}{why}\n")
            return _failure(log) or (0, why)
        content = output.read_bytes()
        output.write_bytes(content + _seal(content))
        output.chmod(0o700)  # a lax umask would make it a file that is not trusted
        output.replace(path)
    log.unlink(missing_ok=True)
    return None


def _run(command: list[str], log: Path) -> str:
    """Run the compiler, all it says in ``log``; why it failed, empty where it did not."""
    with log.open("w") as file:
        file.write(f"{shlex.join(command)}\n")
        file.flush()
        try:
            process = _compilers.start(command, file)
        except OSError as error:
            return f"{command[0]} did not run, {error.strerror}"
        try:
            code = _compilers.wait(process)
        except subprocess.TimeoutExpired:
            return f"{command[0]} was not done after {TIMEOUT_S:.0f} s"
    if code == 0:
        return ""
    said = log.read_text(errors="replace").splitlines()[1:]
    first = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
    return f"{command[0]} ended with {code}, {first.strip() or 'without a word'}"


def _failure(log: Path) -> tuple[int, str] | None:
    """When, in nanoseconds, and why the build of this log failed; None where it did not."""
    try:
        last = log.read_text(errors="replace").splitlines()[-1:]
        if last and last[0].startswith(_FAILED):
            return log.stat().st_mtime_ns, last[0][len(_FAILED) :]
    except OSError:
        pass
    return None


def _is_whole(path: Path) -> bool:
    """Whether the library is there in full. Raises RefusedError where it is not to be trusted.

    To load a file that was cut short would end the process.
    """
    _cache.check_trusted(path)
    if not path.is_file():
        return False
    content = path.read_bytes()
    body = content[: content.rfind(_SEAL)]
    return content == body + _seal(body)


def _seal(content: bytes) -> bytes:
    return _SEAL + hashlib.sha256(content).hexdigest().encode()
