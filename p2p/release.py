"""Which release of Shoal runs. Its number stands in one place, `pyproject.toml`; must not know who asks.

An installed package carries it as metadata. A checkout's own file goes before that: the metadata of an editable install is of the
day when it was installed, and a checkout that is run where it lies has none.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from functools import cache
from pathlib import Path

from p2p.processes import INSTALLED, ROOT

DISTRIBUTION = "shoal"
"""The name of our package in `pyproject.toml` and in an environment's metadata."""

UNKNOWN = "unknown"
"""What stands for the release where none can be found."""


def of_checkout(root: Path) -> str:
    """The release that `root`/pyproject.toml names; "" where that is no file of ours."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == DISTRIBUTION else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@cache
def release() -> str:
    """The release, as "0.1.0"; UNKNOWN for files that were copied from somewhere without either."""
    if not INSTALLED and (found := of_checkout(ROOT)):
        return found
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
