"""How a small library is built against the torch that is installed, and what names the result."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagehand_alloc._errors import CompilerError
from stagehand_alloc._extension import native

INSTALL_COMPILER = "Install a C++20 compiler (on Debian: g++), or name one in the variable CXX."

_COMPILERS = ("c++", "g++", "clang++")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Library:
    """What is built. Files it includes by a name in quotes belong to it, and to its key."""

    name: str  # of the file
    words: str  # what messages call it
    source: Path  # below the folder of the native sources
    link: tuple[str, ...]  # of torch/lib; those that are not there are left out
    seconds: int  # about how long it takes
    cuda: bool = False  # needs CUDA's headers
    python: bool = False  # needs Python's
    defines: Callable[[str], tuple[str, ...]] = lambda version: ()  # by torch's version


@dataclass(frozen=True)
class Recipe:
    """The compiler's command for one library, and a digest of everything that goes into it."""

    library: Library
    torch_version: str
    command: tuple[str, ...]  # all but the output
    digest: str

    @property
    def stem(self) -> str:
        """Of the names of the files."""
        return f"{self.library.name}-{self.digest}"


def find_compiler() -> str | None:
    """Path of the C++ compiler: CXX, or the first of the usual names.

    Raises CompilerError where CXX names none: another one is not what was asked for.
    """
    if asked := os.environ.get("CXX"):
        if (found := shutil.which(asked)) is None:
            raise CompilerError(
                f"CXX={asked!r} is no program that can be run.",
                "Set CXX to the path of a C++ compiler alone, without arguments, or unset it.",
            )
        return found
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def compiler_version(path: str) -> str:
    """What the compiler says of itself, or why it says nothing."""
    command = [path, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no version: {error}"
    return done.stdout or "no version"


def source_path(library: Library) -> Path:
    """The library's source: beside the extension where installed, else in the source tree."""
    places = [root / library.source for root in _roots()]
    found = next((path for path in places if path.exists()), None)
    if found is None:
        raise CompilerError(
            f"The source of the {library.words} is neither at {places[0]} nor at {places[1]}.",
            "Install the package again: its files are incomplete.",
        )
    return found


def _roots() -> tuple[Path, Path]:
    return Path(native.__file__).parent, Path(__file__).parents[2] / "native"


def recipe(library: Library) -> Recipe:
    """How ``library`` is built here. Raises CompilerError for what is missing."""
    import torch

    compiler = find_compiler()
    if compiler is None:
        raise CompilerError("No C++ compiler was found.", INSTALL_COMPILER)
    source = source_path(library)
    root = next((root for root in _roots() if source.is_relative_to(root)), source.parent)
    command = _command(library, compiler, source, root, torch)
    texts = (
        text
        for file in _with_included(source, root)
        for text in (str(file.relative_to(root)), file.read_text())
    )
    parts = (
        *(torch.__version__, str(torch.__file__), platform.machine(), compiler_version(compiler)),
        *(*command, *texts),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Recipe(library, torch.__version__, command, digest)


def _command(
    library: Library, compiler: str, source: Path, root: Path, torch: Any
) -> tuple[str, ...]:
    home = Path(torch.__file__).parent
    headers = [home / "include"]
    if library.python:
        headers.append(_python_headers(library))
    if library.cuda:
        headers.extend(_cuda_headers(library, home))
    present = [name for name in library.link if (home / "lib" / f"lib{name}.so").exists()]
    return (
        *(compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-D{define}" for define in library.defines(torch.__version__)),
        *("-I", str(root)),
        *(text for folder in headers for text in ("-isystem", str(folder))),
        str(source),
        # Libraries come after the source that needs them.
        *("-L", str(home / "lib")),
        *(f"-l{name}" for name in present),
        "-pthread",
    )


def _python_headers(library: Library) -> Path:
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").exists():
        raise CompilerError(
            f"The {library.words} needs Python's C headers, and there is no {folder / 'Python.h'}.",
            "Install them (on Debian: python3-dev).",
        )
    return folder


def _cuda_headers(library: Library, torch_home: Path) -> list[Path]:
    """Every folder of CUDA's headers, nearest to torch first: a wheel may leave out ``crt``."""
    variables = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [
        *sorted(torch_home.parent.glob("nvidia/*/include")),
        *(Path(value) / "include" for value in variables if value),
        Path("/usr/local/cuda/include"),
    ]
    needed = ("cuda_runtime_api.h", "crt/host_defines.h")
    found = [path for path in places if any((path / name).exists() for name in needed)]
    if not any((path / needed[0]).exists() for path in found):
        raise CompilerError(
            f"The {library.words} needs CUDA's headers, and no {needed[0]} was found.",
            "Name a CUDA toolkit in CUDA_HOME, or install the wheel nvidia-cuda-runtime.",
        )
    return list(dict.fromkeys(found))


def _with_included(source: Path, root: Path) -> list[Path]:
    """``source`` and the files of ours it includes, itself or through others, in that order."""
    files = [source]
    for file in files:  # which grows on the way
        for name in _INCLUDE.findall(file.read_text()):
            path = next((p for p in (file.parent / name, root / name) if p.exists()), None)
            if path is not None and path not in files:
                files.append(path)
    return files
