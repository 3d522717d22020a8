"""A user's environment class by name: "package.module:Class" or "file.py:Class". Must not know what it does."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from learner.environments.environment import Environment
from p2p.errors import UsageError


def load_environment(name: str) -> type[Environment]:
    """The class. UsageError, one line, when there is none of that name."""
    where, colon, wanted = name.rpartition(":")
    if not colon or not where:
        raise UsageError(f'environment {name!r}: write "module:Class" or "file.py:Class"')
    try:
        if where.endswith(".py"):
            folder = os.path.dirname(os.path.abspath(where))
            if folder not in sys.path:
                sys.path.append(folder)  # for what lies beside it
            spec = importlib.util.spec_from_file_location(os.path.basename(where)[:-3], where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except Exception as error:
        raise UsageError(f"environment {name}: {where} cannot be imported: {type(error).__name__}: {error}") from None
    found = getattr(module, wanted, None)
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise UsageError(f"environment {name}: {where} has no subclass of Environment called {wanted}")
    return found
