"""The user's cache folder: where built libraries are kept, and what of it may be trusted.

A library is code that this process will run. So the folder and what is in it must belong to this
user and be writable by nobody else, and symbolic links are not followed.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of the file system


class RefusedError(Exception):
    """A place that cannot be used; its text says which and why, in one clause."""


def user_folder() -> Path:
    """Where the folder belongs; it need not be there. Raises RefusedError where nobody knows."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "stagehand_alloc"
    except RuntimeError as error:
        raise RefusedError(f"this user has no home folder ({error})") from error


def open_user_folder() -> Path:
    """The user's folder, made where it is missing. Raises RefusedError."""
    folder = user_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be made ({error.strerror})") from error
    check_trusted(folder)
    return folder


class Private:
    """A folder nobody else can have put anything in; this process's own, and gone at its end."""

    def __init__(self) -> None:
        self.made: tuple[int, Path] | None = None  # by which process
        self._making = threading.Lock()  # libraries are built on several threads

    def folder(self) -> Path:
        """It is made where it is not there."""
        with self._making:
            # A forked child makes its own: its parent removes this one.
            if self.made is None or self.made[0] != os.getpid() or not self.made[1].exists():
                self.made = os.getpid(), Path(tempfile.mkdtemp(prefix="stagehand_alloc-"))
                atexit.register(_remove, *self.made)
            return self.made[1]


private = Private()


def check_trusted(path: Path) -> None:
    """Raises RefusedError where others could have made or changed what stands at ``path``."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RefusedError(f"{path} cannot be looked at ({error.strerror})") from error
    if stat.S_ISLNK(found.st_mode):
        raise RefusedError(f"{path} is a symbolic link")
    if found.st_uid != os.getuid():
        raise RefusedError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise RefusedError(f"others may write to {path} (mode {mode:04o}; `chmod go-w` it)")


def look() -> tuple[Path, bool]:
    """The user's folder and whether it is there, nothing made. Raises RefusedError."""
    folder = user_folder()
    check_trusted(folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise RefusedError(f"{there} is not a folder that can be written to")
    return folder, there == folder


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file at ``path``; other processes and threads wait.

    Raises RefusedError where the file cannot be made, TimeoutError after ``timeout_s`` seconds. The
    system lets go of the lock of a process that died. Where the file system has no locks, nobody
    waits: two may then build the same, and the last rename stays.
    """
    check_trusted(path)
    if not os.access(path.parent, os.W_OK):
        raise RefusedError(f"{path.parent} cannot be written to")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RefusedError(f"{path} cannot be written ({error.strerror})") from error
    try:
        _wait(file, path, timeout_s)
        yield
    finally:
        os.close(file)


def _wait(file: int, path: Path, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not _try_lock(file, path):
        if time.monotonic() > until:
            raise TimeoutError(f"another process holds {path}")
        time.sleep(_POLL_S)


def _try_lock(file: int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise RefusedError(f"{path} cannot be locked ({error.strerror})") from error
    return True


def _remove(process: int, folder: Path) -> None:
    # A forked child leaves it to its parent. A log of what failed stays, for it was named.
    if os.getpid() == process and not list(folder.glob("*.log")):
        shutil.rmtree(folder, ignore_errors=True)
