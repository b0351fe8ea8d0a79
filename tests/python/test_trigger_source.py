"""The trigger library compiles against the headers of the torch that is installed.

Where that torch has no CUDA it has no libraries to link with: the compiler then only reads the
source. CUDA's own headers come from wheels.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from stagehand_alloc._built import compiler, trigger

# What building torch with CUDA makes, and a build without it leaves out; it holds one setting.
GENERATED = "c10/cuda/impl/cuda_cmake_macros.h"


def command_of(tmp_path: Path) -> list[str]:
    """The compiler's, of this torch, without what is linked."""
    command = [
        text
        for text in compiler.recipe(trigger.LIBRARY).command
        if text not in ("-shared", "-O2") and not text.startswith("-l")
    ]
    if not (Path(torch.__file__).parent / "include" / GENERATED).exists():
        made = tmp_path / GENERATED
        made.parent.mkdir(parents=True)
        made.write_text("#pragma once\n")
    return [*command, "-isystem", str(tmp_path), "-Wall", "-Wextra", "-Werror"]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_source_compiles_without_a_warning(tmp_path: Path) -> None:
    run(*command_of(tmp_path), "-fsyntax-only")


# --- How much a request asks for


TELLS = trigger.tells_requests(torch.__version__)
if_it_tells = pytest.mark.skipif(not TELLS, reason="nothing is put in front of its allocator")


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.14.1"])
def test_a_release_that_is_known_tells(version: str) -> None:
    assert trigger.tells_requests(version)


@pytest.mark.parametrize(
    "version", ["2.13.0a0+git1a2b3c4", "2.12.0.dev20260301", "2.10.0", "2.15.0"]
)
def test_a_preview_or_a_torch_that_is_not_known_does_not(version: str) -> None:
    assert not trigger.tells_requests(version)


@if_it_tells
def test_the_allocator_in_front_of_torchs_notes_sizes_and_answers_as_torchs(tmp_path: Path) -> None:
    program = tmp_path / "requests"
    source = compiler.source_path(trigger.LIBRARY)
    libraries = str(Path(torch.__file__).parent / "lib")
    command = [text for text in command_of(tmp_path) if text != str(source)]
    test = Path(__file__).parents[1] / "torch_hook" / "requests.cpp"
    link = ("-L", libraries, "-lc10", f"-Wl,-rpath,{libraries}")
    run(*command, str(test), *link, "-o", str(program))
    run(str(program))


def virtual_functions(header: str, of: str) -> Counter[str]:
    """How many of each name ``of``, a class or struct of a torch header, declares."""
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    body = text[text.index(f" {of} ") :]
    body = re.sub(r"//[^\n]*", "", body[: body.index("\n};")])
    names = re.findall(r"\bvirtual\b[^;{}()]*?(~?\w+)\s*\(", body)
    return Counter(name for name in names if not name.startswith("~"))


def handed_on() -> Counter[str]:
    """The same of the allocator in front of torch's, as this torch compiles it."""
    source = compiler.source_path(trigger.LIBRARY).with_name("requests.hpp").read_text()
    source = source[source.index("class TellingAllocator") :]
    minor = int(torch.__version__.split(".")[1])
    source = re.sub(
        r"#if TORCH_VERSION_MINOR >= (\d+)\n(.*?)#endif",
        lambda part: part[2] if minor >= int(part[1]) else "",
        source,
        flags=re.DOTALL,
    )
    names = re.findall(r"STAGEHAND_HAND_ON\([^()]*?(?:<[^>]*>)?,\s*(\w+),", source)
    return Counter(names + re.findall(r"(\w+)\([^()]*\) (?:const )?override \{", source))


@if_it_tells
def test_the_allocator_in_front_of_torchs_hands_every_function_on() -> None:
    """What it left out would do something else than torch's own, in silence."""
    declared = (
        virtual_functions("c10/core/Allocator.h", "C10_API Allocator")
        + virtual_functions("c10/core/CachingDeviceAllocator.h", "C10_API DeviceAllocator")
        + virtual_functions("c10/cuda/CUDACachingAllocator.h", "CUDAAllocator")
    )
    assert len(declared) > 40
    assert not declared - handed_on()
