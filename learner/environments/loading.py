"""A user's environment class by its name. Must not know what it does."""

from __future__ import annotations

from learner.environments.environment import Environment
from learner.user_code import load_named
from p2p.errors import UsageError


def load_environment(name: str) -> type[Environment]:
    """The class "module:Class" or "file.py:Class". UsageError, one line, when it cannot be had."""
    found = load_named(name, "environment")
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise UsageError(f"environment: {name} is no subclass of learner.environments.environment.Environment")
    return found
