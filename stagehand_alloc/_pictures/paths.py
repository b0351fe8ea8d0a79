"""That a file can be written is asked where its path is given, and not once the work is done."""

from __future__ import annotations

import os
from pathlib import Path

from stagehand_alloc._errors import TelemetryError


def require_writable(what: str, path: str | Path) -> None:
    """Raises TelemetryError where ``path`` cannot be written, as far as is known. Makes nothing."""
    folder = os.path.dirname(os.path.realpath(path))  # where a link leads
    there = os.path.exists(path)
    if os.path.isdir(path):
        why = "It is a folder"
    elif os.path.basename(path) in ("", os.curdir, os.pardir):
        why = "It names no file"
    elif not os.path.isdir(folder):
        why = f"There is no folder {folder}"
    elif not os.access(path if there else folder, os.W_OK):
        why = "Permission denied"
    else:
        return
    raise TelemetryError(
        f"The {what} {path or repr('')} cannot be written: {why}.",
        "Give a path in a folder that exists and can be written.",
    )
