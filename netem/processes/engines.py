"""The engines of nodes' processes: how they are known among a node's children. Must not know what they compute."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

ENGINE = "node.engine.child"
"""The module that an engine's process runs."""


def engines_of(nodes: Iterable[int]) -> list[psutil.Process]:
    """Of these node processes (their ids), in order."""
    children = (child for pid in nodes for child in psutil.Process(pid).children(recursive=True))
    return [child for child in children if ENGINE in child.cmdline()]
