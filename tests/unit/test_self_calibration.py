"""The auditor measures itself what bfloat16 does to the run's model: as nodes that compute so, and whatever nodes claim."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.audit.auditor import Auditor
from learner.audit.bets import HonestMeans
from learner.audit.calibration import ENOUGH, SHIPPED, WHOLE, Calibration, DrawnAt, NodeArithmetic, to_json, widest
from learner.audit.claims import Claim, prompt_number
from learner.audit.continued import continued
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.measuring import STRETCH
from learner.audit.plan import AuditPlan, ToldKind
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import draw, score
from learner.audit.self_calibration import MOST_OF_PROMPT, SampledBy, as_drawn, measure_bfloat16
from learner.audit.sequential import NodeTest
from learner.audit.statistic import distances, draws
from learner.audit.wire import BFLOAT16_COLUMNS, Frames, read_bfloat16, read_deviations, score_answer, score_request
from learner.standing.standing import Standing, StandingRules
from learner.trajectory import Group
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


def completions(model: Qwen3ForCausalLM, count: int, length: int, prompts: int = 10) -> list[Claim]:
    """As an exact node makes them, token by token, each in its end."""
    out = [Claim((1, 2, 3 + i % prompts), (), (), seed=i, ended=True) for i in range(count)]
    for _ in range(length):
        longer = [replace(c, completion_ids=(*c.completion_ids, 0), logprobs=(*c.logprobs, 0.0)) for c in out]
        drawn = draw(model, [replace(c, first=len(c.completion_ids) - 1) for c in longer])
        for i, (claim, of) in enumerate(zip(out, drawn, strict=True)):
            token, logprob = int(of.tokens[0]), float(of.logprobs[0])
            out[i] = replace(claim, completion_ids=(*claim.completion_ids, token), logprobs=(*claim.logprobs, logprob))
    return out


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


def test_it_comes_to_what_a_node_comes_to_that_computes_so(model: Qwen3ForCausalLM) -> None:
    claims = completions(model, 80, 24, prompts=16)
    before = [parameter.clone() for parameter in model.parameters()]
    found = measure_bfloat16(model, claims, score(model, claims), 2_000).found
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, model.parameters(), strict=True))
    assert len(found.distance) == 80 * 24
    node = Qwen3ForCausalLM(model.config).to(torch.bfloat16).eval()
    node.load_state_dict(model.state_dict())
    theirs = completions(node, 80, 24, prompts=16)
    judged = Deviations(*(np.concatenate(c) for c in zip(*score(model, theirs), strict=True)))
    own, their = (np.abs(x.claimed - x.recomputed).mean() for x in (found, judged))
    assert 0.7 < own / their < 1.4 and own > 1e-3, (own, their)
    assert 0.5 < (found.distance > 0).sum() / (judged.distance > 0).sum() < 2


def with_odd(claim: Claim, place: int) -> Claim:
    """Another token than the drawn one at `place`."""
    ids = claim.completion_ids
    place %= len(ids)
    return replace(claim, completion_ids=(*ids[:place], (ids[place] + 31) % VOCABULARY, *ids[place + 1 :]))


def test_nothing_counts_behind_what_a_node_may_have_chosen(model: Qwen3ForCausalLM) -> None:
    """A completion's end, and what an environment gave, are the head's own record: nothing is made behind them."""
    claims = completions(model, 4, 20, prompts=4)
    late = replace(claims[2], first=3)
    told = replace(claims[3], given=((5, 9),))
    mixed = [claims[0], late, told]
    scored = score(model, mixed)
    assert as_drawn(scored[0]) == 20 and as_drawn(score(model, [with_odd(claims[1], 7)])[0]) == 7
    found = measure_bfloat16(model, mixed, scored, 1_000).found
    assert len(found.distance) == 20 + 0 + 5
    honest = measure_bfloat16(model, claims, score(model, claims), 1_000).found
    np.testing.assert_allclose(found.recomputed[:20], honest.recomputed[:20], atol=1e-4)
    assert len(measure_bfloat16(model, claims, score(model, claims), 30).repeated) == 30
    same = [replace(claims[0], seed=claims[0].seed) for _ in range(30)]
    again = measure_bfloat16(model, same, score(model, same), 10_000)
    assert len(again.found.distance) == len(again.repeated) == MOST_OF_PROMPT
    assert not again.repeated[:20].any() and again.repeated[20:].mean() > 0.5, "but for what is all but certain"
    seen = SeenTokens()
    first, second = (measure_bfloat16(model, claims, score(model, claims), 1_000, seen=seen).repeated for _ in range(2))
    assert first.mean() < 0.2 and second.mean() > 0.5, "known again in a later call"
    nothing = measure_bfloat16(model, [late], score(model, [late]), 100)
    assert not len(nothing.found.distance) and not len(nothing.repeated)
    gone = Deviations(np.array([np.nan]), np.array([-1.0]), np.array([-np.inf]), np.array([100.0]))
    assert as_drawn(gone) == 0


@pytest.mark.parametrize("sampled", [SampledBy(stop_ids={7}), SampledBy(0.7, 0.8, {7})])
def test_whatever_a_node_writes_the_same_is_measured(model: Qwen3ForCausalLM, sampled: SampledBy) -> None:
    """Odd tokens at places of its choice, at the very first and at the end; a stop token where none was drawn; and a part."""
    asked = (sampled.temperature, sampled.top_p)
    bare = [Claim((1, 2, 3 + i), (), (), seed=10 + i) for i in range(6)]
    honest = continued(model, bare, [MOST_OF_PROMPT] * 6, {7}, temperature=asked[0], top_p=asked[1])
    assert len({len(claim.completion_ids) for claim in honest}) > 2, "some are ended by the stop token"
    honest = [replace(claim, ended=True) for claim in honest]
    stopped = replace(honest[2], completion_ids=(*honest[2].completion_ids[:4], 7), logprobs=honest[2].logprobs[:5])
    part = replace(honest[3], ended=False, stop=9)
    written = [with_odd(honest[0], 0), with_odd(honest[1], 5), stopped, part, with_odd(honest[4], -1), honest[5]]
    found, wanted = (
        measure_bfloat16(model, of, score(model, of, *asked), 10_000, sampled).found for of in (written, honest)
    )  # fmt: skip
    assert len(wanted.distance) == sum(len(claim.completion_ids) for claim in honest)
    for column, of_honest in zip(found, wanted, strict=True):
        np.testing.assert_allclose(column, of_honest, atol=1e-4)


def test_short_completions_make_room_for_others(model: Qwen3ForCausalLM) -> None:
    """How long one becomes is not known before: of a prompt's others, and up to the tokens that are asked for, more are made."""
    stop_ids = set(range(0, VOCABULARY, 4))
    claims = [Claim((1, 2, 3 + i % 2), (), (), seed=i) for i in range(24)]
    scored = [Deviations(*(np.empty(0) for _ in Deviations._fields))] * 24
    ends = continued(model, claims, [99] * 24, stop_ids, temperature=1.0, top_p=1.0)
    made = sum(len(claim.completion_ids) for claim in ends)
    assert 24 < made < 2 * MOST_OF_PROMPT
    assert len(measure_bfloat16(model, claims, scored, 10_000, SampledBy(stop_ids=stop_ids)).repeated) == made
    assert len(measure_bfloat16(model, claims, scored, 40, SampledBy(stop_ids=stop_ids)).repeated) == 40
    assert len(measure_bfloat16(model, claims, scored, 10_000, SampledBy(longest=3)).repeated) == 24 * 3


def test_an_auditor_measures_beside_what_it_scores(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=2, now=time.time())
    auditor = Auditor(world.settings(2))
    for parts in world.parts:
        auditor.follow(parts)
    calibration = Calibration()
    plan = AuditPlan(b"s" * 32, 1, Standing(StandingRules(checks=True)), calibration, kind_of=lambda peer: ToldKind(OWN))
    for trajectory in world.generate(range(12), [0, 1], 6):
        plan.whole(Group(trajectory.seed, 0, (trajectory,)))
    checks = plan.next(1 << 30)
    [message] = Frames().feed(score_request(checks, 50))
    [answer] = Frames().feed(auditor.answer(message))
    read_deviations(answer, checks)
    found, repeated, prompts = read_bfloat16(answer, 50)
    assert len(repeated) == len(found.distance) and repeated.dtype == bool
    asked = {prompt_number(check.prompt_ids) for check in checks}
    assert len(prompts) == len(repeated) and set(prompts.tolist()) <= asked
    assert 30 < len(found.distance) <= 50 and 0 < np.abs(found.claimed - found.recomputed).mean() < 0.1
    [message] = Frames().feed(score_request(checks))
    [answer] = Frames().feed(auditor.answer(message))
    assert not len(read_bfloat16(answer, 0).repeated)
    with pytest.raises(ValueError, match="other tokens in bfloat16"):
        [answer] = Frames().feed(score_answer([], [np.zeros(3)] * BFLOAT16_COLUMNS))
        read_bfloat16(answer, 2)


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
    assert shipped.off == SHIPPED[OWN].off and calibration.wants_own(OWN) == ENOUGH
    assert not plan.own(own(1_000, 0))
    assert calibration.honest(said["stranger"]) == shipped and calibration.wants_own(OWN) == ENOUGH - 1_000
    assert plan.own(own(ENOUGH - 1_000, 1))
    measured = calibration.means[OWN]
    assert measured.quiet == HonestMeans().quiet, "another processor may round less"
    assert calibration.wants_own(OWN) == 0 and measured.off < SHIPPED[OWN].off
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
    assert given.wants_own(OWN) == 0
