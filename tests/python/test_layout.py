"""Includes go down the ladder only, and every module is private unless it is meant to be used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagehand_alloc._built import compiler as _recipe

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
PACKAGE = ROOT / "stagehand_alloc"
# The package's rooms, lowest floor first: each imports from those below it, and from itself.
FLOORS = (
    ("_errors", "_guarded", "_tell"),
    ("_extension", "_settings"),
    ("_driver",),
    ("_built", "_books"),
    ("_pictures",),
    ("_torch_side",),
    ("_weights",),
    ("_step",),
    ("testing",),
    ("_cli",),
    ("integrations",),
)
PUBLIC = {"testing.py", "integrations"}
CHANGE = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"}
CHANGE |= {"remove", "reverse", "set", "setdefault", "sort", "update"}

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


def python_sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The folder in the package, or the file where it stands in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def known_by(path: Path) -> set[str]:
    """The rooms of ours that a file imports from, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE.name):
            continue
        parts = (node.module or "").split(".")
        found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found - {"_native"}


def test_every_room_of_the_package_is_on_a_floor() -> None:
    rooms = {room_of(path) for path in python_sources()} - {"__init__", "__main__"}
    assert rooms == {room for floor in FLOORS for room in floor}


def test_imports_in_the_package_go_down_only() -> None:
    below: set[str] = set()
    for floor in FLOORS:
        for room in floor:
            for path in python_sources():
                if room_of(path) == room:
                    assert known_by(path) <= {*below, room, "__version__"}, path
        below |= set(floor)


def is_constant(node: ast.expr) -> bool:
    """A constant, a type or a class by its name: SIZES, _SIZES, Row, _errors.KEYS."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lstrip("_")[:1].isupper()


def at_module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements outside of functions and classes, also those in an `if` or a `try`."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kinds = ast.stmt | ast.excepthandler | ast.match_case
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, kinds)]


def variables(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """What stands at module level and is no constant by its name, and what it is bound to."""
    for node in at_module_level(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (one for target in targets for one in ast.walk(target)):
                if isinstance(name, ast.Name) and not is_constant(name):
                    yield name.id, node.value


def is_owner(value: ast.expr | None, ours: set[str]) -> bool:
    """Whether it is an object of a class of ours, or another name for what has one."""
    if isinstance(value, ast.Call):
        made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        return isinstance(made, ast.Name) and is_constant(made) and made.id in ours
    return isinstance(value, ast.Name)


def changes(tree: ast.Module) -> Iterator[ast.expr]:
    """Where something in a constant, or a class's own attribute, is set, deleted or added to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed = is_constant(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.attr in CHANGE and is_constant(node.func.value)
        else:
            continue
        if changed:
            yield node


def test_what_changes_in_a_module_has_an_owner() -> None:
    for path in python_sources():
        tree = ast.parse(path.read_text())
        ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                ours |= {alias.asname or alias.name for alias in node.names}
        for name, value in variables(tree):
            allowed = name in {"logger", "__all__", "__version__"}
            assert allowed or is_owner(value, ours), f"{path}: {name}"
        for node in changes(tree):
            raise AssertionError(f"{path}:{node.lineno}: {ast.unparse(node)}")


def test_modules_are_private_unless_they_are_meant_to_be_used() -> None:
    names = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    public = {name for name in names if not name.startswith("_")}
    assert public == PUBLIC


def test_only_one_module_touches_cuda_python() -> None:
    pattern = re.compile(r"^\s*(?:from|import)\s+cuda\b", re.MULTILINE)
    assert [p.name for p in python_sources() if pattern.search(p.read_text())] == ["_driver.py"]


def test_only_one_module_opens_the_extension() -> None:
    pattern = re.compile(r"import _native\b")
    assert [p.name for p in python_sources() if pattern.search(p.read_text())] == ["_extension.py"]


def test_the_stub_names_what_the_bindings_define() -> None:
    stub = (ROOT / "stagehand_alloc" / "_native.pyi").read_text()
    bindings = "".join(path.read_text() for path in sources("entry"))
    declared = set(re.findall(r"^(?:def|class) (\w+)", stub, re.MULTILINE))
    names = r'(?:(?:\.def|class_<\w+>)\(\s*(?:module, )?|module\.attr\()"(\w+)"'
    defined = set(re.findall(names, bindings))
    assert declared <= defined


def test_the_page_of_states_is_made_from_the_tables_the_code_checks() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "states.py"), "--check"], check=False
    )
    assert done.returncode == 0, "run python tools/states.py"


def test_the_figures_of_the_pages_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "figures.py"), "--check"], check=False
    )
    assert done.returncode == 0, "run python tools/figures.py"


def test_the_readme_is_short_and_every_link_inside_the_repository_leads_somewhere() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"
