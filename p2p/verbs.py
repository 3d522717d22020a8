"""What a verb of the command line is, for those who add some. The frame around them is `shoal.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

Run = Callable[[argparse.Namespace], dict[str, Any]]
"""Does what the verb says, and returns the object that --json prints."""


class AddVerb(Protocol):
    """Adds the verb `name` to the subparsers `under`, with the flags that every verb takes."""

    def __call__(self, name: str, run: Run, help: str, under: Any) -> argparse.ArgumentParser: ...
