"""`shoal config explain`, `init` and `presets`: what a person reads about settings, and that it is true of them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import shoal
from learner.config import LearnerConfig, build_config, load_config, resolved
from learner.config_docs import Setting, sections
from learner.config_help import WIDTH, explain, explained, first_file, presets
from learner.presets import PRESETS, PresetName
from learner.section import meant_key
from learner.trainer.objectives.registry import OBJECTIVES
from p2p.errors import UsageError

Out = pytest.CaptureFixture[str]

BASE = 'run_dir = "r"\nmodel = "m"\n'
SETTINGS = {one.key: one for section in sections() for one in section.settings}

UNITLESS = {
    "audit.false_alarm",
    "seed", "task.seed", "rollout.temperature", "rollout.top_p", "status.port", "trainer.lr", "trainer.weight_decay",
    "eval.temperature", "eval.top_p",
    "trainer.grad_clip", "trainer.kl_coef", "trainer.entropy_coef", "trainer.seed",
    "trainer.lora.rank", "trainer.lora.alpha",
}  # fmt: skip
"""Numbers that count nothing."""


def shoal_config(*argv: str) -> int:
    try:
        return shoal.main(["config", *argv])
    except SystemExit as leaving:
        return int(leaving.code or 0)


# --- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.key)
def test_every_setting_is_explained(setting: Setting) -> None:
    text = " ".join(" ".join(explain(setting.key)).split())
    flag = f"--{setting.key}" if not setting.many else f"--{setting.key.split('.')[0]} '[{{"
    assert setting.key in text and setting.what in text and flag in text
    assert all(paper.number in text for paper in setting.papers)
    number = setting.type.startswith(("integer", "number"))
    assert bool(setting.unit) == (number and setting.key not in UNITLESS), setting


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.kl_coef", ("number ≥ 0", "default 0.0", "preset grpo: 0.04")),
        ("trainer.aggregate", ('default "token"', "DAPO, https://arxiv.org/abs/2503.14476", 'preset gepo: "sequence"')),
        ("lr", ("trainer.lr", "default 0.0003")),
        ("rollout.stall_s", ("unit: seconds", "default 120.0")),
        ("activation.budget_usd", ("unit: $,",)),
        ("activation.margin", ("unit: share (1 is all)",)),
        ("rollout.max_staleness", ("unit: learner steps",)),
        ("model", ("required", 'model = "')),
        ("task.options.digits", ("task.options", "Options of the task")),
        ("seed", ("Seed of the run",)),
        ("clip_high", ('Of the objective "grpo": The ratio', "default 0.0004", "arxiv.org/abs/2507.18071")),
        ("trainer.objective_options.high", ("number > 0, default 5.0", "[trainer.objective_options]  high = 5.0", '"masked"')),
        ("trainer.objective_options", ("default {}", "docs/objectives.md")),
        ("trainer.objective_options.x", ("trainer.objective_options: table",)),
        ("eval", ("[[eval]]", "eval.every")),
        ("rollout", ("[rollout]", "rollout.samples", "default 16")),
        ("", ("[trainer]", "max_staleness", "at the top")),
    ],
)
def test_what_an_explanation_says(key: str, words: tuple[str, ...]) -> None:
    text = "\n".join(explain(key))
    assert all(word in text for word in words), text
    assert max(map(len, text.splitlines())) <= WIDTH or "flag" in text or "default" in text


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_explained_with_its_options(name: str) -> None:
    lines = explain(name)
    assert lines[0] == f'trainer.objective = "{name}"' and "Loss: " in "\n".join(lines)
    assert [one.key.split(".")[-1] for one in explained(name)] == list(OBJECTIVES[name].model_fields)
    assert all(f'Of the objective "{name}": ' in one.what and one.default for one in explained(name))


def test_the_commands_of_the_quickstart_run(tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(shoal.__file__).parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    shoal config ([^#\n]+)", text, re.MULTILINE)
    assert len(commands) >= 2
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert shoal_config(*command.split()) == 0, command
        assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trainer.lrr", "trainer.lr"),
        ("rollout.staleness", "rollout.max_staleness"),
        ("learning_rate", "trainer.lr"),
        ("trainer.learning_rate", "trainer.lr"),
        ("rollout.lr", "trainer.lr"),
        ("trainr.lr", "trainer.lr"),
        ("trainr", "trainer"),
        ("modle", "model"),
        ("max_stalenes", "rollout.max_staleness"),
        ("eval.promts", "eval.prompts"),
        ("colour", ""),
        ("", ""),
        ("a.b.c.d", ""),
    ],
)
def test_a_near_miss_is_answered_with_what_was_meant(typed: str, meant: str) -> None:
    assert meant_key(LearnerConfig, typed) == meant
    if typed:
        with pytest.raises(UsageError, match=re.escape(meant or "lists the sections")):
            explain(typed)


def test_explanations_as_json(capsys: Out) -> None:
    assert shoal_config("explain", "trainer.overlong", "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["settings"]
    assert (one["key"], one["default"]) == ("trainer.overlong", '"train"')
    assert one["papers"] == [{"name": "DAPO", "number": "2503.14476"}]
    assert {one.key for one in explained("swarm")} == {key for key in SETTINGS if key.startswith("swarm.")}
    assert [one.key for one in explained()] == list(SETTINGS), "all sections"
    assert [one.key for one in explained("seed")] == ["seed"], "as the text, which tells of no other section's"
    assert shoal_config("explain", "trainer.lrr") == 2
    assert "trainer.lr?" in capsys.readouterr().err
    assert shoal_config("explain", "trainer.tis_cap") == 2
    assert "it is now trainer.objective_options.cap" in capsys.readouterr().err


# --- init ------------------------------------------------------------------------------------------------------------


def test_a_first_file_loads_and_is_small(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "run.toml"
    assert shoal_config("init", str(path)) == 0
    assert "--dry-run" in capsys.readouterr().out
    config = load_config(path)
    assert config.trainer.lr == 1e-6 and config.swarm.listen == ["/ip4/0.0.0.0/tcp/4001"]
    text = path.read_text()
    assert len(text.splitlines()) < 50 and max(map(len, text.splitlines())) <= WIDTH
    path.write_text("mine")
    assert shoal_config("init", str(path)) == 2
    assert "is there already" in capsys.readouterr().err and path.read_text() == "mine"
    assert shoal_config("init", str(tmp_path / "no" / "run.toml")) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_file_of_everything_has_every_key_at_its_default(tmp_path: Path) -> None:
    text = first_file(everything=True)
    path = tmp_path / "all.toml"
    path.write_text(text)
    small = tomllib.loads(first_file())
    assert tomllib.loads(text)["trainer"] == small["trainer"] | {"lora": {}} and load_config(path) == build_config(small, "small")
    every = "".join(re.sub(r"^# (?=\w+ = )", "", line) + "\n" for line in text.splitlines())
    values = tomllib.loads(every)
    for setting in SETTINGS.values():
        if setting.many:
            assert f"#   [[{setting.key.split('.')[0]}]]\n" in text and f"#   {setting.key.split('.')[1]} = " in text
            continue
        *section, name = setting.key.split(".")
        table = values
        for part in section:
            table = table[part]
        assert name in table, setting.key
    assert build_config(values, "everything") == build_config(small, "small")


# --- presets ---------------------------------------------------------------------------------------------------------


def test_every_preset_can_be_had_and_says_what_it_sets() -> None:
    assert {"", *PRESETS} == set(get_args(PresetName))
    text = "\n".join(presets())
    for name, preset in PRESETS.items():
        values = build_config({"run_dir": "r", "model": "m", "preset": name}, "here").model_dump()
        for key, value in preset.sets.items():
            section, last = key.split(".")
            assert values[section][last] == value and f"{key} = {json.dumps(value)}" in text
        assert preset.paper in text and preset.lacks and f"{name}: {preset.title}" in text
        assert values["preset"] == name


@pytest.mark.parametrize(
    ("name", "clip_high", "aggregate", "scale", "kl", "equal"),
    [
        ("grpo", 0.2, "sequence", "group", 0.04, "train"),
        ("dr_grpo", 0.2, "constant", "nothing", 0.0, "train"),
        ("dapo", 0.28, "token", "group", 0.0, "drop"),
    ],
)
def test_the_papers_objectives(name: str, clip_high: float, aggregate: str, scale: str, kl: float, equal: str) -> None:
    config = build_config({"run_dir": "r", "model": "m", "preset": name}, "here")
    trainer = config.trainer
    assert trainer.objective_options == {"clip_low": 0.2, "clip_high": clip_high} and trainer.aggregate == aggregate
    assert (trainer.scale_advantages, trainer.kl_coef, config.rollout.equal_groups) == (scale, kl, equal)


def test_explicit_keys_and_flags_win_over_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE + 'preset = "grpo"\n[trainer]\nkl_coef = 0.5\n')
    config = load_config(path, ["--trainer.objective_options.clip_high", "0.9"])
    assert (config.trainer.kl_coef, config.trainer.aggregate) == (0.5, "sequence")
    assert config.trainer.objective_options == {"clip_low": 0.2, "clip_high": 0.9}
    assert load_config(path, ["--preset", "dapo"]).trainer.aggregate == "token"
    assert load_config(path, ["--preset", ""]).trainer.scale_advantages == "group"


def test_a_presets_options_stay_with_its_objective(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE + 'preset = "dapo"\n')
    config = load_config(path, ["--trainer.objective", "cispo"])
    assert (config.trainer.objective, config.trainer.objective_options, config.trainer.overlong) == ("cispo", {}, "mask")
    assert "instead of the preset's: trainer.objective, trainer.objective_options" in resolved(config)
    assert load_config(path, ["--trainer.objective", "grpo"]).trainer.objective_options == {"clip_low": 0.2, "clip_high": 0.28}
    path.write_text(BASE + 'preset = "dapo"\n[trainer]\nobjective = "cispo"\nobjective_options = {high = 3}\n')
    assert load_config(path).trainer.objective_options == {"high": 3}


def test_the_resolved_configuration_records_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE + 'preset = "dr_grpo"\n[trainer]\nkl_coef = 0.5\n')
    text = resolved(load_config(path))
    sets, replaced = text.splitlines()[:2]
    assert "dr_grpo" in sets and "2503.20783" in sets and "trainer.scale_advantages" in sets and "kl_coef" not in sets
    assert replaced.endswith("trainer.kl_coef")
    (tmp_path / "again.toml").write_text(text)
    assert load_config(tmp_path / "again.toml") == load_config(path)
    assert not resolved(build_config({"run_dir": "r", "model": "m"}, "here")).startswith("#")


def test_presets_on_the_command_line(capsys: Out) -> None:
    assert shoal_config("presets") == 0
    assert "Overlong" in capsys.readouterr().out
    assert shoal_config("presets", "--json") == 0
    assert json.loads(capsys.readouterr().out)["presets"]["dapo"]["paper"] == "2503.14476"
