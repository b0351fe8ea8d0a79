"""The sha256 that names the sources a record of GPU tests speaks of.

Every .py .pyi .cpp .hpp .h .cmake and CMakeLists.txt under native/, stagehand_alloc/ and
tests/gpu/, in sorted order of POSIX path, each as path, newline, bytes.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("native", "stagehand_alloc", "tests/gpu")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h", ".cmake"}


def source_hash(root: pathlib.Path = ROOT) -> str:
    """The hash of the sources under `root`, in hexadecimal."""
    digest = hashlib.sha256()
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        if path.suffix in SUFFIXES or path.name == "CMakeLists.txt":
            digest.update(path.relative_to(root).as_posix().encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(source_hash(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
