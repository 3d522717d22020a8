"""The auditor measures itself what bfloat16 does to the run's model: as nodes that compute so, and whatever nodes claim."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.audit.auditor import Auditor
from learner.audit.bets import HonestMeans
from learner.audit.calibration import ENOUGH, SHIPPED, WHOLE, Calibration, DrawnAt, NodeArithmetic, to_json, widest
from learner.audit.claims import Claim, OwnGroup, prompt_number
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.measuring import STRETCH
from learner.audit.own_completions import OwnRow, SampledBy, own_completions
from learner.audit.plan import AuditPlan, Check, ToldKind
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import score
from learner.audit.self_calibration import MOST_OF_PROMPT, MOST_READ, measure_bfloat16
from learner.audit.sequential import NodeTest
from learner.audit.statistic import distances, draws
from learner.audit.wire import Frames, read_bfloat16, read_deviations, score_answer, score_request
from learner.standing.standing import Standing, StandingRules
from learner.trajectory import Group
from netem.demo.tiny_model import char_tokenizer
from tests.support.audit_world import AuditWorld

OWN = NodeArithmetic("transformers", "bfloat16", "cpu")
VOCABULARY = 64


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """Weights that bfloat16 holds, as nodes get them."""
    torch.manual_seed(3)
    made = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                    intermediate_size=64, head_dim=16, max_position_embeddings=128)
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((20 * parameter if parameter.dim() > 1 else parameter).to(torch.bfloat16))
    return made.eval()


SAMPLED = SampledBy(longest=24)


def groups_of(count: int, members: int = 5) -> list[OwnGroup]:
    return [OwnGroup((1, 2, 3 + i), tuple(10 * i + member for member in range(members))) for i in range(count)]


def claims_of(model: Qwen3ForCausalLM, groups: Sequence[OwnGroup], sampled: SampledBy = SAMPLED) -> list[Claim]:
    """What a node with this model claims."""
    rows = [OwnRow(group.prompt_ids, seed, 1_000) for group in groups for seed in group.seeds]
    return own_completions(model, rows, sampled)


def test_a_draw_is_at_no_distance_from_itself() -> None:
    rng = np.random.default_rng(0)
    logits, u = torch.from_numpy(rng.standard_normal((500, 40)) * 3), rng.random(500)
    for top_p in (1.0, 0.7):
        drawn = draws(logits, u, 0.8, top_p)
        found = distances(logits, torch.from_numpy(drawn.tokens), u, 0.8, top_p)
        assert found.distance.max() < 1e-9
        np.testing.assert_allclose(found.logprob, drawn.logprobs)
    edge = draws(torch.zeros(2, 4), np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert edge.tokens.tolist() == [0, 3]


@pytest.mark.parametrize("sampled", [SAMPLED, SampledBy(0.8, 0.9, longest=24)])
def test_it_comes_to_what_a_node_comes_to_that_computes_so(model: Qwen3ForCausalLM, sampled: SampledBy) -> None:
    groups, asked = groups_of(15), (sampled.temperature, sampled.top_p)
    before = [parameter.clone() for parameter in model.parameters()]
    found = measure_bfloat16(model, groups, 2_000, sampled).found
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, model.parameters(), strict=True))
    assert len(found.distance) == 15 * 5 * 24
    node = Qwen3ForCausalLM(model.config).to(torch.bfloat16).eval()
    node.load_state_dict(model.state_dict())
    theirs = claims_of(node, groups, sampled)
    judged = Deviations(*(np.concatenate(c) for c in zip(*score(model, theirs, *asked), strict=True)))
    inside = [np.isfinite(x.claimed) & np.isfinite(x.recomputed) for x in (found, judged)]
    own, their = (np.abs(x.claimed - x.recomputed)[of].mean() for x, of in zip((found, judged), inside, strict=True))
    assert 0.7 < own / their < 1.4 and own > 1e-3, (own, their)
    assert 0.5 < (found.distance > 0).sum() / (judged.distance > 0).sum() < 2


def test_of_a_prompt_no_more_than_counts_and_in_all_what_is_asked_for(model: Qwen3ForCausalLM) -> None:
    assert len(measure_bfloat16(model, groups_of(4), 30, SAMPLED).repeated) == 30
    many = groups_of(10, members=12)
    per_prompt = Counter(measure_bfloat16(model, many, 1_000, SAMPLED).prompts.tolist())
    assert max(per_prompt.values()) == MOST_OF_PROMPT < 12 * 24 and sum(per_prompt.values()) == 1_000
    few = [OwnGroup((1, 2, 3), tuple(range(9 * i, 9 * i + 9))) for i in range(5)]
    assert len(measure_bfloat16(model, few, 1_000, SAMPLED).repeated) == 1_000, "who asks one prompt only has more of it at once"
    again = measure_bfloat16(model, [OwnGroup((1, 2, 3), (7,) * 30)], 500, SAMPLED)
    assert len(again.found.distance) == len(again.repeated) == len(again.prompts) == 500
    assert not again.repeated[:24].any() and again.repeated[24:].mean() > 0.5, "but for what is all but certain"
    seen = SeenTokens()
    first, second = (measure_bfloat16(model, groups_of(4), 1_000, SAMPLED, seen=seen).repeated for _ in range(2))
    assert first.mean() < 0.2 and second.mean() > 0.5, "known again in a later call"
    nothing = measure_bfloat16(model, [], 100, SAMPLED)
    assert not len(nothing.found.distance) and not len(nothing.repeated)


def test_short_completions_make_room_for_others(model: Qwen3ForCausalLM) -> None:
    """How long one becomes is not known before: of a prompt's others, and up to the tokens that are asked for, more are made."""
    short = SampledBy(stop_ids=set(range(0, VOCABULARY, 4)))
    made = sum(len(claim.completion_ids) for claim in claims_of(model, groups_of(2, 12), short))
    assert 24 < made < 2 * MOST_OF_PROMPT
    assert len(measure_bfloat16(model, groups_of(2, 12), 10_000, short).repeated) == made
    assert len(measure_bfloat16(model, groups_of(2, 12), 40, short).repeated) == 40


def checks_of(world: AuditWorld, versions: int = 1) -> list[Check]:
    """A few completions of an honest node under these versions."""
    plan = AuditPlan(b"s" * 32, 1, Standing(StandingRules(checks=True)), Calibration(), kind_of=lambda peer: ToldKind(OWN))
    for trajectory in world.generate(range(12), list(range(versions)), 6):
        plan.whole(Group(trajectory.seed, 0, (trajectory,)))
    return plan.next(1 << 30)


def test_an_auditor_measures_beside_what_it_scores(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=2, now=time.time())
    auditor = Auditor(world.settings(2))
    for parts in world.parts:
        auditor.follow(parts)
    checks = checks_of(world, 2)
    own_groups = [OwnGroup(prompt, (1, 2, 3)) for prompt in sorted({check.prompt_ids for check in checks})]
    [message] = Frames().feed(score_request(checks, 50, own_groups))
    [answer] = Frames().feed(auditor.answer(message))
    read_deviations(answer, checks)
    found, repeated, prompts = read_bfloat16(answer, 50)
    assert len(repeated) == len(found.distance) and repeated.dtype == bool
    asked = {prompt_number(group.prompt_ids) for group in own_groups}
    assert len(prompts) == len(repeated) and set(prompts.tolist()) <= asked
    assert 30 < len(found.distance) <= 50 and 0 < np.abs(found.claimed - found.recomputed).mean() < 0.1
    [message] = Frames().feed(score_request(checks, 0, own_groups))
    [answer] = Frames().feed(auditor.answer(message))
    assert not len(read_bfloat16(answer, 0).repeated)
    with pytest.raises(ValueError, match="other tokens in bfloat16"):
        [answer] = Frames().feed(score_answer([], own(3, 0)))
        read_bfloat16(answer, 2)


def measured(auditor: Auditor, world: AuditWorld) -> int:
    """Tokens that it measures beside scoring one completion."""
    checks = checks_of(world)
    [message] = Frames().feed(score_request(checks, 500, [OwnGroup((1, 5, 9), tuple(range(9)))]))
    [answer] = Frames().feed(auditor.answer(message))
    assert all(d is not None for of in read_deviations(answer, checks) for d in of)
    return len(read_bfloat16(answer, 500).repeated)


def test_strings_of_the_task_end_what_it_makes(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=1, now=time.time())
    char_tokenizer().save_pretrained(world.model_dir)
    found = []
    for stop in ([], list("abcdefgh")):
        auditor = Auditor(replace(world.settings(2), stop=stop))
        auditor.follow(world.parts[0])
        found.append(measured(auditor, world))
    assert found[0] == 9 * 40 > 2 * found[1] > 0


def test_what_cannot_be_generated_with_is_scored_all_the_same(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=1, now=time.time())
    auditor = Auditor(world.settings(2))
    auditor.follow(world.parts[0])
    model: Any = auditor.model.model
    tried = []

    def generate(**_: Any) -> None:
        tried.append(1)
        raise NotImplementedError("no cache of this kind\nand pages more")

    model.generate = generate
    assert measured(auditor, world) == measured(auditor, world) == 0
    assert len(tried) == 1 and auditor.facts()["cannot"] == "NotImplementedError: no cache of this kind"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_long_prompts_are_measured_a_few_at_a_time(model: Qwen3ForCausalLM) -> None:
    """What is read in one call is bounded, and checks are kept waiting no longer; one is made of however long a prompt."""
    long = [OwnGroup((1,) * 110 + (i,), (1, 2, 3)) for i in range(40)]
    found = measure_bfloat16(model, long, 1_000, SampledBy(longest=10))
    assert len(found.repeated) == 10 * (MOST_READ // 121) < 1_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.audit.self_calibration.MOST_READ", 50)
        assert len(measure_bfloat16(model, long, 1_000, SampledBy(longest=10)).repeated) == 10


def rounded(tokens: int, noise: float, seed: int = 0) -> Deviations:
    rng = np.random.default_rng(seed)
    recomputed = -rng.exponential(0.5, tokens) - 0.1
    return Deviations(np.zeros(tokens), recomputed + noise * rng.standard_normal(tokens), recomputed, np.zeros(tokens))


def own(tokens: int, seed: int) -> OwnDeviations:
    return OwnDeviations(rounded(tokens, 0.002, seed), np.zeros(tokens, bool), np.arange(tokens) // STRETCH + 1e6 * seed)


def test_what_it_measures_takes_the_place_of_what_is_shipped() -> None:
    calibration = Calibration()
    said = {"stranger": NodeArithmetic("vllm", "bfloat16", "cuda")}
    plan = AuditPlan(b"s" * 32, 1, Standing(StandingRules(checks=True)), calibration, kind_of=lambda peer: ToldKind(said[peer]))
    shipped = calibration.honest(said["stranger"])
    assert shipped.off == SHIPPED[OWN].off and calibration.wants_own(OWN)
    assert not plan.own(own(1_000, 0))
    assert calibration.honest(said["stranger"]) == shipped and calibration.wants_own(OWN)
    assert plan.own(own(ENOUGH - 1_000, 1))
    measured = calibration.means[OWN]
    assert measured.quiet == HonestMeans().quiet, "another processor may round less"
    assert not calibration.wants_own(OWN) and measured.off < SHIPPED[OWN].off
    anywhere = calibration.honest(said["stranger"])
    assert anywhere.off == measured.off and measured.noise[2] < anywhere.noise[2] <= 1.5 * measured.noise[2]
    beside = calibration.honest(NodeArithmetic("vllm", "bfloat16", "cpu"))
    assert beside.noise == measured.noise and beside.quiet == HonestMeans().quiet, "another engine on the same device"
    assert calibration.honest(NodeArithmetic("vllm", "float32", "cpu")) == SHIPPED[NodeArithmetic("vllm", "float32", "cpu")]


def test_what_a_nucleus_cuts_off_is_what_it_measures_too() -> None:
    """An honest node's token may lie outside the nucleus that float32 has: such tokens are counted against nodes."""
    calibration = Calibration(drawn=DrawnAt(top_p=0.9))
    plan = AuditPlan(b"s" * 32, 1, Standing(StandingRules(checks=True)), calibration, kind_of=lambda peer: ToldKind(OWN))
    made = own(ENOUGH, 0)
    outside = np.arange(ENOUGH) % 200 == 0
    made.found.distance[outside], made.found.recomputed[outside] = 1.0, -np.inf
    assert plan.own(made) and plan.counts["own"] == ENOUGH
    honest = calibration.honest(OWN)
    assert 1 / 200 < honest.far < 4 / 200 and all(np.isfinite([honest.off, honest.bias, honest.level, *honest.noise]))
    test = NodeTest(honest)
    found, outside = rounded(20_000, 0.002, 9), np.arange(20_000) % 200 == 0
    found.distance[outside], found.recomputed[outside] = 1.0, -np.inf
    assert not test.look(*found).caught


def test_a_gpu_that_measures_itself_leaves_nothing_of_what_is_shipped_for_its_type() -> None:
    calibration, own = Calibration(), NodeArithmetic("transformers", "bfloat16", "cuda")
    found = rounded(ENOUGH, 0.002)
    calibration.add(own, *found, prompts=np.arange(ENOUGH))
    assert calibration.honest(OWN).off == calibration.means[own].off < SHIPPED[OWN].off
    assert widest(calibration.means).off == SHIPPED[OWN].off, "it is still there for whoever asks for all"


def test_it_is_asked_for_only_where_somebody_rests_on_it() -> None:
    calibration = Calibration()
    kinds = {"exact": NodeArithmetic("vllm", "float32", "cpu"), "rounds": NodeArithmetic("vllm", "bfloat16", "cpu")}
    plan = AuditPlan(b"s" * 32, 1, Standing(StandingRules(checks=True)), calibration, kind_of=lambda peer: ToldKind(kinds[peer]))
    from tests.unit.test_audit_plan import group, trajectory  # the plans of audits as those tests make them

    for i, peer in enumerate(kinds):
        plan.whole(group(i, trajectory(peer)))
    exact, rounds = plan.next(1 << 30)
    assert plan.wants_own([exact]) == 0 and plan.wants_own([exact, rounds]) == 1_024
    given = Calibration.of(to_json({OWN: HonestMeans()}, WHOLE), print)
    assert not given.wants_own(OWN)
