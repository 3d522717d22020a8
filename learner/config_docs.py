"""What every setting of a learner is, read off the fields of `LearnerConfig`: rows for programs, Markdown for people. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le, MinLen
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from learner.config import LearnerConfig
from learner.section import MAX_SEED, MIN_SEED, Section, item_section

INTRO = """\
# Configuration

<!-- Made by `shoal config docs`, from the fields in learner/config.py and the settings.py of learner's rooms. -->

`shoal learner CONFIG.toml` reads these settings. Each can be given as a flag as well, which wins over the file:
`--rollout.max_staleness 3`. Unknown keys and values out of range are refused, with the file and the key named.
`shoal config explain KEY` says the same of one key, `shoal config init` writes a first file, `shoal config presets` shows the
presets. `shoal learner CONFIG.toml --dry-run` checks the file and the machine, and prints the configuration with all defaults.
"""

REQUIRED = "required"
"""Stands for the default of a key that has none."""

NOTHING = "none"
"""Stands for the default of a key that is not there by default."""

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Any: "any value"}
"""TOML's name of a Python type."""


UNITS_BY_NAME = {
    "_usd_per_hour": "$ an hour", "_usd_per_gb": "$ a GB", "_usd": "$", "_s": "seconds", "_bytes": "bytes", "_mb": "MB",
    "_mbit": "Mbit/s",
}  # fmt: skip
"""End of a key -> its unit."""

COUNTED = re.compile(
    r"(?:Most |Least |Padded |Held-out )?"
    r"(learner steps|optimizer steps|optimizer updates|steps|groups|completions|prompts|tokens|publications|checkpoints|devices|"
    r"sequences|processes|turns|connections|CPU threads|share)\b",
    re.IGNORECASE,
)
"""What a description begins with where the number counts something."""

SHARE_OF = re.compile(r"\bshare (?:of|more)\b")
"""What a description says of a number that is a share."""

PAPER = re.compile(r"(?:([A-Z][\w.]*(?: [A-Z][\w.]*)*),\s+)?arXiv (\d{4}\.\d{4,5})")
"""How a description names a paper, with its short name before it if it has one."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper that a description names."""

    name: str
    """the short name of its method; "" where none is given"""
    number: str
    """on arXiv"""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name, f"https://arxiv.org/abs/{self.number}")))


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration file."""

    key: str
    """dotted, as a flag has it"""
    type: str
    """in words, with its range"""
    default: str
    """as JSON, which for these values is TOML too; REQUIRED where there is none"""
    what: str
    """its description, one paragraph"""
    unit: str = ""
    """what its number counts; "" of a pure number, and of what is no number"""
    papers: tuple[Paper, ...] = ()
    """those that its description names"""
    many: bool = False
    """its table may be there several times"""


@dataclass(frozen=True, slots=True)
class SectionDocs:
    """One table of the configuration file."""

    name: str
    """"" for the keys that stand above all tables"""
    what: str
    """its description, one paragraph"""
    settings: tuple[Setting, ...]
    many: bool = False
    """it may be there several times"""

    @property
    def heading(self) -> str:
        """As a file has it."""
        return f"[[{self.name}]]" if self.many else f"[{self.name}]"


def sections() -> Iterator[SectionDocs]:
    """All tables, in the order of the file."""
    yield SectionDocs("", _paragraph(LearnerConfig.__doc__), tuple(_settings("", LearnerConfig)))
    for name, info in LearnerConfig.model_fields.items():
        if _is_section(info):
            yield from _tables(name, info.annotation)
    for name, info in LearnerConfig.model_fields.items():
        item = item_section(info)
        if item is not None:
            yield SectionDocs(name, _paragraph(item.__doc__), tuple(_settings(f"{name}.", item, many=True)), many=True)


def _tables(name: str, kind: Any) -> Iterator[SectionDocs]:
    """A table, and those in it."""
    yield SectionDocs(name, _paragraph(kind.__doc__), tuple(_settings(f"{name}.", kind)))
    for inner, info in kind.model_fields.items():
        if _is_section(info):
            yield from _tables(f"{name}.{inner}", info.annotation)


def markdown() -> str:
    """docs/configuration.md."""
    lines = [INTRO]
    for section in sections():
        lines += [f"## {section.heading}" if section.name else "## Top level", "", section.what, ""]
        lines += ["| Key | Type | Default | What it is |", "|---|---|---|---|"]
        for one in section.settings:
            default = one.default if one.default in (REQUIRED, NOTHING) else f"`{one.default}`"
            cells = (cell.replace("|", "\\|") for cell in (f"`{one.key}`", one.type, default, one.what))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _settings(prefix: str, section: type[Section], *, many: bool = False) -> Iterator[Setting]:
    for name, info in section.model_fields.items():
        if not _is_section(info) and (prefix or item_section(info) is None):  # a list at the top is a section of its own
            value = None if info.is_required() else info.get_default(call_default_factory=True)
            default = REQUIRED if info.is_required() else NOTHING if value is None else json.dumps(value)
            type, what = _type(info.annotation, info.metadata), _paragraph(info.description)
            papers = tuple(Paper(*found) for found in PAPER.findall(what))
            unit = _unit(name, what) if _is_number(type) else ""
            yield Setting(prefix + name, type, default, what, unit=unit, papers=papers, many=many)


def _is_number(type: str) -> bool:
    return type.startswith(("integer", "number"))


def _unit(name: str, what: str) -> str:
    by_name = next((unit for end, unit in UNITS_BY_NAME.items() if name.endswith(end)), "")
    counted = COUNTED.match(what)
    word = counted[1] if counted else "share" if SHARE_OF.search(what.partition(".")[0]) else ""
    return by_name or ("share (1 is all)" if word.lower() == "share" else word if word[:3] == "CPU" else word.lower())


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, Section)


def _type(kind: Any, bounds: Sequence[Any] = (), s: str = "") -> str:
    """A type in words: "integer ≥ 0, ≤ 64", "list of strings". `s` is the plural's ending."""
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return _type(next(one for one in inner if one is not type(None)), bounds, s)
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"table{s}"
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin is list and any(isinstance(bound, BeforeValidator) for bound in bounds):  # a single item may be its name alone
        return f"string{s}, or list{s} of {_type(inner[0], (), 's')}"
    if origin is list:
        sizes = {bound.min_length if isinstance(bound, MinLen) else bound.max_length for bound in bounds}
        return f"list{s} of {f'{sizes.pop()} ' if len(bounds) == 2 else ''}{_type(inner[0], (), 's')}"
    if origin is dict:
        return f"table{s}" if inner[1] is Any else f"table{s} of {_type(inner[1], (), 's')}"
    if origin in (Union, UnionType):
        return " or ".join(_type(one, (), s) for one in inner)
    if origin is Annotated:
        return _type(inner[0], inner[1].metadata, s)
    if bounds == [Ge(MIN_SEED), Le(MAX_SEED)]:
        return f"integer{s} of 64 bits"
    signs = ("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")
    ranges = [f" {sign} {getattr(bound, name)}" for bound in bounds for name, sign in signs if hasattr(bound, name)]
    return TYPES[kind] + s + ",".join(ranges)


def type_in_words(kind: Any, bounds: Sequence[Any] = ()) -> str:
    """The type of a key of any section, for tables such as these."""
    return _type(kind, bounds)


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())
