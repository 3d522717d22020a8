"""Keys of a scenario, by name: what is not known is told as a key, with the nearest that is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from learner.section import Section
from p2p.errors import UsageError
from p2p.verbs import meant


def check_keys(kind: type[Section], values: Mapping[str, Any], source: str, hints: Mapping[str, str]) -> None:
    """UsageError, one line, for the first key of `values` that the section has not, and for a value where a table belongs. It
    names `source`, the dotted key (items of a list by number) and the key that was probably meant. `hints`: what to say of a
    table, by its key."""
    for path, wrong in _unknown(kind, values, ()):
        key = ".".join(path)
        if wrong is not None:
            hint = hints.get(key, f"write it as [{key}]")
            raise UsageError(f"{source}: {key}: is a table of settings, not {wrong!r:.40}: {hint}")
        raise UsageError(f"{source}: {key}: unknown key{suggestion(kind, path)}")


def suggestion(kind: type[Section], path: tuple[str, ...]) -> str:
    """The end of a complaint about an unknown key: "; did you mean learner.train_s?", or "" when nothing is near. First the
    same name in another table, then what is like it in its own, then what is like it anywhere."""
    known = dict(keys_of(kind))
    home = ".".join(part for part in path[:-1] if not part.isdigit())
    beside = [key for key, where in known.items() if where == home]
    names = {key.rpartition(".")[2]: key for key in [*reversed(known), *beside]}  # the own table's come last, and win
    own = {key.rpartition(".")[2]: key for key in beside}
    if path[-1] in names:
        return f"; did you mean {names[path[-1]]}?"
    for choice in (own, names):
        if found := meant(path[-1], choice):
            return f"; did you mean {choice[found]}?"
    return ""


def nearest_column(kind: type[Section], name: str) -> str:
    """As `suggestion`, for a column of a CSV whose rows are such sections."""
    found = meant(name, kind.model_fields)
    return f"; did you mean {found}?" if found else f"; columns are {', '.join(kind.model_fields)}"


def keys_of(kind: type[Section], home: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, the table that it stands in) of every key, tables and those in lists of tables too."""
    for name, info in kind.model_fields.items():
        key = f"{home}.{name}" if home else name
        yield key, home
        inner = inner_of(info)
        if inner is not None:
            yield from keys_of(inner, key)


def inner_of(info: FieldInfo) -> type[Section] | None:
    """The section that a field is, or is a list of; None for a plain key."""
    kind = info.annotation
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _unknown(kind: type[Section], values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, None) of unknown keys, (path, value) where a table belongs and something else stands."""
    for name, value in values.items():
        here = (*path, name)
        info = kind.model_fields.get(name)
        inner = inner_of(info) if info is not None else None
        if info is None:
            yield here, None
        elif inner is not None and get_origin(info.annotation) is list:
            for i, item in enumerate(value if isinstance(value, list) else ()):
                if isinstance(item, Mapping):
                    yield from _unknown(inner, item, (*here, str(i)))
        elif inner is not None and isinstance(value, Mapping):
            yield from _unknown(inner, value, here)
        elif inner is not None and not isinstance(value, Section):
            yield here, value
