"""The auditor goes on with completions as their seeds draw, with any architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from learner.audit.claims import Claim
from learner.audit.continued import continued
from learner.audit.scorer import draw

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


def test_each_goes_on_as_its_seed_draws(model: Any) -> None:
    lengths = (20, 3, 11, 43, 4, 0)
    bare = [Claim(tuple(range(1, 2 + i)), (), (), seed=90 + i) for i in range(6)]
    wanted = [one_by_one(model, claim, length) for claim, length in zip(bare, lengths, strict=True)]
    begun = [
        replace(c, completion_ids=c.completion_ids[:held], logprobs=c.logprobs[:held])
        for c, held in zip(wanted, (0, 2, 9, 17, 4, 0), strict=True)
    ]  # fmt: skip
    found = continued(model, begun, lengths, (), temperature=0.8, top_p=0.9)
    assert [c.completion_ids for c in found] == [c.completion_ids for c in wanted]
    assert [c.logprobs for c in found] == [pytest.approx(c.logprobs, abs=1e-4) for c in wanted]


def test_a_stop_token_ends_one_and_the_models_positions_end_all(model: Any) -> None:
    bare = [Claim((1, 2 + i), (), (), seed=i) for i in range(8)]
    whole = [one_by_one(model, claim, POSITIONS - 2) for claim in bare]
    stop = whole[0].completion_ids[10]
    found = continued(model, bare, [1_000] * 8, {stop}, temperature=0.8, top_p=0.9)
    for claim, of in zip(found, whole, strict=True):
        ids = of.completion_ids
        assert claim.completion_ids == ids[: ids.index(stop) + 1 if stop in ids else len(ids)]
    again = continued(model, found, [len(claim.completion_ids) for claim in found], {stop}, temperature=0.8, top_p=0.9)
    assert again == found
