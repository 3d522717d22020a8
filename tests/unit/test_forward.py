"""Packed rows, shared prompts and a vocabulary in chunks give what a plain padded forward gives, with a bound on memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from learner.trainer import policy
from learner.trainer.forecast.live import LiveBytes
from learner.trainer.forward import attention, layout
from learner.trainer.forward.forward import TokenForward, can_checkpoint
from learner.trainer.forward.layout import RowTokens, packed, packed_tokens
from learner.trainer.forward.saved import layers_to_keep, saved_bytes
from learner.trainer.forward.vocabulary import LogitForm, token_logprobs
from learner.trainer.logit_chunks import LogitChunk
from learner.trainer.settings import TrainerConfig
from learner.trajectory import Gap
from p2p.errors import UsageError
from p2p.few_sizes import FEW_SIZES, filled_up, sizes_up_to

VOCABULARY = 101

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip

MODELS = {
    "grouped heads, tied": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE),
    "softcap": Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # else all logits are alike
    return model


def rows_of(seed: int, prompts: int = 3, samples: int = 4) -> list[RowTokens]:
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, VOCABULARY, n))

    rows = []
    for _ in range(prompts):
        prompt = tokens(int(rng.integers(1, 12)))
        for _ in range(int(rng.integers(1, samples + 1))):
            completion = tokens(int(rng.integers(1, 20)))
            gaps = (Gap(1, 3), Gap(5, 6)) if len(completion) > 7 else ()
            rows.append(RowTokens(prompt, completion, gaps))
    return rows


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_packed_is_padded_in_value_and_gradient(name: str, checkpoint: bool, share: bool, multiple: int) -> None:
    ours, plain = model_of(MODELS[name]), model_of(MODELS[name])
    forward = TokenForward(ours, share_prompts=share, checkpoint_layers=checkpoint)
    forward.multiple = multiple
    assert forward.reason == ""
    padded = TokenForward(plain)
    padded.reason = "for this test"
    plain.set_attn_implementation("sdpa")
    for seed in range(3):
        rows = rows_of(seed)
        a, b = forward(rows, temperature=0.7), padded(rows, temperature=0.7)
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(a.entropy, b.entropy, rtol=1e-4, atol=5e-5)
        assert len(a.logprobs) == sum(len(r.completion) - sum(g.stop - g.start for g in r.given) for r in rows)
        generator = torch.Generator().manual_seed(seed)
        w, u = (torch.randn(len(a.logprobs), generator=generator) for _ in range(2))
        for model, found in ((ours, a), (plain, b)):
            model.zero_grad()
            (found.logprobs * w + found.entropy * u).sum().backward()
        for x, y in zip(ours.parameters(), plain.parameters(), strict=True):
            assert x.grad is not None and y.grad is not None
            assert float((x.grad - y.grad).abs().max()) <= 1e-4 * max(1.0, float(y.grad.abs().max()))


def test_in_bfloat16_on_a_processor_few_sizes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is a kernel that oneDNN compiles and torch keeps."""
    model, sizes = model_of(MODELS["llama"]), set[tuple[int, ...]]()
    own = torch.nn.functional.scaled_dot_product_attention

    def seen(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.add((query.shape[2], key.shape[2]))
        return own(query, key, *args, **kwargs)

    lengths = set[int]()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: lengths.add(given[0].shape[1]))
    assert TokenForward(model_of(MODELS["llama"])).multiple == 1
    forward = TokenForward(model, bfloat16=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    sizes.clear()
    lengths.clear()
    for seed in range(12):
        forward(rows_of(seed, prompts=4, samples=6))
    assert len(lengths) > 1 and {n % FEW_SIZES for n in lengths} == {0}
    assert sizes == {(32, 32), (32, 64)}
    assert [sizes_up_to(n) for n in (32, 256, 1024, 4096)] == [1, 8, 24, 40]
    assert [filled_up(n, 32) for n in (1, 32, 33, 512, 513, 1025, 4000)] == [32, 32, 64, 512, 576, 1152, 4096]


def test_a_model_that_cannot_be_packed_runs_padded_and_says_why() -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = model_of(config)
    model.get_decoder = lambda: (_ for _ in ()).throw(AttributeError("no decoder"))
    forward = TokenForward(model)
    assert "no decoder" in forward.reason
    rows = rows_of(1)
    with torch.no_grad():
        logprobs, _ = forward(rows)
        row = rows[0]
        logits = model(torch.tensor([[*row.prompt, *row.completion]])).logits[0, len(row.prompt) - 1 : -1]
    want = torch.log_softmax(logits, -1)[torch.arange(len(row.completion)), torch.tensor(row.completion)]
    kept = [t for t in range(len(row.completion)) if not any(g.start <= t < g.stop for g in row.given)]
    torch.testing.assert_close(logprobs[: len(kept)], want[kept], rtol=1e-4, atol=1e-5)
    kept_for = [saved_bytes(forward, rows, entropy_gradient=wanted)[0] for wanted in (False, True)]
    tokens = sum(len(row.completion) for row in rows)
    assert kept_for[1] - kept_for[0] >= 4 * VOCABULARY * tokens  # no graph of an entropy that nothing uses


WINDOW = 6
WINDOWED = {
    "every layer": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=WINDOW),
    "some layers": Gemma3TextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "no layer": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("multiple", [1, 4, 64])
def test_rows_longer_than_the_sliding_window_are_the_model_s_own(
    name: str, checkpoint: bool, share: bool, multiple: int
) -> None:
    ours, plain = model_of(WINDOWED[name]), model_of(WINDOWED[name])
    plain.set_attn_implementation("sdpa")
    forward = TokenForward(ours, share_prompts=share, checkpoint_layers=checkpoint)
    forward.multiple = multiple
    assert forward.reason == ""
    rows = rows_of(4)
    assert min(len(r.prompt) for r in rows) < WINDOW < max(len(r.prompt) for r in rows)
    found = forward(rows).logprobs
    want = []
    for row in rows:
        logits = plain(torch.tensor([[*row.prompt, *row.completion]])).logits[0, len(row.prompt) - 1 : -1]
        kept = [t for t in range(len(row.completion)) if not any(g.start <= t < g.stop for g in row.given)]
        want.append(torch.log_softmax(logits, -1)[kept, torch.tensor(row.completion)[kept]])
    torch.testing.assert_close(found, torch.cat(want), rtol=1e-4, atol=5e-5)
    found.sum().backward()
    torch.cat(want).sum().backward()
    for x, y in zip(ours.parameters(), plain.parameters(), strict=True):
        assert x.grad is not None and y.grad is not None
        assert float((x.grad - y.grad).abs().max()) <= 1e-4 * max(1.0, float(y.grad.abs().max()))


def test_a_long_row_behind_a_window_is_computed_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is of the row's length squared, and nothing changes."""
    rows = [RowTokens(tuple(range(10)), tuple(range(20, 53)))]
    size = packed_tokens(rows)
    forward, found, made = TokenForward(model_of(WINDOWED["every layer"])), [], []
    for block in (512, 3):
        monkeypatch.setattr(attention, "BLOCK", block)
        with LiveBytes([]) as live:
            found.append(forward(rows).logprobs)
        made.append({shape[-2:] for shape in live.shapes})
    assert (size, size) in made[0] and (size, size) not in made[1] and (WINDOW, 2 * WINDOW - 1) in made[1]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("uses", [False, True])
def test_a_window_that_only_the_model_s_own_mask_knows_runs_padded(uses: bool) -> None:
    config = Qwen2MoeConfig(
        **SHAPE, num_key_value_heads=2, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        use_sliding_window=uses, sliding_window=64,
    )  # fmt: skip
    reason = TokenForward(model_of(config)).reason
    assert ("window is in the model's own mask alone" in reason) == uses and bool(reason) == uses


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.5, 0.0, 0.7), LogitForm(2.0, 5.0, 1.3)])
@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
def test_chunks_of_the_vocabulary_change_nothing(form: LogitForm, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    w, u = torch.randn(7, generator=generator), torch.randn(7, generator=generator)

    x = form.scale * (hidden @ weight.T + bias)
    x = (form.softcap * torch.tanh(x / form.softcap) if form.softcap else x) / form.temperature
    log_p = torch.log_softmax(x, 1)
    plain = (log_p[torch.arange(7), targets], -(log_p.exp() * log_p).sum(1))
    found = token_logprobs(hidden, weight, bias, targets, form, chunk=LogitChunk(chunk, 256))
    torch.testing.assert_close(tuple(found), plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad((found.logprobs * w + found.entropy * u).sum(), (hidden, weight, bias)),
        torch.autograd.grad((plain[0] * w + plain[1] * u).sum(), (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_products_of_the_vocabulary_round_what_they_take_and_not_their_sums() -> None:
    """In bfloat16's forwards, where oneDNN rounds for this processor: logits have float32's digits, of rounded weights."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 256, generator=generator) for n in (64, 2000))
    targets, form = torch.randint(0, 2000, (64,), generator=generator), LogitForm(0.1)
    asked = (hidden.requires_grad_(), weight.requires_grad_(), None, targets, form)
    exact, rounded = token_logprobs(*asked), token_logprobs(*asked, rounded=True)
    of_rounded = token_logprobs(hidden.bfloat16().float(), weight.bfloat16().float(), None, targets, form)
    has_products = bool((rounded.logprobs - exact.logprobs).abs().max() > 1e-4)  # there is no way to ask
    torch.testing.assert_close(rounded, of_rounded if has_products else exact, rtol=0, atol=1e-4)
    if "amx_bf16" in Path("/proc/cpuinfo").read_text():
        assert has_products
    gradients = [torch.autograd.grad(one.logprobs.sum(), (hidden, weight)) for one in (exact, rounded)]
    for of_exact, got in zip(*gradients, strict=True):
        off = float((of_exact - got).norm() / of_exact.norm())
        # Where nothing is rounded (an AMD EPYC with AVX512_BF16, say) another kernel may still add in another order: 5e-7.
        assert off < 0.01 and (off > 1e-5) == has_products
    again = token_logprobs(*asked)
    torch.testing.assert_close(again, exact, rtol=0, atol=0)


def test_nothing_is_left_of_a_forward_whose_bytes_were_counted() -> None:
    """A layer's copy of its weights in bfloat16, of two forwards, would stay with the trainer."""
    forward = TokenForward(model_of(MODELS["llama"]), checkpoint_layers=True, bfloat16=True)
    with LiveBytes([*forward.model.parameters(), *forward.model.buffers()]) as live:
        assert layers_to_keep(forward, 64, 1e12) == 2
    gc.collect()
    assert live.peak > 100_000 and live.now < 1_000, "bytes"


def test_what_is_kept_for_the_backward_is_bounded() -> None:
    """No [T, V] is kept, and with checkpointing little more than a layer's input each."""
    config = Qwen3Config(**{**SHAPE, "vocab_size": 5000, "num_hidden_layers": 8}, num_key_value_heads=2, head_dim=8)
    rows = [RowTokens(tuple(range(1, 9)), tuple(range(9 + i, 73 + i))) for i in range(4)]
    tokens = packed_tokens(rows)
    before = TokenForward(model_of(config))
    before.reason = "as it was"
    before.model.set_attn_implementation("sdpa")  # type: ignore[operator]
    padded, largest = saved_bytes(before, rows)
    assert largest >= 4 * 5000 * 4 * 63
    kept, largest = saved_bytes(TokenForward(model_of(config), checkpoint_layers=True), rows)
    assert kept <= padded / 5
    assert largest < 4 * 5000 * tokens / 4, "nothing of tokens x vocabulary"


CALLED_OTHERWISE = {
    "h": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=8, n_head=4, n_positions=128),
    "blocks": MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=8, n_heads=4, max_seq_len=128),
}


@pytest.mark.parametrize("name", CALLED_OTHERWISE)
def test_layers_are_checkpointed_whatever_the_model_calls_them(name: str) -> None:
    rows = [RowTokens(tuple(range(1, 9)), tuple(range(9 + i, 73 + i))) for i in range(4)]
    ours, plain = model_of(CALLED_OTHERWISE[name]), model_of(CALLED_OTHERWISE[name])
    lean, full = TokenForward(ours, checkpoint_layers=True), TokenForward(plain)
    assert can_checkpoint(ours) and saved_bytes(lean, rows)[0] < saved_bytes(full, rows)[0] / 2
    for forward in (lean, full):
        forward(rows).logprobs.sum().backward()
    for x, y in zip(ours.parameters(), plain.parameters(), strict=True):
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
def test_layers_are_kept_as_far_as_there_is_room(bfloat16: bool) -> None:
    """More memory, and the same bits. In bfloat16 a layer keeps a copy of its weights as well, whatever the tokens are."""
    rows = [RowTokens(tuple(range(1, 9)), tuple(range(9 + i, 73 + i))) for i in range(4)]
    model = model_of(LlamaConfig(**{**SHAPE, "num_hidden_layers": 4}))
    forward = TokenForward(model, checkpoint_layers=True, bfloat16=bfloat16)
    assert forward.layers == 4 and layers_to_keep(forward, 264, 0.0) == 0 and layers_to_keep(forward, 264, 1e12) == 4
    taken, gradients = [], []
    for kept in range(5):
        forward.kept = kept
        taken.append(saved_bytes(forward, rows).total)
        model.zero_grad()
        forward(rows).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert taken == sorted(set(taken))
    room = 2.5 * (taken[1] - taken[0])
    assert layers_to_keep(forward, packed_tokens(rows), room) in (2, 3)
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))


def test_a_model_without_such_layers_trains_without_checkpoints_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy, "CHECKPOINT_FROM", 0)
    model = model_of(CTRLConfig(vocab_size=VOCABULARY, n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=64))

    def forward(how: Any) -> TokenForward:
        return policy.token_forward(model, TrainerConfig(model="", checkpoint_dir="", activation_checkpointing=how))

    assert forward("auto")(rows_of(1)).logprobs.requires_grad
    assert any("not checkpointed" in record.getMessage() and "CTRL" in record.getMessage() for record in caplog.records)
    assert forward("off")(rows_of(1)).logprobs.requires_grad
    with pytest.raises(UsageError, match=r'activation_checkpointing = "on": the model \(CTRLLMHeadModel\) has no layers'):
        forward("on")


# --- the layout ------------------------------------------------------------------------------------------------------


@st.composite
def some_rows(draw: st.DrawFn) -> list[RowTokens]:
    prompts = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=3))
    row = st.builds(
        RowTokens, st.sampled_from(prompts), st.lists(st.integers(0, 9), min_size=1, max_size=9).map(tuple),
        st.sampled_from([(), (Gap(1, 2),)]),
    )  # fmt: skip
    rows = draw(st.lists(row, min_size=1, max_size=8))
    return [r if len(r.completion) > 2 else r._replace(given=()) for r in rows]


@settings(max_examples=200, deadline=None)
@given(rows=some_rows(), share=st.booleans(), mask=st.sampled_from([4, 1 << 24]), multiple=st.sampled_from([1, 4, 64]))
def test_every_token_reads_exactly_its_row(rows: list[RowTokens], share: bool, mask: int, multiple: int) -> None:
    """What each predicting token sees, by the layout's buckets, is its row up to there."""
    before, layout.LARGEST_MASK = layout.LARGEST_MASK, mask
    try:
        laid = packed(rows, share_prompts=share, multiple=multiple)
        tokens = packed_tokens(rows, share_prompts=share)
        assert len(laid.ids) == filled_up(tokens, multiple) >= tokens
    finally:
        layout.LARGEST_MASK = before
    sees: dict[int, list[int]] = {}
    for bucket in laid.buckets:
        head = list(range(bucket.prefix.start, bucket.prefix.stop)) if bucket.prefix else []
        for stretch in bucket.stretches:
            for at in range(stretch.start, stretch.stop):
                assert at not in sees
                sees[at] = [*head, *range(stretch.start, at + 1)]
    assert sorted(sees) == list(range(tokens))
    number = iter(zip(laid.predicts, laid.targets, strict=True))
    for row in rows:
        for t, token in enumerate(row.completion):
            if any(g.start <= t < g.stop for g in row.given):
                continue
            at, target = next(number)
            assert target == token
            assert [laid.ids[i] for i in sees[at]] == [*row.prompt, *row.completion[:t]]
            assert [laid.positions[i] for i in sees[at]] == list(range(len(row.prompt) + t))
    assert next(number, None) is None
