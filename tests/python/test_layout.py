"""Includes go down the ladder only, and every module is private unless it is meant to be used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagehand_alloc import _recipe

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"

# Each folder, and the folders of ours it may include from. driver is the floor.
MAY_INCLUDE = {
    "driver": {"driver"},
    "core": {"core", "driver"},
    "sim": {"sim", "driver"},
    "entry": {"entry", "core", "driver"},
    "torch_hook": {"torch_hook", "core"},
}
# Headers that are not the standard library's nor ours, and the one folder each is for.
FOREIGN = {
    "Python.h": {"entry"},
    "nanobind/": {"entry"},
    "c10/": {"torch_hook"},
    "torch/": {"torch_hook"},
    "ATen/": {"torch_hook"},
    "cuda": set(),
}
# What may know all the rest of the core: the story, and its files.
STORY = "runtime"
PURE = ("victim", "plan", "size_class")
EFFECTS = ("device_heap", "pinned_pool", "ledger", "transfers", "books", "room", "arena", STORY)
PUBLIC_MODULES = {"__init__.py", "__main__.py", "testing.py"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def sources(folder: str) -> list[Path]:
    found = sorted(p for p in (NATIVE / folder).rglob("*") if p.suffix in {".cpp", ".hpp", ".h"})
    assert found, f"native/{folder} has no sources"
    return found


def includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


def test_what_is_built_on_the_users_machine_is_installed_whole() -> None:
    installed = (NATIVE / "cmake" / "extension.cmake").read_text()
    for source in sources("torch_hook"):
        for file in _recipe._with_included(source, NATIVE):
            assert str(file.relative_to(NATIVE)) in installed, f"{file}, for {source}"


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_includes_of_ours_go_down_only(folder: str) -> None:
    for path in sources(folder):
        for quote, name in includes(path):
            if quote == '"':
                target = name.split("/")[0] if "/" in name else folder
                assert target in MAY_INCLUDE[folder], f"{path}: {name}"


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_foreign_headers_stay_in_their_folder(folder: str) -> None:
    for path in sources(folder):
        for _, name in includes(path):
            for prefix, homes in FOREIGN.items():
                if name.startswith(prefix):
                    assert folder in homes, f"{path}: {name}"


def test_every_native_folder_is_on_the_ladder() -> None:
    folders = {p.name for p in NATIVE.iterdir() if p.is_dir()}
    assert folders == {*MAY_INCLUDE, "cmake"}


def test_only_the_runtime_knows_the_runtime() -> None:
    for path in sources("core"):
        knows = any(Path(name).name.startswith(STORY) for _, name in includes(path))
        assert not knows or path.name.startswith(STORY), path


def test_pure_parts_of_the_core_know_nothing_with_effects() -> None:
    for path in sources("core"):
        if path.stem in PURE:
            known = {Path(name).stem for _, name in includes(path)}
            assert not known & set(EFFECTS), path


def test_every_header_is_guarded_once() -> None:
    for folder in MAY_INCLUDE:
        for path in sources(folder):
            if path.suffix in {".hpp", ".h"}:
                assert path.read_text().count("#pragma once") == 1, path


def test_modules_are_private_unless_they_are_meant_to_be_used() -> None:
    names = {path.name for path in (ROOT / "stagehand_alloc").glob("*.py")}
    assert {name for name in names if not name.startswith("_")} | {
        "__init__.py",
        "__main__.py",
    } == PUBLIC_MODULES


def test_only_one_module_touches_cuda_python() -> None:
    pattern = re.compile(r"^\s*(?:from|import)\s+cuda\b", re.MULTILINE)
    users = [
        p.name for p in (ROOT / "stagehand_alloc").glob("*.py") if pattern.search(p.read_text())
    ]
    assert users == ["_driver.py"]


def test_the_stub_names_what_the_bindings_define() -> None:
    stub = (ROOT / "stagehand_alloc" / "_native.pyi").read_text()
    bindings = "".join(path.read_text() for path in sources("entry"))
    declared = set(re.findall(r"^(?:def|class) (\w+)", stub, re.MULTILINE))
    defined = set(re.findall(r'(?:\.def|class_<\w+>)\(\s*(?:module, )?"(\w+)"', bindings))
    assert declared <= defined


def test_the_page_of_states_is_made_from_the_tables_the_code_checks() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "states.py"), "--check"], check=False
    )
    assert done.returncode == 0, "run python tools/states.py"
