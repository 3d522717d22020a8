"""Code of a user's, found by its name: "file.py:Name" or "module:Name". What is wrong with it is one line with file and line.

Must not know tasks or rewards.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from p2p.errors import UsageError
from p2p.verbs import nearest


def load_named(text: str, setting: str) -> Any:
    """What `text` names. `setting` is where a person wrote it, for messages. UsageError when it cannot be had.

    A file's folder can be imported from while the file is, and not afterwards: nothing there is taken for a module of ours.
    """
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name.isidentifier():
        raise UsageError(f"{setting} = {text!r} is not file.py:Name or module:Name")
    module = _from_file(Path(home), setting) if home.endswith(".py") else _from_path(home, setting)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UsageError(f"{setting}: {home} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def absolute_name(text: str) -> str:
    """The same for a process in another folder: the path of a file in full."""
    home, colon, name = text.rpartition(":")
    return f"{Path(home).absolute()}:{name}" if colon and home.endswith(".py") else text


def told(error: BaseException, file: str = "") -> str:
    """What a user's code raised, in one line: the error, and the last line of `file` ("": any file) that it came through."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({error.filename}, line {error.lineno})" if f"line {error.lineno}" not in text else text
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not file or f.filename == file]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def _from_file(path: Path, setting: str) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise UsageError(f"{setting}: no such file: {path}")
    key = f"_shoal_user_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}_{path.stem}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickle look a class's module up
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code: it may raise anything
        del sys.modules[key]
        raise UsageError(f"{setting}: {path} cannot be imported: {told(error, str(path))}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _from_path(home: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name and (home == error.name or home.startswith(error.name + ".")):
            raise UsageError(f"{setting}: no module {home!r} is installed (a file is named file.py:Name)") from None
        raise UsageError(f"{setting}: {home} cannot be imported: {told(error)}") from error
    except Exception as error:  # as above
        raise UsageError(f"{setting}: {home} cannot be imported: {told(error)}") from error
