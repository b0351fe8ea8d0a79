"""The little HTML that pages and notebooks share."""

from __future__ import annotations

import html
from collections.abc import Sequence


def escaped(text: str) -> str:
    """``text`` as HTML shows it."""
    return html.escape(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; ``rows`` are HTML already."""
    top = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
