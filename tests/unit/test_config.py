"""learner/config.py: TOML files, dotted flags, strictness, and a resolved config that reads back the same."""

from __future__ import annotations

import contextlib
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import LearnerConfig, build_config, dump_toml, load_config, read_config, resolved
from learner.layers import Layer, read_flags, stack
from learner.section import check_section
from learner.trainer.settings import TrainerConfig, TrainerSection
from p2p.errors import UsageError
from p2p.limits import MAX_CHUNK

BASE = 'run_dir = "r"\nmodel = "m"\n'


def load(tmp_path: Path, text: str = BASE, *flags: str) -> Any:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_config(path, flags)


def refused(tmp_path: Path, text: str = BASE, *flags: str) -> str:
    """The one line of the UsageError."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, *flags)
    return str(caught.value)


def test_defaults_and_sections(tmp_path: Path) -> None:
    config = load(tmp_path, BASE + "[rollout]\nmax_staleness = 0\n[task]\nname = 'add'\noptions = {digits = 3}\n")
    assert (config.run_dir, config.model, config.rollout.max_staleness, config.rollout.samples) == ("r", "m", 0, 16)
    assert config.task.options == {"digits": 3}
    trainer = config.trainer_config()
    assert trainer == TrainerConfig(
        model="m", checkpoint_dir=str(Path("r") / "checkpoints"), max_staleness=0, max_new_tokens=64
    )


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        (["--rollout.max_staleness", "3"], ("rollout", "max_staleness"), 3),
        (["--rollout.max-staleness=3"], ("rollout", "max_staleness"), 3),
        (["--rollout.extra-groups", "2"], ("rollout", "extra_groups"), 2),
        (["--rollout.extra_samples", "3"], ("rollout", "extra_samples"), 3),
        (["--rollout.truncate_stuck_s", "30"], ("rollout", "truncate_stuck_s"), 30.0),
        (["--trainer.lr", "1e-6"], ("trainer", "lr"), 1e-6),
        (["--trainer.lr", "1"], ("trainer", "lr"), 1.0),
        (["--trainer.betas", "[0.8, 0.9]"], ("trainer", "betas"), [0.8, 0.9]),
        (["--trainer.share_prompts", "false"], ("trainer", "share_prompts"), False),
        (["--trainer.objective_options.cap", "3.0"], ("trainer", "objective_options"), {"cap": 3.0}),
        (["--task.name", "add"], ("task", "name"), "add"),
        (["--task.name", '"add"'], ("task", "name"), "add"),
        (["--task.options.digits", "4"], ("task", "options"), {"digits": 4}),
        (["--swarm.listen", '["/ip4/127.0.0.1/tcp/0"]'], ("swarm", "listen"), ["/ip4/127.0.0.1/tcp/0"]),
        (["--seed", "1", "--seed", "2"], ("seed",), 2),
        (["--run_dir=a=b"], ("run_dir",), "a=b"),
    ],
)
def test_flags_win_over_the_file(tmp_path: Path, flag: list[str], path: tuple[str, ...], value: Any) -> None:
    got = load(tmp_path, BASE + "seed = 7\n[rollout]\nmax_staleness = 9\n", *flag)
    for name in path:
        got = getattr(got, name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ('run_dir = "r"\n', (), ("model", "required")),
        (BASE + "colour = 1\n", (), ("colour", "unknown key")),
        (BASE + "[rollout]\nstaleness = 1\n", (), ("rollout.staleness", "unknown key")),
        (BASE + "[trainer]\nlearning_rate = 1.0\n", (), ("trainer.learning_rate", "unknown key")),
        (BASE + "[trainer]\nmodel = 'other'\n", (), ("trainer.model", "unknown key")),
        (BASE + "[rollout]\nsamples = '16'\n", (), ("rollout.samples", "integer")),
        (BASE + "[rollout]\nsamples = true\n", (), ("rollout.samples", "integer")),
        (BASE + "[rollout]\nextra_groups = -1\n", (), ("rollout.extra_groups", "greater than or equal to 0")),
        (BASE + "[rollout]\nsamples = 1.5\n", (), ("rollout.samples", "integer")),
        (BASE + "seed = [1]\n", (), ("seed", "integer")),
        (BASE + "rollout = 3\n", (), ("rollout",)),
        (BASE + "trainer = 3\n", (), ("trainer",)),
        (BASE + "[trainer]\nbetas = [0.9]\n", (), ("trainer.betas",)),
        (BASE + "[trainer]\nlr = nan\n", (), ("trainer.lr",)),
        (BASE + "[trainer]\nlr = 0.0\n", (), ("trainer.lr",)),
        (BASE + "[trainer]\nsteps = -1\n", (), ("trainer.steps",)),
        (BASE + "[trainer]\ngrad_clip = -1.0\n", (), ("trainer.grad_clip", "greater than or equal to 0")),
        (BASE + "[trainer.objective_options]\nclip_low = -0.2\n", (), ("trainer", "clip_low", "greater than or equal to 0")),
        (BASE + "[trainer.objective_options]\nclip_hi = 1.5\n", (), ("objective grpo", "did you mean clip_high")),
        (BASE + "[trainer]\nclip_low = 0.1\n", (), ("trainer.clip_low", "unknown key")),
        (BASE + "[trainer]\nkl_coef = -0.1\n", (), ("trainer.kl_coef", "greater than or equal to 0")),
        (BASE + "[trainer]\nweight_decay = -0.1\n", (), ("trainer.weight_decay", "greater than or equal to 0")),
        (BASE + "[trainer]\nbetas = [0.9, 1.0]\n", (), ("trainer.betas.1", "less than 1")),
        (BASE + "[trainer]\nbetas = [-0.1, 0.9]\n", (), ("trainer.betas.0", "greater than or equal to 0")),
        (BASE + "[trainer]\nmicro_batch_tokens = 0\n", (), ("trainer.micro_batch_tokens", "greater than or equal to 1")),
        (BASE + f"[trainer]\nseed = {10**400}\n", (), ("trainer.seed",)),
        (BASE + f"seed = {10**30}\n", (), ("seed",)),
        (BASE + "[rollout]\ntop_p = 0.9\n", (), ("rollout.top_p", "nucleus", 'objective = "decoupled"')),
        (BASE, ("--task.options.x", "2024-01-01"), ("task.options.x", "date", "quotes")),
        (BASE, ("--task.options", "{a = [{b = 12:00:00}]}"), ("task.options.a.b", "time")),
        (BASE, ("--task.options.x", str(2**64)), ("task.options.x", "64 bits")),
        (BASE + "[trainer]\nobjective = 'ppo'\n", (), ("trainer", "unknown objective 'ppo'")),
        (BASE + "[rollout]\nmax_staleness = -1\n", (), ("rollout.max_staleness",)),
        (BASE + "[rollout]\ntop_p = 1.5\n", (), ("rollout.top_p",)),
        (BASE + "[rollout]\ngroups_per_step = 0\n", (), ("rollout.groups_per_step", "external_trainer")),
        (BASE, ("--rollout.groups_per_step", "0", "--external_trainer", "true"), ("nothing can sample", "endpoint.listen")),
        (
            BASE + "[local_engine]\nengine = 'fake'\n[endpoint]\nlisten = '127.0.0.1:0'\n",
            ("--rollout.groups_per_step", "0", "--external_trainer", "true"), ("rollout.groups_per_step", "local_engine.engine"),
        ),
        (BASE + "[rollout]\ntemperature = 0\n", (), ("rollout.temperature",)),
        (BASE + "[rollout]\ntemperature = inf\n", (), ("rollout.temperature",)),
        (BASE + f"[swarm]\nchunk_bytes = {MAX_CHUNK + 1}\n", (), ("swarm.chunk_bytes",)),
        (BASE + "[swarm]\nchunk_bytes = 1023\n", (), ("swarm.chunk_bytes", "1024")),
        (BASE + "[swarm]\nsegment_bytes = 67108864\nchunk_bytes = 4095\n", (), ("swarm.chunk_bytes", "too small", "16384")),
        (BASE + "[rollout]\nstall_s = 0\n", (), ("rollout.stall_s",)),
        (BASE + "[rollout]\non_update = 'wait'\n", (), ("rollout.on_update", "'continue' or 'finish'")),
        (BASE + "[[eval]]\nevery = 3\n", (), ("eval.0.name", "required")),
        (BASE + "[[eval]]\nname = 'reward'\n", (), ("eval.0.name", "default evaluation")),
        (BASE + "[[eval]]\nname = 'a/b'\n", (), ("eval.0.name", "no name")),
        (BASE + "[[eval]]\nname = 'a'\n[[eval]]\nname = 'a'\n", (), ("eval.1.name", "twice")),
        (BASE + "[[eval]]\nname = 'a'\nsamples = 8\n", (), ("eval.0 (a)", "temperature = 0")),
        (BASE + "[[eval]]\nname = 'a'\nprompts = 10000\nsamples = 1000\ntemperature = 1.0\n", (), ("eval.0 (a)", "1,000,000")),
        (BASE + "[[eval]]\nname = 'a'\n[eval.task]\nnam = 'add'\n", (), ("eval.0.task.nam", "did you mean eval.task.name?")),
        (BASE + "[[eval]]\nname = 'a'\n[eval.task.options]\nx = 2024-01-01\n", (), ("eval.0.task.options.x", "quotes")),
        (BASE, ("--eval.name", "a"), ("--eval",)),
        (BASE + "[status]\nport = 70000\n", (), ("status.port",)),
        (BASE, ("--rollout.samples", "many"), ("rollout.samples", "integer")),
        (BASE, ("--rollout.samples",), ("rollout.samples", "needs a value")),
        (BASE, ("samples", "3"), ("'samples'",)),
        (BASE, ("--", "3"), ("'--'",)),
        (BASE, ("--seed.x", "3"), ("seed",)),
        (BASE + "seed = 1\n", ("--seed.x", "3"), ("seed is not a section",)),
        (BASE, ("--rollout..samples", "3"), ("rollout",)),
        ("run_dir = ", (), ("not TOML",)),
        (BASE + BASE, (), ("not TOML",)),
    ],
)
def test_wrong_settings_are_named_in_one_line(
    tmp_path: Path, text: str, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refused(tmp_path, text, *flags)
    assert "\n" not in line.strip()
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (BASE + "[trainer]\nlrr = 1.0\n", (), "c.toml: trainer.lrr: unknown key; did you mean trainer.lr?"),
        (BASE + "[trainer]\nlearning_rate = 1.0\n", (), "c.toml: trainer.learning_rate: unknown key; did you mean trainer.lr?"),
        (BASE + "max_staleness = 1\n", (), "c.toml: max_staleness: unknown key; did you mean rollout.max_staleness?"),
        (BASE + "[rolout]\nsamples = 3\n", (), "c.toml: rolout: unknown key; did you mean rollout?"),
        (BASE, ("--trainer.lrr", "3"), "--trainer.lrr: no such setting; did you mean --trainer.lr?"),
        (BASE, ("--max-staleness", "3"), "--max_staleness: no such setting; did you mean --rollout.max_staleness?"),
        (BASE, ("--sede", "3"), "--sede: no such setting; did you mean --seed?"),
        (BASE, ("--sede",), "--sede: no such setting; did you mean --seed?"),
        (BASE + "[trainer]\nclip_low = 0.1\n", (), "trainer.clip_low: unknown key; it is now trainer.objective_options.clip_low"),
        (BASE, ("--trainer.clip_high", "1"), "clip_high: no such setting; it is now trainer.objective_options.clip_high"),
        (BASE, ("--trainer.tis-cap",), "--trainer.tis-cap: no such setting; it is now trainer.objective_options.cap"),
        (BASE + "[trainer]\nproximal = 'trainer'\n", (), 'unknown key; it is now trainer.objective: "decoupled" for "trainer"'),
        (BASE + "rollout = 3\n", (), "c.toml: rollout: is a section of settings, not 3"),
        (BASE + "[trainer]\nobjective = 'cipso'\n", (), "did you mean 'cispo'?"),
        (BASE + "[status]\nport = true\n", (), "valid integer, not true"),
        (f"{BASE}seed = {[*range(99)]}\n", (), "valid integer, not a list"),
    ],
)
def test_the_nearest_is_suggested_and_the_place_is_named(tmp_path: Path, text: str, flags: tuple[str, ...], said: str) -> None:
    line = refused(tmp_path, text, *flags)
    assert said in line and ("c.toml" in line) == (not flags)


def test_what_a_key_is_now_is_taken(tmp_path: Path) -> None:
    for old, now in LearnerConfig.moved.items():
        key, choice, _ = now.partition(":")
        assert load(tmp_path, BASE, "--trainer.objective", "decoupled", f"--{key}", "grpo" if choice else "0.5"), old


def test_all_wrong_settings_are_told_at_once(tmp_path: Path) -> None:
    text = "colour = 1\n[rollout]\nsamples = 'x'\npublish_every = 9\nmax_staleness = 'y'\ntop_p = 0.9\n"
    text += "[trainer]\nbetas = [2.0, 3.0]\n"
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, "--trainer.steps", "-1", "--seed", "x")
    told = "\n".join(caught.value.problems)
    for word in ("colour", "rollout.samples", "rollout.max_staleness", "trainer.betas.0", "trainer.betas.1", "--trainer.steps",
                 "--seed", "run_dir is required", "model is required", "rollout.top_p"):  # fmt: skip
        assert word in told
    assert "publish_every" not in told, "nothing is said of what follows from a wrong key"
    assert len(caught.value.problems) == 10


names = st.sampled_from(
    ["seed", "model", "preset", "rollout", "samples", "trainer", "betas", "prices", "activation", "task", "options", "x",
     "objective", "objective_options", "high"]
)
odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["dapo", "cispo"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3), max_leaves=6,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(names, odd, max_size=5),
    st.lists(st.tuples(names, names, st.sampled_from(["1", "x", "[1]", "{a = 1}"])), max_size=3),
)
def test_any_table_and_any_flags_are_taken_or_refused_in_lines(table: dict[str, Any], flags: list[tuple[str, str, str]]) -> None:
    layers = [Layer("c.toml", table)]
    try:
        layers.append(read_flags(LearnerConfig, [word for a, b, value in flags for word in (f"--{a}.{b}", value)]))
        found = stack(LearnerConfig, layers, {"run_dir": "", "model": ""}, below={}, source="c.toml")
    except UsageError as error:
        assert "is not a section" in str(error)
        return
    assert bool(found.problems) == bool(found.wrong), (found.problems, found.wrong)
    assert "run_dir" in found.wrong and all("\n" not in line for line in found.problems)
    with contextlib.suppress(UsageError):
        build_config(table, "here")


CISPO = BASE + "[trainer]\nobjective = 'cispo'\n"
NO_BATCH = 'trainer: scale_advantages = "batch" divides the whole gradient'


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (CISPO + "objective_options = {high = 3}\n", ("--trainer.objective", "grpo"),
         "c.toml: trainer.objective_options: objective grpo: high: unknown key"),
        (CISPO, ("--trainer.objective_options.hig", "3"),
         "trainer.objective_options: objective cispo: hig: unknown key; did you mean high?"),
        (BASE, ("--preset", "cispo", "--trainer.entropy_coef", "0.01"), NO_BATCH),
        (BASE + "preset = 'cispo'\n[trainer]\nkl_coef = 0.1\n", (), f"c.toml: {NO_BATCH}"),
        (BASE + "[trainer]\nscale_advantages = 'batch'\n", ("--trainer.kl_coef", "0.1"), NO_BATCH),
    ],
)  # fmt: skip
def test_keys_of_several_places_that_do_not_go_together_are_told_in_one_line(
    tmp_path: Path, text: str, flags: tuple[str, ...], said: str
) -> None:
    line = refused(tmp_path, text, *flags, "--rollout.top_p", "0.9", "--external_trainer", "true")
    assert said in line and "\n" not in line.strip() and ("c.toml" in line) == said.startswith("c.toml")


def test_keys_are_held_against_each_other_only_where_all_places_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, CISPO, "--trainer.objective_options.high", "3").trainer.objective_options == {"high": 3}
    options = BASE + "[trainer.objective_options]\nhigh = 3\n"
    assert load(tmp_path, options, "--trainer.objective", "cispo").trainer.objective_options == {"high": 3}
    batch = BASE + "[trainer]\nscale_advantages = 'batch'\nkl_coef = 0.1\n"
    assert load(tmp_path, batch, "--trainer.kl_coef", "0").trainer.scale_advantages == "batch"


def test_options_of_a_wrong_objective_are_not_judged(tmp_path: Path) -> None:
    line = refused(tmp_path, BASE + "[trainer]\nobjective = 'cipso'\nobjective_options = {high = 3}\n")
    assert "did you mean 'cispo'?" in line and "high" not in line
    fine = TrainerConfig(model="m", checkpoint_dir="c").model_dump()
    with pytest.raises(UsageError, match=r"trainer\.json: objective_options: objective grpo: high: unknown key"):
        check_section(TrainerConfig, {**fine, "objective_options": {"high": 3}}, "trainer.json")
    with pytest.raises(UsageError, match='scale_advantages = "batch" divides'):
        check_section(TrainerConfig, {**fine, "scale_advantages": "batch", "kl_coef": 0.1}, "trainer.json")


def test_what_can_be_read_is_read_beside_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("model = 'm'\n[rollout]\nsamples = 'x'\nmax_new_tokens = 7\n")
    read = read_config(path)
    assert read.wrong == {"run_dir", "rollout.samples"} and len(read.problems) == 2
    assert (read.config.run_dir, read.config.model) == ("", "m")
    assert (read.config.rollout.samples, read.config.rollout.max_new_tokens) == (16, 7)


def test_a_table_that_is_wrong_as_a_whole_takes_its_keys_along(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE + "preset = 'cispo'\n[trainer]\ndevice = 'cuda:7'\nkl_coef = 0.1\n")
    read = read_config(path)
    assert len(read.problems) == 1 and read.config.trainer == TrainerSection()
    assert {"trainer", "trainer.device", "trainer.kl_coef", "trainer.scale_advantages"} <= read.wrong


def test_a_nucleus_goes_with_the_decoupled_loss_or_another_trainer(tmp_path: Path) -> None:
    text = BASE + "[rollout]\ntop_p = 0.9\n"
    assert load(tmp_path, text, "--trainer.objective", "decoupled").rollout.top_p == 0.9
    assert load(tmp_path, text, "--external_trainer", "true").rollout.top_p == 0.9


def test_a_trainer_that_samples_itself_needs_the_endpoint(tmp_path: Path) -> None:
    flags = ("--external_trainer", "true", "--rollout.groups_per_step", "0", "--endpoint.listen", "127.0.0.1:0")
    assert load(tmp_path, BASE, *flags).rollout.groups_per_step == 0
    line = refused(tmp_path, BASE, *flags[:-1], "nowhere")
    assert "--endpoint.listen" in line and "nothing can sample" not in line, "it only follows from the wrong address"


def test_every_number_of_the_trainer_has_a_range() -> None:
    fine = TrainerConfig(model="m", checkpoint_dir="c").model_dump()
    numbers = [name for name, value in fine.items() if type(value) in (int, float)]
    assert len(numbers) > 15
    for name in numbers:
        for wrong in (math.nan, math.inf, -math.inf, -(10**400)):
            with pytest.raises(UsageError, match=rf"trainer\.json: {name}: "):
                check_section(TrainerConfig, {**fine, name: wrong}, "trainer.json")
    for edge in ({"grad_clip": 0.0}, {"kl_coef": 0.0}, {"betas": [0.0, 0.0]}, {"steps": 0}, {"lr": 1e-12}):
        check_section(TrainerConfig, {**fine, **edge}, "trainer.json")


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "no.toml", "no such config file"), (tmp_path, "cannot read")):
        with pytest.raises(UsageError, match=word):
            load_config(path)
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"')
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path / "latin.toml")


def test_the_trainer_is_told_its_section_and_what_other_sections_say(tmp_path: Path) -> None:
    """Every setting that the section does not have differs from its default here, so it comes from another section."""
    config = load(
        tmp_path, BASE, "--task.name", "add", "--task.seed", "3", "--task.options.digits", "4", "--task.allow_unconfined", "true",
        "--rollout.max_staleness", "5", "--rollout.temperature", "0.5", "--rollout.max_new_tokens", "99",
        "--rollout.micro_batch_groups", "7", "--trainer.lr", "1e-6", "--task.reward", "exact",
    )  # fmt: skip
    told = config.trainer_config().model_dump()
    assert {k: told.pop(k) for k in TrainerSection.model_fields} == config.trainer.model_dump()
    defaults = TrainerConfig(model="", checkpoint_dir="").model_dump()
    assert told and all(value != defaults[name] for name, value in told.items())


def test_resolved_config_reads_back_unchanged(tmp_path: Path) -> None:
    config = load(
        tmp_path, BASE, "--task.options.words", '["a\\"b", "c\\\\d"]', "--trainer.lr", "1e-6",
        "--swarm.announce", '["/dns4/a.b/tcp/1"]', "--model", "dir with space/é\tx\x7f",
    )  # fmt: skip
    again = load(tmp_path, dump_toml(config.model_dump()))
    assert again == config and again.model_dump() == config.model_dump()
    assert again.trainer_config() == config.trainer_config()


def test_evaluations_read_back_unchanged(tmp_path: Path) -> None:
    tables = "[[eval]]\nname = 'a'\nevery = 5\n[eval.task]\nname = 'add'\noptions = {digits = 3}\n[[eval]]\nname = 'b'\n"
    config = load(tmp_path, BASE + tables)
    assert [(one.name, one.held_out) for one in config.eval] == [("a", False), ("b", True)]
    assert load(tmp_path, resolved(config)) == config
    assert load(tmp_path, BASE, "--eval", '[{name = "c", problems = "all"}]').eval[0].held_out is False


def test_build_config_does_not_change_what_it_was_given() -> None:
    values = {"run_dir": "r", "model": "m", "trainer": {"steps": 3}}
    assert build_config(values, "here").trainer.steps == 3
    assert values == {"run_dir": "r", "model": "m", "trainer": {"steps": 3}}


# --- dump_toml -------------------------------------------------------------------------------------------------------

scalars = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)  # fmt: skip
bare_keys = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | bare_keys
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down (1 == 1.0 == True in Python, not in TOML)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(keys, values, max_size=5))
def test_dump_toml_round_trip(table: dict[str, Any]) -> None:
    assert same(tomllib.loads(dump_toml(table)), table), dump_toml(table)
