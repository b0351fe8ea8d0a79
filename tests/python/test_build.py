"""Building and keeping libraries against the installed torch, and what is never loaded."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import stagehand_alloc
from stagehand_alloc import Config
from stagehand_alloc._built import build as _build
from stagehand_alloc._built import cache as _cache
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import trigger as _trigger
from stagehand_alloc._built.compiler import Library
from stagehand_alloc._cli import doctor as _doctor
from stagehand_alloc._tell import warn_once

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "answer.hpp"
#pragma GCC visibility push(default)
extern "C" int answer() { return kAnswer; }
extern "C" const void* stagehand_torch_side() { return &kAnswer; }
"""


class Place:
    """A tiny library, a compiler that counts its runs, and a cache folder, all of one test's."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cache = home / "cache" / "stagehand_alloc"
        self.runs = home / "runs"
        self.source = home / "tiny.cpp"
        self.header = home / "answer.hpp"
        self.source.write_text(SOURCE)
        self.header.write_text("static const int kAnswer = 42;\n")
        self.library = Library("tiny", "tiny library", self.source, ("c10",), 1)
        self.compiler = home / "compiler"
        self.compile_with('exec c++ "$@"')

    def compile_with(self, script: str, version: str = "1") -> None:
        asked = f'[ "$1" = --version ] && echo {version} && exit 0'
        self.compiler.write_text(f'#!/bin/sh\n{asked}\necho run >> "{self.runs}"\n{script}\n')
        self.compiler.chmod(0o755)

    def compilations(self) -> int:
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CXX", str(found.compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(_build.FORBID, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(_cache.private, "made", None)
    monkeypatch.setattr(_trigger._loaded, "found", None)
    monkeypatch.setattr(warn_once, "said", set())
    return found


def fill(place: Place) -> Path:
    """A library built before, and not loaded, so that a test may change its file."""
    path = _build.build(place.library)
    assert path.parent == place.cache
    return path


def answer(loaded: tuple[Path, Any]) -> int:
    return int(loaded[1].answer())


def two_libraries(
    place: Place, monkeypatch: pytest.MonkeyPatch, then: str = 'exec c++ "$@"'
) -> tuple[Library, Library]:
    """Each of whose compilers waits until the other one runs, half a minute at most."""
    allow_two(monkeypatch)
    running = place.home / "running"
    place.compile_with(
        f'echo $$ >> "{running}"\n'
        f'for i in $(seq 3000); do [ "$(wc -l < "{running}")" -ge 2 ] && break; sleep 0.01; done\n'
        f'[ "$(wc -l < "{running}")" -ge 2 ] || exit 4\n{then}'
    )
    return place.library, dataclasses.replace(place.library, name="other")


def allow_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with two cores and some memory, in a new process."""
    monkeypatch.setattr(_build, "_beside", _build._Beside())
    monkeypatch.setattr(_build, "_cores", lambda: 2)
    monkeypatch.setattr(_build, "available_host_bytes", lambda: 8 << 30)


# ---- built once, and kept ------------------------------------------------------------------------


def test_what_a_pool_needs_is_built_beside_each_other_and_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = two_libraries(place, monkeypatch)
    _build.beside(*both)
    assert all(_build.kept(library) for library in both)
    assert place.compilations() == 2
    _build.beside(*both)
    for library in both:
        _build.load(library)
    assert place.compilations() == 2


def test_what_cannot_be_built_beside_others_is_told_by_who_loads_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_two(monkeypatch)
    place.compile_with('case "$*" in *fine*) exec c++ "$@" ;; *) exit 3 ;; esac')
    _build.beside(place.library, dataclasses.replace(place.library, name="fine"))
    assert place.compilations() == 2
    with pytest.raises(stagehand_alloc.CompilerError, match="ended with 3"):
        _build.load(place.library)
    assert place.compilations() == 2  # nobody tries again


def test_a_library_that_failed_says_nothing_of_another_of_the_same_source(place: Place) -> None:
    place.compile_with('case "$*" in *fine*) exec c++ "$@" ;; *) exit 3 ;; esac')
    with pytest.raises(stagehand_alloc.CompilerError, match="ended with 3"):
        _build.build(place.library)
    fine = dataclasses.replace(place.library, name="fine")
    assert answer(_build.load(fine)) == 42


def test_an_interrupt_ends_the_compilers_and_the_next_try_builds(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = two_libraries(place, monkeypatch, then="exec sleep 600")
    running = place.home / "running"

    class Interrupted(ThreadPoolExecutor):
        """Whoever waits for a library is interrupted once both compilers run."""

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            def result() -> None:
                while len(running.read_text().split() if running.exists() else ()) < 2:
                    time.sleep(0.01)
                raise KeyboardInterrupt

            future: Any = super().submit(fn, *args, **kwargs)
            future.result = result
            return future

    monkeypatch.setattr(_build, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        _build.beside(*both)
    for pid in map(int, running.read_text().split()):
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists():  # until the thread that waits for it has seen it end
            assert time.monotonic() < deadline
            time.sleep(0.01)
    place.compile_with('exec c++ "$@"')
    for library in both:
        _build.load(library)


def test_where_building_is_forbidden_nothing_is_built_beside(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = two_libraries(place, monkeypatch)
    monkeypatch.setenv(_build.FORBID, "0")
    _build.beside(*both)
    assert place.compilations() == 0


def test_a_library_is_built_once_and_kept(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    first, second = _build.load(place.library), _build.load(place.library)
    assert first[0] == second[0] == _build.kept(place.library)
    assert answer(first) == 42
    assert place.compilations() == 1
    lines = caplog.messages
    assert len(lines) == 1
    assert f"building the tiny library for torch {_torch_version()}, about 1 s" in lines[0]
    assert str(place.cache) in lines[0]
    assert not list(place.cache.glob("*.log")) + list(place.cache.glob("building-*"))


def two_processes(place: Place) -> list[tuple[int, str]]:
    """Exit codes and errors of two processes that ask for the library at once."""
    code = f"""
import sys, time
from pathlib import Path
import torch
from stagehand_alloc._built import build as _build
from stagehand_alloc._built.compiler import Library
Path({str(place.home)!r}, "ready" + sys.argv[1]).touch()
while not Path({str(place.home)!r}, "go").exists():
    time.sleep(0.01)
_, library = _build.load(Library("tiny", "tiny library", Path({str(place.source)!r}), (), 1))
assert library.answer() == 42
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(index)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    while not all((place.home / f"ready{index}").exists() for index in range(2)):
        assert all(process.poll() is None for process in both)
        time.sleep(0.01)
    (place.home / "go").touch()
    errors = [process.communicate(timeout=100)[1] for process in both]
    return [(process.returncode, error) for process, error in zip(both, errors, strict=True)]


def test_two_processes_at_once_build_once(place: Place) -> None:
    place.compile_with('sleep 1\nexec c++ "$@"')
    ended = two_processes(place)
    assert [code for code, _ in ended] == [0, 0], ended
    assert place.compilations() == 1


def test_two_processes_at_once_fail_once(place: Place) -> None:
    place.compile_with("sleep 1\necho 'x: error: no such header' >&2\nexit 1")
    ended = two_processes(place)
    assert [code for code, _ in ended] == [1, 1]
    assert all("no such header" in error and "CompilerError" in error for _, error in ended)
    assert place.compilations() == 1


def test_the_wait_for_another_process_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(_build, "_LOCK_MARGIN_S", 0.2)
    lock = _cache.open_user_folder() / "tiny.lock"
    with lock.open("w") as file:
        lock.chmod(0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(stagehand_alloc.CompilerError, match=r"another process holds .*lock"):
            _build.build(place.library)
    assert place.compilations() == 0


def test_the_name_changes_with_everything_the_library_depends_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    names = [_recipe.recipe(place.library).stem]

    def look() -> None:
        names.append(_recipe.recipe(place.library).stem)

    place.source.write_text(SOURCE + "// more\n")
    look()
    place.header.write_text("static const int kAnswer = 43;\n")
    look()
    place.compile_with('exec c++ "$@"', version="2")
    look()
    place.library = Library("tiny", "tiny library", place.source, (), 1)  # links nothing
    look()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        look()
    other = place.home / "other"
    shutil.copy(place.compiler, other)
    monkeypatch.setenv("CXX", str(other))
    look()
    assert len(set(names)) == len(names) == 7
    assert names[-1] == _recipe.recipe(place.library).stem


def test_a_changed_header_is_seen_by_the_next_load(place: Place) -> None:
    assert answer(_build.load(place.library)) == 42
    place.header.write_text("static const int kAnswer = 43;\n")
    assert answer(_build.load(place.library)) == 43


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_library_cut_short_is_built_again(place: Place, keep: float) -> None:
    path = fill(place)
    size = path.stat().st_size
    os.truncate(path, int(keep if keep >= 1 else keep * size))
    assert _build.kept(place.library) is None
    assert answer(_build.load(place.library)) == 42
    assert path.stat().st_size == size


def test_a_library_that_does_not_load_is_built_again_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fill(place)
    path.write_bytes(b"no library" + _build._seal(b"no library"))
    assert _build.build(place.library) == path
    assert answer(_build.load(place.library)) == 42
    assert place.compilations() == 2

    place.header.write_text("int missing(); static const int kAnswer = missing();\n")
    with pytest.raises(stagehand_alloc.CompilerError, match="cannot be loaded"):
        _build.load(place.library)
    assert place.compilations() == 4


# ---- what is not trusted -------------------------------------------------------------------------


def assert_built_privately(place: Place, caplog: pytest.LogCaptureFixture, because: str) -> None:
    """Built into a fresh folder of this process, said in one line, and nothing kept is used."""
    path, library = _build.load(place.library)
    assert library.answer() == 42
    assert path.parent.parent == place.home / "tmp"
    assert path.parent.stat().st_mode & 0o077 == 0
    lines = caplog.messages
    assert len([line for line in lines if because in line and str(path.parent) in line]) == 1


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(
    place: Place, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    planted = fill(place)
    planted.write_bytes(b"planted" + _build._seal(b"planted"))
    place.cache.chmod(mode)
    _build.load(place.library)
    assert_built_privately(place, caplog, "others may write to")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("what", ["folder", "library", "lock"])
def test_what_belongs_to_somebody_else_is_not_used(
    place: Place, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    planted = fill(place)
    if what == "lock":
        planted.unlink()
    targets = {"folder": place.cache, "library": planted, "lock": place.cache / "tiny.lock"}
    os.chown(targets[what], 12345, 12345)
    _build.load(place.library)
    assert_built_privately(place, caplog, "belongs to user 12345")


@pytest.mark.parametrize("what", ["folder", "library", "lock"])
def test_symbolic_links_are_not_followed(
    place: Place, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    planted = fill(place)
    if what == "lock":
        planted.unlink()
    targets = {"folder": place.cache, "library": planted, "lock": place.cache / "tiny.lock"}
    moved = targets[what].rename(place.home / "elsewhere")
    targets[what].symlink_to(moved)
    _build.load(place.library)
    assert_built_privately(place, caplog, "is a symbolic link")


def test_a_lax_umask_still_makes_a_library_that_is_trusted(place: Place) -> None:
    before = os.umask(0)
    try:
        path = fill(place)
    finally:
        os.umask(before)
    assert _build.kept(place.library) == path


def test_where_no_cache_folder_can_be_a_temporary_one_is(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (place.home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.home / "file"))
    _build.load(place.library)
    assert_built_privately(place, caplog, "cannot be made")
    assert place.compilations() == 1
    assert "not used" in _doctor._cache_folder()


def test_a_read_only_folder_serves_what_it_has(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    kept = fill(place)
    place.cache.chmod(0o500)
    if os.access(place.cache, os.W_OK):
        pytest.skip("this user can write anywhere")
    try:
        assert _build.build(place.library) == kept
        place.header.write_text("static const int kAnswer = 42; // other\n")
        _build.load(place.library)
        assert_built_privately(place, caplog, "cannot be written to")
    finally:
        place.cache.chmod(0o700)


def test_a_temporary_folder_goes_with_its_process_unless_a_log_is_in_it(place: Place) -> None:
    for log in (False, True):
        folder = _cache.private.folder()
        if log:
            (folder / "x.log").touch()
        _cache._remove(os.getpid() + 1, folder)
        assert folder.exists()
        _cache._remove(os.getpid(), folder)
        assert folder.exists() == log


# ---- builds that fail ----------------------------------------------------------------------------


def test_a_compiler_that_fails_is_quoted_its_log_named_and_not_run_again(place: Place) -> None:
    place.compile_with("echo warmed up\necho 'x.cpp:1: error: no such header' >&2\nexit 3")
    texts = []
    for _ in range(2):
        with pytest.raises(stagehand_alloc.CompilerError) as caught:
            _build.build(place.library)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 2
    assert "ended with 3, x.cpp:1: error: no such header" in texts[0]
    log = next(place.cache.glob("*.log"))
    assert str(log) in texts[0]
    assert "warmed up" in log.read_text()
    assert str(place.source) in log.read_text()  # the command
    assert place.compilations() == 1


def test_another_compiler_is_another_try_and_success_takes_the_log_away(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.compile_with("exit 1")
    with pytest.raises(stagehand_alloc.CompilerError, match="without a word"):
        _build.build(place.library)
    place.compile_with('exec c++ "$@"')
    monkeypatch.setattr(_build, "_failures", _build._Failures())  # as a new process
    assert answer(_build.load(place.library)) == 42
    assert list(place.cache.glob("*.log")) == []


def test_a_compiler_that_hangs_is_ended_with_its_children(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_build, "TIMEOUT_S", 0.5)
    child = place.home / "child"
    place.compile_with(f'sleep 100 &\necho $! > "{child}"\nwait')
    with pytest.raises(stagehand_alloc.CompilerError, match="not done after"):
        _build.build(place.library)
    until = time.monotonic() + 10
    while _runs(int(child.read_text())):
        assert time.monotonic() < until
        time.sleep(0.01)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_cuda_headers_are_looked_for_beside_torch_and_where_the_variables_say(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = place.home / "site" / "nvidia" / "cu13" / "include"
    toolkit = place.home / "toolkit" / "include"
    for folder in (beside, toolkit):
        folder.mkdir(parents=True)
        (folder / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit.parent))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    torch_home = place.home / "site" / "torch"
    assert _recipe._cuda_headers(place.library, torch_home)[:2] == [beside, toolkit]


# ---- forbidden -----------------------------------------------------------------------------------


def test_a_forbidden_build_is_an_error_and_what_is_kept_still_serves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_build.FORBID, "0")
    with pytest.raises(stagehand_alloc.CompilerError, match=_build.FORBID):
        _build.build(place.library)
    assert place.compilations() == 0
    monkeypatch.delenv(_build.FORBID)
    path = fill(place)
    monkeypatch.setenv(_build.FORBID, "0")
    assert _build.build(place.library) == path


@pytest.mark.parametrize("by", ["environment", "config"])
def test_a_forbidden_trigger_is_neither_built_nor_loaded_nor_spoken_of(
    place: Place, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place)
    if by == "environment":
        monkeypatch.setenv(_build.FORBID, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(place, config=Config(build_trigger=by == "environment"))
    assert (found.path, found.state) == (None, "forbidden")
    assert ("STAGEHAND_ALLOC_BUILD" if by == "environment" else "build_trigger") in found.why
    monkeypatch.delenv(_build.FORBID, raising=False)
    assert load(place).state == "loaded"  # what one pool forbade another may have


# ---- the trigger library -------------------------------------------------------------------------


def load(place: Place, use: Any = lambda address: "", **more: Any) -> _trigger.Trigger:
    settings: dict[str, Any] = {"config": Config(), "library": place.library, "cuda": "13.0"}
    settings.update(more)
    return _trigger.load(settings.pop("config"), use=use, **settings)


def test_the_trigger_is_loaded_and_its_table_handed_over_once(place: Place) -> None:
    seen = []

    def use(address: int) -> str:
        seen.append(address)
        return ""

    found = load(place, use)
    assert (found.state, found.why) == ("loaded", "")
    assert found.path is not None
    assert found.path.parent == place.cache
    assert load(place, use) is found
    assert len(seen) == 1
    assert seen[0] > 1 << 32  # an address in full


def _refuse(address: int) -> str:
    return "storages are larger here than they were there."


def _break(address: int) -> str:
    raise RuntimeError("of another kind\nin two lines")


@pytest.mark.parametrize(
    ("use", "why"), [(_refuse, "larger here"), (_break, "of another kind in two lines")]
)
def test_a_failed_self_test_is_said_once_and_training_goes_on(
    place: Place, use: Any, why: str
) -> None:
    with pytest.warns(RuntimeWarning, match="next pack or unpack instead") as caught:
        found = load(place, use)
    assert found.state == "self-test failed"
    assert why in found.why
    assert len(str(caught[0].message).splitlines()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(place, use) is found


def test_a_trigger_without_its_function_falls_back(place: Place) -> None:
    place.source.write_text(SOURCE.replace("stagehand_torch_side", "other"))
    with pytest.warns(RuntimeWarning, match="stagehand_torch_side"):
        assert load(place).state == "self-test failed"


def test_a_trigger_that_cannot_be_built_falls_back_and_names_the_log(place: Place) -> None:
    place.compile_with("echo 'error: too new a torch' >&2; exit 1")
    with pytest.warns(RuntimeWarning, match=r"too new a torch") as caught:
        found = load(place)
    assert (found.path, found.state) == (None, "build failed")
    log = next(place.cache.glob("*.log"))
    assert str(log) in found.why
    assert str(log) in str(caught[0].message)
    assert load(place) is found
    assert place.compilations() == 1


def test_without_a_compiler_the_trigger_falls_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(place.home / "tmp"))
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler"):
        assert load(place).state == "no compiler"


def test_torch_without_cuda_needs_no_trigger(place: Place) -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    found = load(place, cuda=None)
    assert found.state == "not needed"
    assert "without CUDA" in found.why
    assert place.compilations() == 0
    assert _trigger.outlook().startswith("not needed")


def test_doctor_says_where_the_trigger_stands_and_builds_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_trigger, "LIBRARY", place.library)
    monkeypatch.setattr(_trigger, "_torch_cuda", lambda: "13.0")
    assert _trigger.outlook().startswith("not built yet")
    assert "not made yet" in _doctor._cache_folder()
    assert place.compilations() == 0
    path = fill(place)
    assert _trigger.outlook() == f"built, {path}"
    assert _doctor._cache_folder() == str(place.cache)
    monkeypatch.setenv(_build.FORBID, "0")
    assert "forbidden" in _trigger.outlook()
    place.cache.chmod(0o777)
    assert "others may write" in _doctor._cache_folder()


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
