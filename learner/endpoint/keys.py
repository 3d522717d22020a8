"""The endpoint's key: made once for a run, or from the environment; and where its URL is written. Must not know HTTP."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from p2p.errors import UsageError

KEY_FILE = "endpoint.key"
"""Name of the key's file in the run directory, one word on one line: its owner alone may read it."""

ADDRESS_FILE = "endpoint.json"
"""Where a program reads, in the run directory, at which URL the endpoint is: its port may be any free one."""

KEY_BYTES = 32
"""Random bytes of a key that we make: as many as of the signatures' keys, out of reach of any guessing."""

SHORTEST_KEY = 16
"""Characters that a key of the user's own has at least: one that is shorter may be guessed over the network."""


def endpoint_key(run_dir: Path, key_env: str, environment: Mapping[str, str] = os.environ) -> str:
    """The key that clients show: from the variable `key_env`, or of the run, made when it has none. UsageError when there is none
    to be had."""
    if key_env:
        return _sound(environment.get(key_env, ""), f"endpoint.key_env: the environment variable {key_env}")
    path = run_dir / KEY_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _kept(path)
    except OSError as error:
        raise UsageError(f"cannot write the endpoint's key {path}: {error.strerror}") from None
    key = secrets.token_urlsafe(KEY_BYTES)
    with os.fdopen(handle, "w") as file:
        file.write(f"{key}\n")
    return key


def _kept(path: Path) -> str:
    """The key of an earlier start: clients keep it over a --resume."""
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"{path} can be read by others than you: chmod 600 it, or remove it, and a new key is made")
        return _sound(path.read_text(encoding="utf-8").strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the endpoint's key {path}: {error}; remove it, and a new key is made") from None


def _sound(key: str, where: str) -> str:
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{where} holds no key: want {SHORTEST_KEY} or more printable characters without blanks")
    return key
