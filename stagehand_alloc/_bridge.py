"""Builds the library that routes torch's CPU tensors to the process allocator.

It needs the headers of the torch that is installed, so it is built on first use and kept in the
user's cache folder, under a name that changes with everything it depends on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from stagehand_alloc import _driver
from stagehand_alloc._errors import CompilerError

_SOURCE = Path("torch_hook") / "cpu_allocator.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_INSTALL_COMPILER = "Install a C++20 compiler (on Debian: g++), or name one in the variable CXX."


def build() -> Path:
    """The library, built unless the cache folder has it. Raises CompilerError."""
    import torch

    compiler = find_compiler()
    if compiler is None:
        raise CompilerError("No C++ compiler was found.", _INSTALL_COMPILER)
    source = source_path()
    flags = _flags(torch)
    parts = (torch.__version__, str(torch.__file__), platform.machine(), compiler, *flags)
    key = "\n".join((source.read_text(), *parts))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    library = cache_folder() / f"cpu_allocator-{digest}.so"
    if not library.exists():
        _compile(compiler, flags, source, library)
    return library


def source_path() -> Path:
    """The library's source: beside the extension where installed, else in the source tree."""
    beside = Path(_driver.native().__file__).parent / _SOURCE
    in_tree = Path(__file__).parents[1] / "native" / _SOURCE
    found = next((path for path in (beside, in_tree) if path.exists()), None)
    if found is None:
        raise CompilerError(
            f"The source of the CPU bridge is neither at {beside} nor at {in_tree}.",
            "Install the package again: its files are incomplete.",
        )
    return found


def find_compiler() -> str | None:
    """Path of the C++ compiler: CXX, or the first of the usual names."""
    names = (os.environ.get("CXX") or "", *_COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """The user's cache folder for this package, or a temporary one where that is not writable."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "stagehand_alloc"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="stagehand_alloc-"))


def _flags(torch: Any) -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    return (
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(root / "include")),
        *("-L", str(root / "lib"), "-lc10", "-pthread"),
    )


def _compile(compiler: str, flags: tuple[str, ...], source: Path, library: Path) -> None:
    """Build beside the target and rename: other processes see all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        # Libraries come after the source that needs them.
        command = [compiler, str(source), *flags, "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError(f"{compiler} did not run: {error}.", _INSTALL_COMPILER) from error
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise CompilerError(
                f"{compiler} could not build the CPU bridge: {first or done.stderr[-500:]}",
                f"A C++20 compiler and torch's headers are needed; it ran: {' '.join(command)}",
            )
        output.replace(library)
