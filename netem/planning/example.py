"""A first scenario and its fleet, to start from: `shoal plan --example`, `shoal simulate --example`. Texts are made from the
fields themselves, so every key is in them, with what it is. Pure but for `write_example`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from learner.section import Section, dump_toml
from netem.planning.cost_scenario import File
from netem.planning.keys import inner_of
from netem.planning.priced_fleet import NodeKind
from p2p.errors import UsageError
from p2p.files import write_whole

SCENARIO, FLEET = "scenario.toml", "fleet.csv"
"""Names of the two files."""

LISTS = ("cases", "systems", "published", "assumptions")
"""Tables of a preset, which a scenario of one's own does without."""

GIVEN: Mapping[str, Mapping[str, Any]] = {
    "": {"name": "example", "what": "an 8B model on rented consumer GPUs", "steps": 24},
    "fleet": {"file": FLEET},
    "learner": {"train_s": 110.0, "groups": 32, "samples": 8, "usd_per_hour": 8.0, "up_mbit": 500.0},
    "lengths": {"median": 1500.0, "most": 8192},
    "policy": {"staleness": 3},
    "activation": {"max_usd_per_hour": 10.0},
}
"""Section -> the keys that the example sets. Everything else stands in it as a comment, with its default."""

ROWS: tuple[Mapping[str, Any], ...] = (
    {"kind": "RTX4090", "count": 12, "usd_per_hour": 0.35, "gpu": "RTX4090", "down_mbit": 300, "up_mbit": 50,
     "availability": "exponential 18000 3600"},
    {"kind": "L40S", "count": 4, "usd_per_hour": 0.8, "gpu": "L40S"},
    {"kind": "lab", "count": 2, "usd_per_hour": 0.0, "tokens_per_s": 900, "sequences": 48, "down_mbit": 100, "up_mbit": 20},
)  # fmt: skip
"""The example's fleet: two kinds by data sheet, of which one comes and goes, and one of which somebody measured the speed."""

STEP_S = 120
"""Seconds of a step that the example's plan is asked for: about what its learner takes."""


def scenario_text() -> str:
    """The scenario's TOML: what is set, and every other key as a comment with its default."""
    lines = [
        f"# A scenario for `shoal simulate {SCENARIO}` and `shoal plan {FLEET} --step-time {STEP_S} --scenario {SCENARIO}`.",
        "# A key behind a # has the default that it shows. docs/costs.md has the same in a table.", "",
        *_keys(File, GIVEN[""]),
    ]  # fmt: skip
    for name, info in File.model_fields.items():
        inner = inner_of(info)
        if inner is None or name in LISTS:
            continue
        lines += ["", f"# {_sentence(info.description or inner.__doc__)}", f"[{name}]", *_keys(inner, GIVEN.get(name, {}))]
        if name == "fleet":
            lines += ["# Instead of a CSV, one [[fleet.nodes]] table for each kind, whose keys are the CSV's columns."]
    return "\n".join(lines) + "\n"


def fleet_text() -> str:
    """The fleet's CSV: one row a kind of node, after what each column is."""
    columns = [name for name in NodeKind.model_fields if any(name in row for row in ROWS)]
    others = [name for name in NodeKind.model_fields if name not in columns]
    lines = ["# One row for each kind of node. An empty cell is the default. Give gpu or tokens_per_s, one of them."]
    lines += [f"# {name}: {_sentence(NodeKind.model_fields[name].description)}" for name in (*columns, *others)]
    cells = (",".join("" if row.get(name) is None else str(row[name]) for name in columns) for row in ROWS)
    return "\n".join([*lines, ",".join(columns), *cells]) + "\n"


def write_example(folder: Path) -> list[Path]:
    """Both files in `folder`, which is made. UsageError, and nothing written, when one of them is there."""
    if folder.suffix in (".toml", ".csv"):
        raise UsageError(f"--example {folder}: name a folder; the files in it will be {SCENARIO} and {FLEET}")
    paths = [folder / SCENARIO, folder / FLEET]
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} is there already: remove it, or name another folder (--example FOLDER)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{folder} is a file: name a folder for the example") from None
    for path, text in zip(paths, (scenario_text(), fleet_text()), strict=True):
        write_whole(path, text)
    return paths


def _keys(kind: type[Section], given: Mapping[str, Any]) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        if inner_of(info) is not None:
            continue
        default = info.get_default(call_default_factory=True)
        value = given.get(name, default)
        if value is None or value is PydanticUndefined:
            continue
        yield f"# {_sentence(info.description)}"
        yield ("" if name in given else "# ") + dump_toml({name: value}).strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())
