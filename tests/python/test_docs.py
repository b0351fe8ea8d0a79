"""The pages are whole: every Python block compiles, the marked ones run, every page is reached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stagehand_alloc

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")])
BLOCK = re.compile(r"^(<!-- run -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = [page for page in PAGES if "<!-- run -->" in page.read_text()]
# The simulated GPU has 1 GiB, and the model here needs 26 MiB.
SMALLER = (("GiB", "MiB"), ("2**30", "2**20"))


def blocks(page: Path) -> list[tuple[bool, str, int]]:
    """Whether a block is marked to run, its text, and the line it begins at."""
    text = page.read_text()
    return [
        (bool(block[1]), block[2], text[: block.start(2)].count("\n") + 1)
        for block in BLOCK.finditer(text)
    ]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_are_pages_with_python_in_them() -> None:
    assert len(RUN) >= 6
    assert sum(len(blocks(page)) for page in PAGES) >= 30


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_of_python_is_python(page: Path) -> None:
    for _, text, line in blocks(page):
        compile(text, f"{page}, from line {line}", "exec")


class Model(nn.Module):
    """Returns its loss, as the pages' models do."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


@pytest.mark.parametrize("page", RUN, ids=page_id)
@pytest.mark.usefixtures("gpu")
def test_a_marked_block_trains_as_it_stands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for marked, text, line in blocks(page):
        if not marked:
            continue
        for one, other in SMALLER:
            text = text.replace(one, other)
        model = Model()
        batches = [torch.randn(1024, 256) for _ in range(3)]
        names: dict[str, Any] = {
            "model": model,
            "batches": batches,
            "batch": batches[0],
            "optimizer": torch.optim.AdamW(model.parameters()),
            "torch": torch,
            "stagehand_alloc": stagehand_alloc,
        }
        exec(compile(text, f"{page}, from line {line}", "exec"), names)
        assert names["loss"].isfinite()
        assert all(
            weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters()
        )


def test_every_page_is_on_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        if page.parent.name != "decisions":  # which are on a page made from their folder
            assert str(page.relative_to(ROOT / "docs")) in menu, f"{page}: add it to mkdocs.yml"
