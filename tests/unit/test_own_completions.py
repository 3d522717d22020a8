"""The auditor makes completions as their seeds draw them, with any architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from learner.audit.claims import Claim
from learner.audit.own_completions import OwnRow, SampledBy, own_completions
from learner.audit.scorer import draw
from learner.rollouts.stop_strings import StopStrings

VOCABULARY, POSITIONS = 50, 48
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 64, "max_position_embeddings": POSITIONS,
}  # fmt: skip
MODELS = {
    "rotary": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
    "learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS)
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(5)
    made = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    made.generation_config.temperature, made.generation_config.repetition_penalty = 0.3, 5.0
    return made


def one_by_one(model: Any, claim: Claim, length: int) -> Claim:
    """Without a cache, padding or neighbours."""
    while len(claim.completion_ids) < length:
        longer = replace(
            claim, completion_ids=(*claim.completion_ids, 0), logprobs=(*claim.logprobs, 0.0), first=len(claim.completion_ids)
        )
        [drawn] = draw(model, [longer], 0.8, 0.9)
        claim = replace(
            claim, completion_ids=(*claim.completion_ids, int(drawn.tokens[0])),
            logprobs=(*claim.logprobs, float(drawn.logprobs[0])),
        )  # fmt: skip
    return claim


def test_each_token_is_the_one_that_the_seed_draws(model: Any) -> None:
    rows = [OwnRow(tuple(range(1, 2 + i)), 90 + i, most) for i, most in enumerate((20, 3, 11, 43, 4, 0))]
    wanted = [one_by_one(model, Claim(row.prompt_ids, (), (), row.seed), row.most) for row in rows]
    found = own_completions(model, rows, SampledBy(0.8, 0.9))
    assert [c.completion_ids for c in found] == [c.completion_ids for c in wanted]
    assert [c.logprobs for c in found] == [pytest.approx(c.logprobs, abs=1e-4) for c in wanted]
    assert [(c.prompt_ids, c.seed) for c in found] == [row[:2] for row in rows]


def test_a_stop_token_a_string_and_the_models_positions_end_one(model: Any) -> None:
    rows = [OwnRow((1, 2 + i), i, 1_000) for i in range(8)]
    whole = [one_by_one(model, Claim(row.prompt_ids, (), (), row.seed), POSITIONS - 2).completion_ids for row in rows]
    stop, pair = whole[0][10], whole[1][20:22]
    strings = StopStrings(lambda ids: "".join(chr(65 + token) for token in ids), ["".join(chr(65 + token) for token in pair)])
    sampled = SampledBy(0.8, 0.9, {stop}, strings)
    for claim, ids in zip(own_completions(model, rows, sampled), whole, strict=True):
        ends = [at + 1 for at, token in enumerate(ids) if token == stop]
        ends += [at + 2 for at in range(len(ids)) if ids[at : at + 2] == pair]
        assert claim.completion_ids == ids[: min([*ends, len(ids)])]
    short = own_completions(model, rows, SampledBy(0.8, 0.9, longest=5))
    assert [claim.completion_ids for claim in short] == [ids[:5] for ids in whole]
