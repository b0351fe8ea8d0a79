"""How commands that read and print end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from stagehand_alloc._errors import StagehandError


def ended(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run ``command``: 0, or 2 where what it was given is not what it needs, in two lines."""
    try:
        command(arguments)
    except StagehandError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        return 0
    return 0
