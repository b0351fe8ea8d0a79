"""What a wheel carries, and what it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import wheels  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a wheel of the sources as they stand; what setup compiled is not compiled again."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheels.names(wheel)


def test_no_file_has_the_drivers_name(files: list[str]) -> None:
    assert [name for name in files if "libcuda" in name] == []


def test_the_extension_the_simulator_and_the_types_are_in_it(files: list[str]) -> None:
    assert "stagehand_alloc/_sim/libstagehand_sim.so" in files
    assert "stagehand_alloc/py.typed" in files
    assert [name for name in files if re.fullmatch(r"stagehand_alloc/_native\.[\w-]+\.so", name)]


def test_every_python_file_of_the_package_is_in_it_and_nothing_else_of_ours(
    files: list[str],
) -> None:
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "stagehand_alloc").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == ours
    folders = {name.split("/")[0] for name in files}
    assert {folder for folder in folders if "dist-info" not in folder} == {"stagehand_alloc"}


def test_the_licence_is_in_it(files: list[str]) -> None:
    assert [name for name in files if name.endswith("LICENSE")]
