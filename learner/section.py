"""What every file of settings shares: strict sections, TOML in and out, and problems of one line. Must not know any setting."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from p2p.errors import UsageError
from p2p.verbs import meant

MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
"""Seeds are signed 64-bit integers: every random generator that we use takes those."""

Seed = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]


class Section(BaseModel):
    """A table of settings. Unknown keys, wrong types, NaN and infinity are refused, and nothing is converted silently.

    The string under a field is its description: `learner.config_docs` prints it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    moved: ClassVar[Mapping[str, str]] = {}
    """Dotted keys that were settings once -> what is there now, for the complaint about one."""


ALIKE = 0.75
"""Share of two names of settings that must be alike for one to be taken for the other (difflib's ratio): "sede" has it of "seed",
"lrr" 0.8 of "lr". With 0.6, difflib's default, "colour" would be "rollout"."""

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know of settings before they are used: a problem, or a note."""

    what: str
    """one line, which names the settings; of a problem it says what to do"""
    keys: tuple[str, ...] = ()
    """the settings that it follows from: where one of them is wrong anyway, this is not said"""


@dataclass(frozen=True, slots=True)
class WrongKey:
    """A key that is not accepted."""

    path: tuple[str, ...]
    """the key's parts; a number of a list's item may be the last"""
    what: str
    """what is wrong with it"""
    unknown: bool = False
    """the section has no such key"""
    missing: bool = False
    """the section must have it, and it is not there"""
    together: bool = False
    """a validator of ours refused a table: its keys, which may come from several places, do not go together"""

    @property
    def key(self) -> str:
        return ".".join(self.path)


def wrong_keys(
    kind: type[Section], values: Mapping[str, Any], *, unknown: str = "unknown key", leave_out: Collection[str] = ()
) -> list[WrongKey]:
    """Every key of `values` that keeps it from being a section; none when it is one. The parameters are those of
    `check_section`."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        return [_wrong(found, unknown, leave_out) for found in error.errors()]
    return []


def check_section(
    kind: type[AnySection], values: Mapping[str, Any], source: str, *, unknown: str = "unknown key",
    leave_out: Collection[str] = (),
) -> AnySection:  # fmt: skip
    """`values` as a section. UsageError, one line for each wrong key, names `source`, the key, what is wrong with it, and for an
    unknown key the one that was probably meant.

    `unknown` is what is said of a key that the section does not have; `leave_out` are parts of a key that the file does not have
    (pydantic adds the tag of a union to the path).
    """
    found = wrong_keys(kind, values, unknown=unknown, leave_out=leave_out)
    if found:
        raise UsageError(*(": ".join(filter(None, (source, w.key, w.what + suggestion(kind, w)))) for w in found))
    return kind.model_validate(values)


def suggestion(kind: type[Section], wrong: WrongKey, dash: str = "") -> str:
    """The end of a complaint about an unknown key of a section of this kind: "; did you mean rollout.samples?", of one that was
    moved "; it is now ...", or "" when nothing is near. `dash` stands before the key that was meant: "--" of a flag."""
    if wrong.unknown and wrong.key in kind.moved:
        return f"; it is now {kind.moved[wrong.key]}"
    near = meant_key(kind, wrong.key) if wrong.unknown else ""
    return f"; did you mean {dash}{near}?" if near else ""


def meant_key(kind: type[Section], key: str) -> str:
    """The key, or the section, that a person who wrote `key` may have meant; "" when nothing is near.

    First the same name in another section, then one whose description begins with these words ("learning_rate"), then a like name
    in the same section, then one anywhere.
    """
    known = dict(_fields(kind))
    key = ".".join(part for part in key.split(".") if not part.isdigit())  # of an item of a list
    section, _, name = key.rpartition(".")
    if section and section not in known:
        near = meant_key(kind, section)
        return next((k for k in (f"{near}.{name}", near) if k in known), "")
    homes = [k for k in known if k.split(".")[-1] == name]
    words = set(name.lower().split("_"))
    said = [k for k, field in known.items() if words <= set((field.description or "").partition(".")[0].lower().split())]
    if len(homes) == 1 or (len(words) > 1 and said):
        return (homes or said)[0]
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    anywhere = {k.rpartition(".")[2]: k for k in known}
    return next((names[found] for names in (beside, anywhere) if (found := meant(name, names, ALIKE))), "")


def _fields(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field, also of the sections inside, by dotted key."""
    for name, field in kind.model_fields.items():
        yield prefix + name, field
        inner = inner_section(field) or item_section(field)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def inner_section(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, or may be; None for a plain key."""
    kind = next((one for one in get_args(field.annotation) if type(None) in get_args(field.annotation)), field.annotation)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def item_section(field: FieldInfo) -> type[Section] | None:
    """The section that each item of a field is, of a table that may be there several times; None for any other field."""
    inner = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    return inner[0] if inner and isinstance(inner[0], type) and issubclass(inner[0], Section) else None


def _wrong(found: Any, unknown: str, leave_out: Collection[str]) -> WrongKey:
    """`found`: pydantic's record of one error."""
    path = tuple(str(part) for part in found["loc"] if part not in leave_out)
    kind, said = found["type"], found["msg"]
    in_list = any(isinstance(part, int) for part in found["loc"])  # replaced as a whole: no other place has keys of an item
    if kind == "extra_forbidden":
        return WrongKey(path, unknown, unknown=True)
    if kind == "missing":
        return WrongKey(path, "is required", missing=not in_list)
    if kind == "value_error":  # raised by a validator of ours
        return WrongKey(path, said.removeprefix("Value error, "), together=isinstance(found["input"], Mapping) and not in_list)
    if kind == "model_type":
        return WrongKey(path, f"is a section of settings, not {_told(found['input'])}")
    what = said[:1].lower() + said[1:]
    if kind == "literal_error":
        choices = [word.strip("' ") for word in found["ctx"]["expected"].replace(" or ", ",").split(",")]
        near = meant(str(found["input"]), choices)
        what += f"; did you mean {near!r}?" if near else ""
    elif kind in _TYPE_ERRORS:
        what += f", not {_told(found['input'])}"
    return WrongKey(path, what)


_TYPE_ERRORS = {"int_type", "float_type", "bool_type", "string_type", "list_type", "dict_type", "int_from_float"}
"""pydantic's names of errors about a value's type: only these messages need the value that was there."""


LONGEST_TOLD = 40
"""Characters of a wrong value that a message repeats; of a longer one it names the type. Half a line of a terminal."""


def _told(value: object) -> str:
    """A wrong value for a message, bounded."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"a {type(value).__name__}" if isinstance(value, dict) or len(text) > LONGEST_TOLD else text


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
