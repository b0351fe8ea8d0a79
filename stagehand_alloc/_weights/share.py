"""One pinned copy of frozen weights for all processes of a user on a host.

The bytes are in a memory file without a name (memfd), which each process maps: it takes no room in
/dev/shm, and is gone with the last process that has it, killed or not. A small file in the
directory for temporary files says who has it, and its lock, which the system takes from a process
that dies, is held by whoever writes. Nothing in it is trusted: what is opened has to be the memory
file that is named, and its bytes those of this process's own weights, all of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagehand_alloc._errors import OffloadError
from stagehand_alloc._settings.sizes import format_bytes, shown

TIMEOUT_S = 600.0  # for whoever writes; 100 GB take a tenth of it
_POLL_S = 0.02
_VERSION = 1


class _Files:
    """One process has one lock on a file, whatever threads it has, and loses it with the first
    close of any of its descriptors: so one thread at a time is at the files.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()


_files = _Files()


class Share:
    """The memory file, open in this process."""

    def __init__(self, name: str, path: Path, fd: int, size: int, *, writes: bool) -> None:
        self.name = name
        self.size = size
        self.fd = fd
        self.writes = writes  # it is this process that made it, and it is not whole yet
        self.offsets: dict[str, int] = {}  # by block
        self.close = weakref.finalize(self, _close, path, fd, os.getpid())

    def where(self, block: str) -> tuple[int, int, bool]:
        """As native's WeightGroup takes it."""
        return self.fd, self.offsets[block], self.writes


def place_of(name: str) -> Path:
    """The file that says who has the copy of that name."""
    digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    return Path(tempfile.gettempdir()) / f"stagehand_alloc-{os.getuid()}-{digest}"


@contextlib.contextmanager
def joined(name: str, layout: list[tuple[str, int, Any]]) -> Iterator[Share]:
    """The copy of that name, for a ``with`` in which it is written, or compared.

    ``layout``: of each block its name, its bytes, and what there is to say of its weights. Whoever
    comes first writes; the others wait for that. Where it fails, the copy is nobody's, and the
    next one writes.

    Raises OffloadError where somebody has written for too long, or other weights have that name.
    """
    offsets, size = {}, 0
    for block, length, _ in layout:
        offsets[block] = size
        size += -(-length // _PAGE) * _PAGE
    digest = hashlib.blake2b(json.dumps(layout).encode()).hexdigest()
    path = place_of(name)
    with _locked(name, path) as file:
        said = _read(file)
        share = _found(name, path, said, digest, len(layout), size)
        if share is None:
            share = _made(name, path, size)
            share.offsets = offsets
            about = {"digest": digest, "blocks": len(layout), "size": size}
            _write(file, {**about, "writer": os.getpid()})
            try:
                yield share
            except BaseException:
                _write(file, {})
                raise
            found = os.fstat(share.fd)
            share.writes = False
            inode = [found.st_dev, found.st_ino]
            _write(file, {**about, "inode": inode, "holders": [[os.getpid(), share.fd]]})
            return
        share.offsets = offsets
        _write(file, {**said, "holders": [*said["holders"], [os.getpid(), share.fd]]})
    yield share  # without the lock: several may compare at a time


_PAGE = 2 << 20  # a block begins on a huge page's border


def _made(name: str, path: Path, size: int) -> Share:
    try:
        fd = os.memfd_create("stagehand_alloc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise OffloadError(
            f"The system has no memory file for the shared copy {shown(name)}: {error}.",
            "Leave share out: then this process has a copy of its own.",
        ) from error
    share = Share(name, path, fd, size, writes=True)
    os.ftruncate(fd, size)
    # Nobody can take bytes away that another process has mapped.
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
    return share


_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


def _found(
    name: str, path: Path, said: dict[str, Any], digest: str, blocks: int, size: int
) -> Share | None:
    """What a process that lives has of it; None without any, or without a whole one."""
    for holder in said.get("holders", []):
        try:
            fd = _opened(holder, said)
        except PermissionError as error:
            raise OffloadError(
                f"Process {holder[0]} has the shared copy {shown(name)}, and the system lets no "
                f"other one open it: {error}.",
                "Leave share out: then this process has a copy of its own.",
            ) from error
        if fd is None:
            continue
        if said["digest"] != digest or os.fstat(fd).st_size != size:
            os.close(fd)
            raise OffloadError(
                f"The shared copy {shown(name)} is of other weights: {said['blocks']} blocks with "
                f"{format_bytes(said['size'])}, and here are {blocks} with {format_bytes(size)}, "
                "or with other names, shapes or dtypes.",
                'Give these a name of their own: offload(model, share="another name").',
            )
        return Share(name, path, fd, size, writes=False)
    return None


def _opened(holder: list[int], said: dict[str, Any]) -> int | None:
    """The holder's memory file, opened again; None where it has it no more. PermissionError."""
    pid, number = holder
    path = f"/proc/{pid}/fd/{number}"
    try:
        seen = os.stat(path)  # first: opening a device that has the number by now may do something
        if [seen.st_dev, seen.st_ino] != said.get("inode"):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        if _is_ours(pid):
            raise
        return None  # the number is another user's process by now
    except OSError:  # it is gone, or has closed it
        return None
    seen = os.fstat(fd)
    if [seen.st_dev, seen.st_ino] == said.get("inode"):
        return fd
    os.close(fd)  # the number is another process's by now, or another file's
    return None


def _is_ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def _has_it(holder: list[int], said: dict[str, Any]) -> bool:
    try:
        fd = _opened(holder, said)
    except PermissionError:
        return True  # as far as anybody knows
    if fd is not None:
        os.close(fd)
    return fd is not None


@contextlib.contextmanager
def _locked(name: str, path: Path) -> Iterator[int]:
    """The file, open and locked. Raises OffloadError after TIMEOUT_S."""
    end = time.monotonic() + TIMEOUT_S
    if not _files.turn.acquire(timeout=TIMEOUT_S):
        raise _too_long(name, {"writer": os.getpid()})
    try:
        file = _open(name, path)
        try:
            while not _try_lock(file, path):
                if time.monotonic() > end:
                    raise _too_long(name, _read(file))
                time.sleep(_POLL_S)
                if not _is_at(file, path):  # the last one that had it has removed it
                    os.close(file)
                    file = _open(name, path)
            yield file
        finally:
            os.close(file)  # and with it the lock
    finally:
        _files.turn.release()


def _too_long(name: str, said: dict[str, Any]) -> OffloadError:
    return OffloadError(
        f"Waited {TIMEOUT_S:.0f} s for the shared copy {shown(name)}: process "
        f"{said.get('writer', 'unknown')} is writing {format_bytes(said.get('size', 0))} of it.",
        "See whether that process goes on, and end it if not: then the next one writes.",
    )


def _open(name: str, path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OffloadError(
            f"The file of the shared copy {shown(name)} cannot be opened: {error}.",
            "Set TMPDIR to a directory that all processes can write to, or leave share out.",
        ) from error
    seen = os.fstat(file)
    if seen.st_uid != os.getuid() or not stat.S_ISREG(seen.st_mode):
        os.close(file)
        raise OffloadError(
            f"{path}, the file of the shared copy {shown(name)}, belongs to user {seen.st_uid}.",
            "Remove it, or set TMPDIR to a directory of your own, for all processes.",
        )
    if seen.st_nlink > 1:  # somebody has put a name of another file of ours there
        os.close(file)
        raise OffloadError(
            f"{path}, the file of the shared copy {shown(name)}, has another name, too.",
            "Remove it, or set TMPDIR to a directory of your own, for all processes.",
        )
    return file


def _is_at(file: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _try_lock(file: int, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return _is_at(file, path)


def _read(file: int) -> dict[str, Any]:
    """What it says; empty where whoever wrote it has died over it."""
    try:
        said = json.loads(os.pread(file, 1 << 20, 0) or b"{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) and said.get("version") == _VERSION else {}


def _write(file: int, said: dict[str, Any]) -> None:
    """Where its disk is full it says nothing, and the next one finds nobody."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"version": _VERSION, **said}).encode(), 0)


def _close(path: Path, fd: int, process: int) -> None:
    """This process has it no more, as others may that were killed. Where nobody has, the file goes.

    Where that cannot be said now, it stays: whoever reads it finds nobody.
    """
    os.close(fd)
    if os.getpid() != process or not _files.turn.acquire(blocking=False):
        return
    try:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _try_lock(file, path):
                    said = _read(file)
                    holders = [one for one in said.get("holders", []) if _has_it(one, said)]
                    if holders:
                        _write(file, {**said, "holders": holders})
                    else:
                        os.unlink(path)
            finally:
                os.close(file)
    finally:
        _files.turn.release()
