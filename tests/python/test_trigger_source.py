"""The trigger library compiles against the headers of the torch that is installed.

Where that torch has no CUDA it has no libraries to link with: the compiler then only reads the
source. CUDA's own headers come from wheels.
"""

from __future__ import annotations

import re
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


def virtual_functions(header: str, of: str) -> set[str]:
    """The names of those that ``of``, a class or struct of a torch header, declares."""
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    body = text[text.index(f" {of} ") :]
    body = re.sub(r"//[^\n]*", "", body[: body.index("\n};")])
    return set(re.findall(r"\bvirtual\b[^;{}()]*?(\w+)\s*\(", body))


def test_the_allocator_in_front_of_torchs_hands_every_function_on() -> None:
    """What it left out would do something else than torch's own, in silence."""
    declared = (
        virtual_functions("c10/core/Allocator.h", "C10_API Allocator")
        | virtual_functions("c10/core/CachingDeviceAllocator.h", "C10_API DeviceAllocator")
        | virtual_functions("c10/cuda/CUDACachingAllocator.h", "CUDAAllocator")
    )
    source = compiler.source_path(trigger.LIBRARY).with_name("requests.hpp").read_text()
    handed_on = set(re.findall(r"STAGEHAND_HAND_ON\([^()]*?(?:<[^>]*>)?,\s*(\w+),", source))
    handed_on |= set(re.findall(r"(\w+)\([^()]*\) (?:const )?override \{", source))
    assert len(declared) > 40
    assert declared - {"Allocator", "DeviceAllocator"} <= handed_on
