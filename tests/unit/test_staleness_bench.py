"""`shoal bench staleness`: ages are exact, samples are the model's, results are kept and summed up as said."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from learner.presets import PRESETS
from learner.trainer.model import completion_logprobs, load_model
from learner.trainer.settings import TrainerConfig
from netem.bench.staleness import loop
from netem.bench.staleness.arrivals import cut_at, first_to_end
from netem.bench.staleness.cases import MATRIX, OBJECTIVES, SEEDS, STALENESS, Case, matrix
from netem.bench.staleness.loop import run_case, study_task
from netem.bench.staleness.parts import PARTS, UNSEEN
from netem.bench.staleness.rollouts import RolloutSource
from netem.bench.staleness.sampler import Sampler
from netem.bench.staleness.study import read_results, run_study
from netem.bench.staleness.summary import interval, of_run, summary, tenths
from netem.bench.staleness.table import markdown, write_plot
from netem.demo.tiny_model import build_demo_model
from p2p.errors import UsageError

TINY = Case("grpo", 2, 0, steps=4, groups=2, samples=4)


@pytest.fixture(autouse=True)
def _short_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "HELD_OUT", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reverse-0"
    return build_demo_model(folder, study_task("reverse", 0), seed=0, steps=12)


# --- the sampler ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """SmolLM2's shape, much smaller."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = LlamaConfig(
        vocab_size=60, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", ["model", "llama"])
def test_samples_have_the_log_probabilities_of_the_rounded_model(shape: str, request: pytest.FixtureRequest) -> None:
    found = load_model(request.getfixturevalue(shape), "cpu")
    sampler = Sampler(found.model)
    prompts = [(5, 6), (4, 9, 8, 3, 7), (3,)]  # of different lengths, so that padding matters
    draws = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
    made = sampler(prompts, 4, 6, draws)
    with torch.no_grad():
        for p in found.model.parameters():
            p.copy_(p.bfloat16().float())
        own = completion_logprobs(found.model, [p for p in prompts for _ in range(4)], made.ids)
    for row, logprobs in zip(own.logprobs, made.logprobs, strict=True):
        assert row[: len(logprobs)].tolist() == pytest.approx(logprobs, abs=1e-4)
    assert {len(ids) for ids in made.ids} != {6} or all(3 != i for ids in made.ids for i in ids[:-1])


def test_the_studys_own_tasks() -> None:
    sort, chat = study_task("sort", 0), study_task("chat", 3)
    digits = sort.prompt(4).text
    assert sort.solution(sort.prompt(4)) == "".join(sorted(digits[:-1])) and sort.score(sort.prompt(4), "x").exact is False
    asked, held = {chat.prompt(i).text for i in range(349)}, {chat.held_out(i).text for i in range(48)}
    assert len(asked) == 349 and len(held) == 48 and not asked & held
    assert held == {study_task("chat", 4).held_out(i).text for i in range(48)}, "each seed holds the same out"
    prompt = chat.prompt(0)
    assert chat.score(prompt, prompt.entry["answer"]).exact
    assert chat.score(prompt, "I think that it is " + prompt.entry["answer"]).reward == pytest.approx(0.75)


def test_greedy_takes_the_likeliest(model: Path) -> None:
    found = load_model(model, "cpu")
    sampler = Sampler(found.model, "float32")
    (ids,) = sampler([(4, 5, 6, 13)], 1, 5).ids
    with torch.no_grad():
        logits = found.model(torch.tensor([[4, 5, 6, 13, *ids[:-1]]])).logits[0, 3:]
    assert logits.argmax(dim=1).tolist() == list(ids)


# --- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 2, 9])
def test_every_step_trains_on_what_is_exactly_so_old(model: Path, staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, int]]()
    trained = loop.PolicyTrainer.accumulate

    def accumulate(self, groups, step=None):  # type: ignore[no-untyped-def]
        seen.extend((step, g.oldest.step) for g in groups)
        trained(self, groups, step)

    monkeypatch.setattr(loop.PolicyTrainer, "accumulate", accumulate)
    found = run_case(replace(TINY, staleness=staleness), model)
    assert sorted(set(seen)) == [(s, max(0, s - staleness)) for s in range(TINY.steps)]
    assert len(found["exact"]) == TINY.steps + 1 and len(found["steps"]["kl"]) == TINY.steps
    assert list(found["held_out"]) == [0, TINY.steps]


def test_a_run_is_the_same_again_and_another_with_other_weights(model: Path) -> None:
    def numbers(case: Case) -> dict[str, object]:
        found = run_case(case, model)
        del found["cpu_s"]
        return found

    assert numbers(TINY) == numbers(TINY)
    assert numbers(TINY)["reward"] != numbers(replace(TINY, lr=1e-2))["reward"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_runs_and_is_its_presets(objective: str) -> None:
    settings = Case(objective, 3, 0).trainer_settings()
    TrainerConfig(model="m", checkpoint_dir="", **settings)
    if objective in PRESETS and objective != "grpo":
        preset = PRESETS[objective].sets  # type: ignore[index]
        for key in ("objective", "aggregate", "scale_advantages"):
            default = getattr(TrainerConfig(model="m", checkpoint_dir=""), key)
            assert settings.get(key, default) == preset.get(f"trainer.{key}", default), key


def test_equal_groups_are_replaced_surplus_goes_and_the_late_are_cut(model: Path) -> None:
    found = load_model(model, "cpu")

    def batch(case: Case):  # type: ignore[no-untyped-def]
        return RolloutSource(case, study_task("reverse", 0), found.tokenizer, Sampler(found.model)).batch(0)

    plain = batch(replace(TINY, groups=6, samples=2))
    dropped = batch(replace(TINY, groups=6, samples=2, equal_groups="drop"))
    assert any(g.equal for g in plain.groups) and not any(g.equal for g in dropped.groups)
    assert len(dropped.groups) == 6 and dropped.drawn > 6
    more = batch(replace(TINY, extra_groups=6))
    assert (len(more.groups), more.drawn) == (2, 8) and more.kept_length < more.length
    cut = batch(replace(TINY, groups=6, cut_share=0.5))
    late = [t for g in cut.groups for t in g.trajectories if t.finish == "truncated"]
    assert 0 < len(late) <= 12 and cut.cut == len(late) / 24 and cut.kept_length < cut.length


def test_who_ends_first_and_where_the_others_are_cut() -> None:
    lengths, pace = [[4, 2], [3, 3], [2, 1]], [1.0, 1.0, 3.0]
    assert first_to_end(lengths, pace, 2) == [0, 1]  # ends at 4, 3 and 6
    assert cut_at(lengths, pace, 0.0) == lengths
    assert cut_at(lengths, pace, 0.34) == [[3, 2], [3, 3], [1, 1]]  # four of six have ended at 3


# --- what is kept, and what it comes to ------------------------------------------------------------------------------------


def row(case: Case, exact: list[float], kl: float = 0.01) -> dict[str, object]:
    same: dict[str, object] = {n: [1.0] * len(exact) for n in ("reward", "length", "drawn", "kept_length", "cut")}
    return {
        "key": case.key, "case": asdict(case), "commit": "abc", "exact": exact, "steps": {"kl": [kl] * (len(exact) - 1)},
        "held_out": {"0": {"all": 0.1}, "120": {"all": 0.9}}, "diverged": "", "cpu_s": 1.0, **same,
    }  # fmt: skip


def test_intervals_tenths_and_collapse() -> None:
    assert interval([1.0, 2.0, 3.0]).mean == 2.0
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / 3**0.5)
    assert interval([1.0]).half is None
    assert tenths([float(i) for i in range(20)]) == [0.5 + 2 * i for i in range(10)]
    rising = of_run(row(Case("grpo", 0, 0), [0.1, *(i / 40 for i in range(40))]))
    fallen = of_run(row(Case("grpo", 0, 0), [0.1, *(0.8 for _ in range(36)), 0.3, 0.3, 0.3, 0.3]))
    assert rising["collapse"] == 0 and rising["exact"] == pytest.approx(37.5 / 40) and rising["held_out"] == 0.9
    assert fallen["collapse"] == 1 and fallen["fall"] == pytest.approx(0.5) and rising["fall"] == 0
    assert "0.30 (1), 1 fell" in markdown(summary([row(Case("grpo", 16, 0), [0.1, *([0.8] * 36), *([0.3] * 4)])]))


def test_a_summary_compares_the_same_seeds_and_is_written(tmp_path: Path) -> None:
    rows = [row(Case("grpo", s, seed), [0.1] + [0.5 + 0.1 * seed - s / 100] * 20) for s in (0, 16) for seed in (0, 1, 2)]
    found = summary(rows)
    (series,) = found["series"]
    assert series["ages"][16]["apart"]["exact"]["mean"] == pytest.approx(-0.16)
    assert series["ages"][16]["apart"]["exact"]["half"] == pytest.approx(0, abs=1e-9)
    assert "| grpo | 0.60 ± 0.25 (3) | 0.44 ± 0.25 (3) |" in markdown(found)
    slower = [row(replace(Case("grpo", 16, seed), lr_rule="sqrt"), [0.6 + 0.1 * seed] * 21) for seed in (0, 1)]
    (_, ruled) = summary(rows + slower)["series"]  # at S = 0 the rule changes nothing: it is compared with what runs without it
    assert ruled["ages"][16]["apart"]["exact"]["mean"] == pytest.approx(0.1)
    write_plot(found, rows, tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"


def test_results_are_kept_one_by_one_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"
    done = row(TINY, [0.1] * 5)
    file.write_text(json.dumps(done) + "\n" + '{"key": "half', encoding="utf-8")
    said = list[str]()
    assert run_study([TINY], file, 1, said.append) == [done] and not said
    file.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"line 1, is no result"):
        read_results(file)


def test_the_matrix_is_ordered_so_that_a_part_of_it_is_useful() -> None:
    cases = matrix(TINY, MATRIX, STALENESS, SEEDS)
    assert len({c.key for c in cases}) == len(cases) == len(MATRIX) * len(STALENESS) * len(SEEDS) >= 6 * 7 * 5
    assert {(c.staleness, c.seed) for c in cases[: 2 * len(MATRIX)]} == {(0, 0), (16, 0)}
    assert {c.label for c in cases} == {f"{o} steps=4 groups=2 samples=4" for o in MATRIX}


def test_the_learning_rate_follows_its_rule() -> None:
    assert replace(TINY, staleness=3, lr_rule="sqrt").learning_rate == pytest.approx(1.5e-4)
    assert TINY.learning_rate == TINY.lr


@pytest.mark.parametrize("part", PARTS)
def test_every_run_of_every_part_is_one_that_can_be_run(part: str) -> None:
    cases = PARTS[part].make(None)
    assert cases and len({case.key for case in cases}) == len(cases)
    for case in cases:
        TrainerConfig(model="m", checkpoint_dir="", **case.trainer_settings())
    assert (part == "unseen") == any(case.seed == UNSEEN for case in cases)
    assert {c.objective for c in PARTS[part].make(["grpo"])} == {"grpo"}
