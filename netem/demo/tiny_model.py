"""Small models made on the spot: a character tokenizer, a Qwen3-shaped network and a short supervised warm-up.

Must not know versions, nodes or rewards. For demos, tests and machines that cannot reach a model hub.
"""

from __future__ import annotations

import string
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt
from learner.trainer.model import CompletionLogprobs, completion_logprobs
from p2p.errors import UsageError

ALPHABET = string.digits + string.ascii_lowercase + " +-*/=>?."
"""With pad, eos and unk: 48 tokens, enough for every built-in task whatever model was built first."""

SHAPES: dict[str, dict[str, int]] = {
    "0.4m": {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256},
    "20m": {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1536},
}
"""Head size is 32, the heads fill the hidden size, and there are half as many key/value heads."""

AVERAGED = 5
"""Batches whose mean loss ends a warm-up: one alone swings by 0.02 nats."""

WARM_UP_STEPS = 300
"""Supervised steps at most, unless asked otherwise: several times what the built-in tasks of one turn take."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def char_tokenizer(characters: str = "") -> Any:
    """A Hugging Face tokenizer of one token per character: ALPHABET plus `characters`. Decoding inserts nothing."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = dict.fromkeys(ALPHABET + characters)
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *known])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _network(tokenizer: Any, size: str, seed: int, rope_theta: float = 10_000.0) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[size]
    heads = shape["hidden_size"] // 32
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # building a model must not disturb the caller's random numbers
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def build_random_model(
    folder: Path, *, size: str = "20m", characters: str = "", seed: int = 0, scale: float = 1.0
) -> Path:
    """An untrained model under `folder` ("20m": about 19 M parameters); for throughput and broadcast measurements.

    `scale` multiplies its matrices: above 1 each token depends more sharply on those before it."""
    tokenizer = char_tokenizer(characters)
    model = _network(tokenizer, size, seed)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim > 1):
            matrix.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_demo_model(
    folder: Path,
    task: Task,
    *,
    seed: int = 0,
    target: float = 0.2,
    nats: float = 0.0,
    steps: int = WARM_UP_STEPS,
    batch: int = 64,
    lr: float = 2e-3,
    ramp: int = 20,
    rope_theta: float = 10_000.0,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """A model that has just begun to solve `task`, under `folder`: right often enough for rewards to differ.

    AdamW on task solutions with a linear ramp, until the probability of sampling a solution whole (mean over a batch of
    exp(sum of its logprobs)) reaches `target`, until the mean loss of AVERAGED batches is at most `nats` a token, or for `steps`.
    What ends it matters: skill comes within some 20 steps, and a fixed count leaves one seed at 3 % and another at 60 %. Takes
    seconds, on a busy machine minutes: `say` hears how far it is. `rope_theta`: the base of the rotary positions; with a smaller
    one more of their frequencies tell neighbours in a short text apart. UsageError when the task has no solutions.
    """
    say("making the model")
    tokenizer = char_tokenizer("".join(task.characters()))
    model = _network(tokenizer, "0.4m", seed, rope_theta)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    model.train()
    losses = deque[float](maxlen=AVERAGED)
    for step in range(steps):
        logprobs, mask, _ = solution_logprobs(model, tokenizer, task, step, batch)
        solved = float(logprobs.detach().sum(dim=1).exp().mean())
        loss = -logprobs.sum() / mask.sum()
        losses.append(loss.item())
        mean = sum(losses) / len(losses)
        until = f"solves {solved:.1%}, goes on until {target:.0%}" if not nats else f"{mean:.2f} nats, goes on until {nats:.2f}"
        say(f"warm-up step {step} of at most {steps}, {until}")
        if solved >= target or (len(losses) == AVERAGED and mean <= nats):
            break
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / ramp)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def solution_logprobs(model: Any, tokenizer: Any, task: Task, step: int, batch: int) -> CompletionLogprobs:
    """The model's log probabilities of the solutions of `step`'s `batch` problems. Those are drawn from the far end of the
    training stream (index 10**9 on), never from the held-out ones. UsageError when the task has no solutions."""
    prompts, answers = [], []
    for i in range(batch):
        prompt = task.prompt(10**9 + step * batch + i)
        prompts.append(encode_prompt(tokenizer, prompt))
        said = task.transcript(prompt)
        if said:  # the model's turns end with the eos token; the environment's follow as they are
            ends = [(tokenizer.eos_token_id,) if turn % 2 == 0 else () for turn in range(len(said))]
            texts = [tokenizer.encode(text, add_special_tokens=False) for text in said]
            answers.append(tuple(i for text, end in zip(texts, ends, strict=True) for i in (*text, *end)))
            continue
        solution = task.solution(prompt)
        if solution is None:
            raise UsageError(f"task {task.name} has no solutions for a supervised warm-up")
        answers.append((*tokenizer.encode(solution, add_special_tokens=False), tokenizer.eos_token_id))
    return completion_logprobs(model, prompts, answers)


if __name__ == "__main__":  # FOLDER SCALE: a small random model
    build_random_model(Path(sys.argv[1]), size="0.4m", scale=float(sys.argv[2]))
