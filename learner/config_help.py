"""What `shoal config explain`, `init` and `presets` print: one setting, a first file, and the settings by name. Pure."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from learner.config import LearnerConfig
from learner.config_docs import NOTHING, REQUIRED, Paper, SectionDocs, Setting, sections, type_in_words
from learner.presets import PRESETS, Preset
from learner.section import WrongKey, suggestion
from learner.trainer.objectives.registry import OBJECTIVES
from p2p.errors import UsageError

WIDTH = 78
"""Columns of printed text and of comments in a file that is written: a terminal has 80."""

FIRST: Mapping[str, Any] = {
    "run_dir": "runs/first", "model": "Qwen/Qwen3-0.6B", "task.name": "reasoning_gym:chain_sum",
    "task.system_prompt": "Put your final answer between <answer> and </answer>.",
    "task.template_options": {"enable_thinking": False}, "rollout.max_staleness": 2,
    "rollout.groups_per_step": 16, "rollout.samples": 16, "rollout.max_new_tokens": 1024,
    "swarm.listen": ["/ip4/0.0.0.0/tcp/4001"],
    "trainer.steps": 500, "trainer.lr": 1e-6,
}  # fmt: skip
"""What a first file sets, and to what."""

OFFERED = {"preset": "dapo", "swarm.announce": ["/ip4/203.0.113.7/tcp/4001"]}
"""What a first file has as a comment: key -> an example."""


def explain(key: str = "") -> list[str]:
    """Lines about a key, about a section or an objective and its keys, or (of "") about all sections. UsageError, with what may
    have been meant, when there is no such key. The last part of a key will do: of all keys that have it."""
    if not key:
        return _overview(list(sections()))
    told = {one.name: _table(one, f'trainer.objective = "{one.name}"') for one in _objectives()}
    told |= {one.name: _table(one, one.heading) for one in sections()}
    return told.get(key) or [line for one in explained(key) for line in _setting(one)]


def explained(key: str = "") -> list[Setting]:
    """The settings that `explain` tells of; of "" all. UsageError as there."""
    tables, objectives = list(sections()), list(_objectives())
    settings = {one.key: one for table in tables for one in table.settings}
    if not key:
        return list(settings.values())
    for table in (*tables, *objectives):
        if table.name == key:
            return list(table.settings)
    if key in settings:
        return [settings[key]]
    options = [one for table in objectives for one in table.settings]
    whole = [one for one in options if one.key == key]
    if whole:
        return whole
    inside = next((one for one in settings.values() if one.type == "table" and key.startswith(one.key + ".")), None)
    if inside is not None:
        return [inside]
    same = [one for one in (*settings.values(), *options) if one.key.split(".")[-1] == key]
    if same:
        return same
    hint = suggestion(LearnerConfig, WrongKey(tuple(key.split(".")), "", unknown=True))
    raise UsageError(f"no setting {key[:80]!r}{hint or ' (shoal config explain lists the sections)'}")


def _objectives() -> Iterator[SectionDocs]:
    """Each objective with its options, which `trainer.objective_options` takes: as sections, so that they are told like those."""
    for name, kind in OBJECTIVES.items():
        papers = (Paper("", kind.paper),) if kind.paper[:1].isdigit() else ()
        options = (
            Setting(
                f"trainer.objective_options.{key}", type_in_words(field.annotation, field.metadata), json.dumps(field.default),
                f'Of the objective "{name}": {" ".join((field.description or "").split())}', papers=papers,
            ) for key, field in kind.model_fields.items()
        )  # fmt: skip
        yield SectionDocs(name, " ".join((kind.__doc__ or "").split()), tuple(options))


def first_file(everything: bool = False) -> str:
    """A commented run.toml: what a first run needs, or with `everything` all keys, those at their defaults as comments."""
    less = "" if everything else "These are the keys that a first run needs, `shoal config init --all` writes all of them. "
    lines = [*_comment(
        f"A run of `shoal learner`. {less}`shoal config explain KEY` tells what one is. `shoal learner THIS_FILE --dry-run` "
        "checks file and machine."
    ), ""]  # fmt: skip
    for table in sections():
        keys = [one for one in table.settings if everything or one.key in FIRST or one.key in OFFERED]
        if not keys:
            continue
        if table.many:
            lines += [*_comment(table.what), *_example(table), ""]
            continue
        if table.name:
            lines += [*(_comment(table.what) if everything else ()), f"[{table.name}]"]
        for one in keys:
            lines += _comment(_head(one) if everything else _short(one.what))
            value = FIRST.get(one.key, OFFERED.get(one.key) if not everything else None)
            text = one.default if value is None else _value(value)
            lines.append(f"{'' if one.key in FIRST else '# '}{one.key.split('.')[-1]} = {text}")
            if everything:
                lines.append("")
        if not everything:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _example(table: SectionDocs) -> list[str]:
    """A table that may be there several times and is there none by default: all of it is a comment, indented."""
    keys = (f"#   {one.key.split('.')[-1]} = {one.default}  ({one.type.replace('`', '')})" for one in table.settings)
    return [f"#   {table.heading}", *keys]


def presets() -> list[str]:
    """Lines about all presets."""
    how = 'Settings by name: preset = "NAME" at the top of the file, or --preset NAME. Keys of the file and flags win.'
    lines = _wrapped(how, "", "")
    for name, preset in PRESETS.items():
        paper = f", https://arxiv.org/abs/{preset.paper}" if preset.paper else ""
        lines += ["", f"{name}: {preset.title}{paper}", *_indented(preset.what)]
        lines += [f"    {key} = {json.dumps(value)}" for key, value in preset.sets.items()]
        lines += ["  Beside the paper:", *(line for text in preset.lacks for line in _indented(text, "  - "))]
    return lines


def _value(value: Any) -> str:
    """As TOML has it: JSON but for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _overview(tables: list[SectionDocs]) -> list[str]:
    lines = ["The settings of a learner, by section (shoal config explain SECTION, or KEY):"]
    for table in tables:
        names = ", ".join(one.key.split(".")[-1] for one in table.settings)
        lines += ["", table.heading if table.name else "at the top", *_indented(table.what), *_indented(names, "    ")]
    return lines


def _table(table: SectionDocs, heading: str) -> list[str]:
    lines = [heading, *_indented(table.what), ""]
    for one in table.settings:
        lines += [_title(one), *_indented(_short(one.what))]
    return [*lines, "", f"shoal config explain {table.settings[0].key} says all of one key."]


def _setting(one: Setting) -> list[str]:
    section, _, name = one.key.rpartition(".")
    if one.many:
        head = [_title(one), *_indented(one.what), *(f"  paper: {paper}" for paper in one.papers)]
        value = "..." if one.default in (REQUIRED, NOTHING) else one.default
        pair = f"{name} = {value}"
        return [*head, f"  in the file: [[{section}]]  {pair}", f"  as a flag: --{section} '[{{{pair}, ...}}]'"]
    value = one.default if one.default != REQUIRED else json.dumps(FIRST[one.key])
    lines = [_title(one), *_indented(one.what)]
    lines += [f"  paper: {paper}" for paper in one.papers]
    lines += [f"  preset {name}: {json.dumps(p.sets[one.key])}" for name, p in _presets_of(one.key)]
    where = f"[{section}]  " if section else ""
    return [*lines, f"  in the file: {where}{name} = {value}", f"  as a flag: --{one.key} {_quoted(value)}"]


def _presets_of(key: str) -> Iterator[tuple[str, Preset]]:
    return ((name, preset) for name, preset in PRESETS.items() if key in preset.sets)


def _quoted(value: str) -> str:
    """For a shell."""
    if value.startswith('"'):
        return value.strip('"') if re.fullmatch(r'"[\w./:-]+"', value) else f"'{value}'"
    return value if re.fullmatch(r"[\w.-]+", value) else f"'{value}'"


def _title(one: Setting) -> str:
    default = "required" if one.default == REQUIRED else f"default {one.default}"
    return ", ".join(filter(None, (f"{one.key}: {one.type.replace('`', '')}", one.unit and f"unit: {one.unit}", default)))


def _head(one: Setting) -> str:
    return f"{one.what} ({', '.join(filter(None, (one.type.replace('`', ''), one.unit)))})"


def _short(what: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=\.)(?<!Dr\.)\s", what)[0]


def _comment(text: str) -> list[str]:
    return _wrapped(text, "# ", "# ")


def _indented(text: str, first: str = "  ") -> list[str]:
    return _wrapped(text, first, " " * len(first))


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
