"""mkdocs' hook: pages that stand outside of docs/, and pages made from sources.

Links in Markdown are those that work in the repository, such as [x](../ARCHITECTURE.md). Here they
are made those of the site. A link to a file that is no page of the site fails a strict build.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository that are pages or pictures of the site.
BROUGHT_IN = (
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    "native/README.md",
    *(f"benchmarks/results/{name}.svg" for name in ("suite", "workloads", "weights")),
)
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s]+)(?P<rest>#[^)]*)?(?=\))")


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("examples/"):
        return "examples.md"
    return path.removeprefix("docs/")


def on_files(files: Any, config: Any) -> Any:
    """Add what stands elsewhere."""
    for path in BROUGHT_IN:
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "examples.md", content=examples()))
    files.append(File.generated(config, "decisions.md", content=decisions()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make the repository's links the site's."""
    source = page.file.abs_src_path
    folder = Path(source).parent if source else ROOT / "docs"
    here = Path(page.file.src_uri).parent

    def site_link(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = os.path.relpath(os.path.normpath(folder / target), ROOT)
        rest = f"#{anchor(path)}" if path.startswith("examples/") else link["rest"] or ""
        return os.path.relpath(place(path), here) + rest

    return LINK.sub(site_link, markdown)


def anchor(example: str) -> str:
    return Path(example).stem


def examples() -> str:
    """Each program of examples/ in full, under what it says of itself."""
    lines = ["# Examples", "", "Each runs as it is, with a GPU or without, and is a test.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        about = ast.get_docstring(ast.parse(text)) or ""
        lines += [f"## {path.name} {{ #{anchor(path.name)} }}", "", about, ""]
        lines += ["```python", text.rstrip(), "```", ""]
    return "\n".join(lines)


def decisions() -> str:
    """The list of records."""
    lines = ["# Decisions", "", "Why things are as they are, in the order they were decided.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        title = title.replace(". ", r"\. ", 1)
        lines.append(f"* [{title}](decisions/{path.name})")
    return "\n".join(lines)
