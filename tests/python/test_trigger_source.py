"""The trigger library compiles against the headers of the torch that is installed.

Where that torch has no CUDA it has no libraries to link with: the compiler then only reads the
source. CUDA's own headers come from wheels.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from stagehand_alloc._built import compiler, trigger

# What building torch with CUDA makes, and a build without it leaves out; it holds one setting.
GENERATED = "c10/cuda/impl/cuda_cmake_macros.h"


def test_its_source_compiles_without_a_warning(tmp_path: Path) -> None:
    command = [
        text
        for text in compiler.recipe(trigger.LIBRARY).command
        if text not in ("-shared", "-O2") and not text.startswith("-l")
    ]
    if not (Path(torch.__file__).parent / "include" / GENERATED).exists():
        made = tmp_path / GENERATED
        made.parent.mkdir(parents=True)
        made.write_text("#pragma once\n")
    command += ["-isystem", str(tmp_path), "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
