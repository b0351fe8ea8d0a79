"""`python -m stagehand_alloc run`: a script that knows nothing of us, inside a budget."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from stagehand_alloc.__main__ import main

# A simulated GPU stands for the machine; the training below it is anybody's.
SCRIPT = """
import sys
import torch
from torch import nn
from stagehand_alloc import testing

def train():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                            for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(1024, 256)
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    print("loss", loss.item().hex(), sys.argv[1:], __name__)

with testing.simulated_gpu(memory="256MiB", seed=1):
    train()
"""


def run(
    *arguments: str, cwd: pathlib.Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def plain(script: str) -> str:
    """What the script prints without us."""
    done = run(script, "--epochs", "3")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("recompute", ["no", "yes"])
def test_a_script_trains_as_without_it_and_its_budget_is_held(
    script: str, plain: str, recompute: str
) -> None:
    options = ("--high", "56MiB", "--recompute", recompute)
    inside = run("-m", "stagehand_alloc", "run", *options, script, "--epochs", "3")
    assert inside.returncode == 0, inside.stderr
    assert inside.stdout == plain
    assert "0 B were moved" not in inside.stderr
    assert "of 56.00 MiB; 0 B over." in inside.stderr


def test_a_script_that_trains_nothing_is_told_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("print('done')")
    done = run("-m", "stagehand_alloc", "run", str(path))
    assert done.returncode == 0
    assert "no module's forward ran" in done.stderr


def test_a_script_that_fails_before_it_trains_has_the_last_word(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import sys; print('mine', file=sys.stderr); raise SystemExit(3)")
    done = run("-m", "stagehand_alloc", "run", str(path))
    assert done.returncode == 3
    assert done.stderr.strip().endswith("mine")


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--telemetry", "steps.jsonl"), {}),
        ((), {"STAGEHAND_ALLOC_TELEMETRY": "steps.jsonl"}),
    ],
)
def test_telemetry_goes_to_the_folder_that_run_was_started_in(
    tmp_path: pathlib.Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    script, elsewhere = tmp_path / "moves.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    script.write_text(f"import os; os.chdir({str(elsewhere)!r})\n{SCRIPT}")
    command = ("-m", "stagehand_alloc", "run", "--high", "64MiB", *options, str(script))
    done = run(*command, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3
    assert not list(elsewhere.iterdir())


OF_ITS_OWN = """
import torch
from torch import nn
import stagehand_alloc
from stagehand_alloc import testing

class Model(nn.Linear):
    def forward(self, x):
        with stagehand_alloc.pool(high="64MiB"):
            return super().forward(x)

with testing.simulated_gpu(memory="256MiB", seed=1):
    x = torch.randn(4, 8)
    ({call}).sum().backward()
"""


@pytest.mark.parametrize(
    "call",
    [
        'stagehand_alloc.pool(high="64MiB").__enter__() and nn.Linear(8, 8)(x)',
        "Model(8, 8)(x)",
    ],
)
def test_a_script_with_a_pool_of_its_own_is_told_that_run_enters_one(
    tmp_path: pathlib.Path, call: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(OF_ITS_OWN.format(call=call))
    done = run("-m", "stagehand_alloc", "run", str(path))
    assert done.returncode == 1
    *_, what, todo = done.stderr.splitlines()
    assert "NestedPoolError: `python -m stagehand_alloc run` enters a pool" in what
    assert "without `run`" in todo


def test_a_module_is_run_by_its_name() -> None:
    done = run("-m", "stagehand_alloc", "run", "-m", "this")
    assert done.returncode == 0, done.stderr
    assert "Zen" in done.stdout


@pytest.mark.parametrize("module", ["nothere", "os.nothere", "json"])
def test_a_module_that_is_not_there_is_said_as_python_says_it(module: str) -> None:
    plain = run("-m", module)
    done = run("-m", "stagehand_alloc", "run", "-m", module)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_a_module_that_imports_what_is_not_there_shows_where(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken.py").write_text("import nothere")
    done = run("-m", "stagehand_alloc", "run", "-m", "broken", cwd=tmp_path)
    assert done.returncode == 1
    assert "broken.py" in done.stderr
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'nothere'\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--high", "20 potatoes", __file__], "20 potatoes"),
        (["--high", "0.5", "--low", "0.8", __file__], "low is 80%, above high, 50%"),
        (["nowhere.py"], "no file nowhere.py"),
        (["--telemetry", "no/steps.jsonl", __file__], "no/steps.jsonl cannot be written"),
        (["--telemetry", "", __file__], "cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(arguments: list[str], told: str) -> None:
    done = run("-m", "stagehand_alloc", "run", *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_where_cuda_was_initialised_before_the_script_began_the_error_says_so(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a sitecustomize, or a package that is imported with torch, may have done.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", object, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    assert main(["run", "--mode", "allocator", script]) == 2
    printed = capsys.readouterr()
    what, todo = printed.err.splitlines()
    assert what == "CUDA was initialised before the allocator was installed."
    assert "Leave out --mode allocator" in todo
    assert printed.out == ""  # nothing of the script ran
