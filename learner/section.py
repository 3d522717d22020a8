"""What every file of settings shares: strict sections, TOML in and out, and errors of one line. Must not know any setting."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from p2p.errors import UsageError


class Section(BaseModel):
    """A table of settings. Unknown keys, wrong types, NaN and infinity are refused, and nothing is converted silently.

    The string under a field is its description: `learner.config_docs` prints it.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


AnySection = TypeVar("AnySection", bound=Section)


def check_section(
    kind: type[AnySection], values: Mapping[str, Any], source: str, *, unknown: str = "unknown key",
    leave_out: Collection[str] = (),
) -> AnySection:  # fmt: skip
    """`values` as a section. UsageError, one line, names `source`, the first wrong key and what is wrong with it.

    `unknown` is what is said of a key that the section does not have; `leave_out` are parts of a key that the file does not have
    (pydantic adds the tag of a union to the path).
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part not in leave_out)
        own = first["type"] == "value_error"  # raised by a validator of ours
        said = first["msg"].removeprefix("Value error, ") if own else first["msg"][:1].lower() + first["msg"][1:]
        what = unknown if first["type"] == "extra_forbidden" else said
        raise UsageError(": ".join(filter(None, (source, key, what)))) from None


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The values in a TOML file. UsageError, one line, when there is no such file or it is not TOML; `what` is the kind of file,
    for the message."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such {what}: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def dump_toml(values: Mapping[str, Any]) -> str:
    """Nested dictionaries of plain values as TOML."""
    return tomli_w.dumps(values)
