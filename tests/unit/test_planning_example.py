"""What a person types first: the example that is written, the keys that are guessed wrong, the docs of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.section import dump_toml
from netem.planning.assumed import assumed
from netem.planning.cost_scenario import File, build_scenario, load_scenario
from netem.planning.example import FLEET, SCENARIO, STEP_S, scenario_text, write_example
from netem.planning.field_docs import markdown, written_anew
from netem.planning.keys import keys_of
from netem.planning.plan import plan, scenario_of_fleet, with_fleet
from netem.planning.priced_fleet import NodeKind, rows_of_csv
from netem.planning.runner import run_once
from p2p.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "costs.md"
NODE: dict[str, Any] = {"kind": "a", "usd_per_hour": 1.0, "tokens_per_s": 100.0}


def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    scenario_file, fleet_file = write_example(tmp_path / "new" / "folder")
    assert (scenario_file.name, fleet_file.name) == (SCENARIO, FLEET)
    scenario = load_scenario(scenario_file)
    assert plan(with_fleet(scenario, fleet_file), STEP_S)["ok"]
    assert not plan(scenario_of_fleet(fleet_file, {}), STEP_S)["ok"]  # as it is: 2,048 completions are too many for it
    result = run_once(scenario.changed({"steps": 3, "warm": 1}))
    assert result.usd_nodes > 0 and set(result.kinds) == {"RTX4090", "L40S", "lab"}


def test_every_key_is_in_the_example_with_its_default(tmp_path: Path) -> None:
    write_example(tmp_path)
    lines = scenario_text().splitlines()
    all_set = [line[2:] if line.startswith("# ") and " = " in line and line[2:].split(" = ")[0].isidentifier() else line
               for line in lines]  # fmt: skip
    file = tmp_path / "all.toml"
    file.write_text("\n".join(all_set))
    assert load_scenario(file).file == load_scenario(tmp_path / SCENARIO).file
    preset_only = ("nodes", "cases", "systems", "published", "assumptions")
    for key, _ in keys_of(File):
        name = key.rpartition(".")[2]
        if not set(key.split(".")) & set(preset_only):
            assert f"[{key}]" in lines or any(line.startswith((f"{name} = ", f"# {name} = ")) for line in lines), key
    columns = (tmp_path / FLEET).read_text()
    assert all(f"# {name}: " in columns for name in NodeKind.model_fields)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / FLEET).write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        write_example(tmp_path)
    assert not (tmp_path / SCENARIO).exists() and (tmp_path / FLEET).read_text() == "mine"
    (tmp_path / "file").touch()
    for name, said in (("my.csv", "name a folder"), ("file", "is a file")):
        with pytest.raises(UsageError, match=said):
            write_example(tmp_path / name)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"learner": {"tarin_s": 3.0}}, "x.toml: learner.tarin_s: unknown key; did you mean learner.train_s?"),
        ({"learner": {"staleness": 3}}, "x.toml: learner.staleness: unknown key; did you mean policy.staleness?"),
        ({"step": 3}, "x.toml: step: unknown key; did you mean steps?"),
        ({"nodes": [NODE]}, "x.toml: nodes: unknown key; did you mean fleet.nodes?"),
        ({"fleet": {"csv": "a.csv"}}, "x.toml: fleet.csv: unknown key"),
        ({"fleet": {"nodes": [NODE, {**NODE, "kind": "b", "usd_per_hr": 2}]}},
         "x.toml: fleet.nodes.1.usd_per_hr: unknown key; did you mean fleet.nodes.usd_per_hour?"),
        ({"fleet": "a.csv"}, 'x.toml: fleet: is a table of settings, not \'a.csv\': a scenario names its CSV so: [fleet], and '
         'below it file = "FLEET.csv"'),
        ({"model": "Qwen3-8B"}, "x.toml: model: is a table of settings, not 'Qwen3-8B': write it as [model]"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_file_and_the_nearest(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        build_scenario(values, "x.toml", Path())
    assert str(error.value) == said


def test_an_unknown_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    for column, said in (("usd_hour", "did you mean usd_per_hour?"), ("zzz", "columns are kind, count, usd_per_hour, ")):
        file.write_text(f"kind,{column},tokens_per_s\na,3,1\n")
        with pytest.raises(UsageError) as error:
            rows_of_csv(file)
        assert str(error.value).startswith(f"fleet {file}: {column}: unknown column; {said}")


def test_the_answer_says_what_was_assumed_and_what_nobody_gave(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("kind,usd_per_hour,tokens_per_s\na,3,100\n")
    rows = plan(scenario_of_fleet(tmp_path / "f.csv", {"learner": {"samples": 4}}), 100.0)["assumed"]
    assert rows[0]["what"] == "a step trains on 128 groups of 4 completions, 512 in all"
    assert rows[0]["default"] == ["learner.groups"]
    assert "2,600 tokens in the median" in rows[1]["what"] and rows[1]["default"] == rows[1]["keys"]
    assert all(key in dict(keys_of(File)) for row in rows for key in row["keys"])
    given = dump_toml({"lengths": {"median": 900.0, "most": 9000, "prompt": 5}, "fleet": {"nodes": [NODE]}})
    (tmp_path / "s.toml").write_text(given)
    assert assumed(load_scenario(tmp_path / "s.toml"))[1]["default"] == []


def test_the_page_has_every_key_as_it_is_now() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written_anew(page) == page, "make it anew: python -m netem.planning.field_docs docs/costs.md"
    assert all(f"| `{key.rpartition('.')[2]}` |" in markdown() or f"[{key}]" in markdown() for key, _ in keys_of(File)
               if key != "fleet.nodes")  # fmt: skip
    for row in (line for line in markdown().splitlines() if line.startswith("| `")):
        assert row.rstrip(" |").endswith("."), row
