"""Settings that come from several places, the later over the earlier: which key is wrong, and where it was read.

A file, then flags. Pure. Must not know any setting.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, get_origin

from learner.section import ALIKE, AnySection, Section, WrongKey, inner_section, suggestion, wrong_keys
from p2p.errors import UsageError
from p2p.verbs import meant


@dataclass(frozen=True, slots=True)
class Layer:
    """What one place says."""

    source: str
    """the file, for messages; "" of flags"""
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stacked(Generic[AnySection]):
    """All layers over each other."""

    section: AnySection
    """the wrong keys have their defaults in it, and those that are required and not there the stand-ins"""
    problems: tuple[str, ...]
    """one line each"""
    wrong: frozenset[str]
    """keys that are wrong or not there: nothing can be said about their values"""


def stack(
    kind: type[AnySection], layers: Sequence[Layer], stand_ins: Mapping[str, Any], *, below: Mapping[str, Any], source: str,
    other_flags: Collection[str] = (),
) -> Stacked[AnySection]:  # fmt: skip
    """`layers` over each other, the last one wins; `below` lies under all of them and is known to be right.

    `stand_ins` are values for required keys, `source` is the file to blame for those that are not there, `other_flags` are flags
    of the command line that are no settings: a person may have meant one.
    """
    problems, wrong = list[str](), set[str]()
    found = [[w for w in wrong_keys(kind, layer.values) if not w.together] for layer in layers]
    right_flags = {
        key for layer, its in zip(layers, found, strict=True) if not layer.source for key in _leaves(layer.values)
        if not any(_covers(w.key, key) or _covers(key, w.key) for w in its)
    }  # fmt: skip
    merged = dict(below)
    for layer, its in zip(layers, found, strict=True):
        told = [w for w in its if not w.missing]
        if layer.source:  # what a flag replaces does no harm, but a key that does not exist is a mistake all the same
            told = [w for w in told if w.unknown or not any(_covers(key, w.key) for key in right_flags)]
        problems += [_line(kind, layer, w, other_flags) for w in told]
        wrong |= {w.key for w in told}
        merged = merge(merged, _without(layer.values, [w.path for w in its if not w.missing]))
    missing = [w for w in wrong_keys(kind, merged) if w.missing]
    for w in missing:
        if not any(_covers(key, w.key) for key in wrong):
            problems.append(": ".join(filter(None, (source, f"{w.key} {w.what}"))))
    wrong |= {w.key for w in missing}
    merged = merge(merged, {w.key: stand_ins[w.key] for w in missing})
    together = {w.key for w in wrong_keys(kind, reduce(merge, (layer.values for layer in layers), below)) if w.together}
    while its := wrong_keys(kind, merged):
        # A key that was fine in its layer may only follow from one that was taken out as wrong: that is not said.
        problems += [_joint_line(layers, w) for w in its if w.key in together or not problems]
        wrong |= {key for w in its for key in (w.key, *(leaf for leaf in _leaves(merged) if _covers(w.key, leaf)))}
        merged = _without(merged, [w.path for w in its])
    return Stacked(kind.model_validate(merged), tuple(problems), frozenset(wrong))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables; where both have a key, the tables there are merged, and of other values `over`'s is taken."""
    merged = dict(under)
    for key, value in over.items():
        mine = merged.get(key)
        merged[key] = merge(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_flags(kind: type[Section], flags: Sequence[str], other_flags: Collection[str] = ()) -> Layer:
    """`--section.key value` and `--section.key=value` as a layer. UsageError for what cannot be read so."""
    values: dict[str, Any] = {}
    items = list(flags)
    while items:
        flag = items.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise UsageError(f"unexpected argument {flag!r} (settings are given as --section.key VALUE)")
        name, equals, text = flag[2:].partition("=")
        path = tuple(name.replace("-", "_").split("."))
        if not equals:
            if not items:
                unknown = wrong_keys(kind, _nested(path, ""))
                near = next((_near(kind, w, other_flags) for w in unknown if w.unknown), "")
                raise UsageError(f"--{name}: no such setting{near}" if near else f"--{name} needs a value")
            text = items.pop(0)
        _check_sections(kind, path)
        values = merge(values, _nested(path, _parse(text)))
    return Layer("", values)


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def _parse(text: str) -> Any:
    """A flag's value as TOML would read it; text when it is not TOML."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _check_sections(kind: type[Section], path: Sequence[str]) -> None:
    """UsageError when a part of a flag's key that others follow can hold none."""
    for i, name in enumerate(path[:-1]):
        field = kind.model_fields.get(name)
        if field is None:
            return
        inner = inner_section(field)
        if inner is None:
            if get_origin(field.annotation) is dict:
                return
            raise UsageError(f"--{'.'.join(path)}: {'.'.join(path[: i + 1])} is not a section")
        kind = inner


def _line(kind: type[Section], layer: Layer, wrong: WrongKey, other_flags: Collection[str]) -> str:
    if layer.source:
        return f"{layer.source}: {wrong.key}: {wrong.what}{suggestion(kind, wrong)}"
    what = "no such setting" if wrong.unknown else wrong.what
    return f"--{wrong.key}: {what}{_near(kind, wrong, other_flags)}"


def _joint_line(layers: Sequence[Layer], wrong: WrongKey) -> str:
    """Of keys that do not go together. Names the file only where all of them are there."""
    homes = {layer.source for layer in layers if any(_covers(wrong.key, key) for key in _leaves(layer.values))}
    source = homes.pop() if len(homes) == 1 else ""
    return ": ".join(filter(None, (source, wrong.key, wrong.what)))


def _near(kind: type[Section], wrong: WrongKey, other_flags: Collection[str]) -> str:
    if wrong.unknown and "." not in wrong.key:
        ours = (name for name, field in kind.model_fields.items() if inner_section(field) is None)
        other = meant(wrong.key.replace("_", "-"), [*(flag.lstrip("-") for flag in other_flags), *ours], ALIKE)
        if other:
            return f"; did you mean --{other}?"
    return suggestion(kind, wrong, "--")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of everything that is no table."""
    return [
        key for name, value in values.items()
        for key in (_leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [prefix + name])
    ]  # fmt: skip


def _covers(outer: str, inner: str) -> bool:
    """Whether `inner` is the key `outer`, or lies in it."""
    return inner == outer or inner.startswith(outer + ".")


def _without(values: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The table without these keys. Of a wrong item of a list, the whole list goes."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner = [path[1:] for path in paths if path[0] == name]
        if not inner:
            kept[name] = value
        elif isinstance(value, Mapping) and all(inner):
            kept[name] = _without(value, inner)
    return kept
