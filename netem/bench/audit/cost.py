"""`python -m netem.bench.audit.cost SIZE`: processor time of an auditor's parts against generating, for one size of model.

Random weights, one thread, one process. Prints one line of JSON. Sizes: "0.4m", "20m" (as the demos'), "135m" (as SmolLM2-135M).
A dense delta changes 60 % of the words by a few units of the last place, a sparse one 1 %.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.audit.auditor import Auditor
from learner.audit.auditor_settings import AuditorSettings
from learner.audit.claims import Claim
from learner.trainer.model import served_tensors
from learner.trainer.settings import LoraSection
from netem.demo.tiny_model import build_random_model
from node.engine.port import StateFile
from node.engine.settings import TransformersSettings
from node.engine.transformers import TransformersCore
from p2p.codec import warm
from p2p.identity import Identity
from p2p.layout import DEFAULT_SEGMENT, Layout
from p2p.protocol.rollout import Generate
from p2p.version import Version
from p2p.weights.encode import chunk_bytes_for, encode_version
from p2p.weights.manifest import CODEC, Header, ManifestSigner
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkFolder

RUN = "cost"
LANES, PROMPT, ANSWER = 64, 32, 128
"""Sequences that the engine decodes at once, tokens of a prompt, and of an answer."""

SHORT = 32
"""Tokens of each answer that are really generated: what a token takes is scaled up. Prompts are read in that time too."""

SHARE, TOKENS = 0.02, 16_384
"""What is checked of a version's tokens, and how many it has."""

SHARES = {"sparse": 0.01, "dense": 0.6}
"""Of the words, what a delta changes."""


def main(size: str) -> dict[str, Any]:
    """CPU seconds of each part."""
    torch.set_num_threads(1)
    warm()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _build(folder / "model", size)
        served = served_tensors(model)
        out: dict[str, Any] = {"size": size, "parameters": sum(p.numel() for p in model.parameters())}
        vocabulary = int(model.config.vocab_size)
        del model
        layout = Layout.build([(tensor, dtype, bits.shape) for tensor, (dtype, bits) in served.items()])
        state = FlatState.create(folder / "0.state", layout)
        for tensor, (_, bits) in served.items():
            state.write_tensor(tensor, bits)
        del served
        out |= _audited(folder, state, vocabulary, rng)
        out["generated_tokens"], out["generate_s"] = _generate(folder, layout, vocabulary, rng)
    each = out["version_generate_s"] = out["generate_s"] / out["generated_tokens"] * TOKENS
    for kind in ("sparse", "dense"):
        out[f"{kind}_share"] = (out[f"{kind}_s"] + out["fill_s"] + out["score_s"]) / each
    out["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return out


def _audited(folder: Path, state: FlatState, vocabulary: int, rng: np.random.Generator) -> dict[str, Any]:
    """Of an auditor that is brought to four versions of which `state` is the first, and checks completions under the last."""
    store, identity = ChunkFolder(folder / "chunks"), Identity.from_seed(b"c" * 32)
    parts, newest = [_publish(store, identity, 0, state, None)], state
    for step, kind in enumerate(("dense", "sparse", "dense"), 1):
        base, newest = newest, _changed(newest, SHARES[kind], rng)
        parts.append(_publish(store, identity, step, newest, base))
    auditor = Auditor(AuditorSettings(
        model=str(folder / "model"), lora=LoraSection().model_dump(), chunks=str(store.root), run=RUN, epoch=1,
        head_key=identity.public_key.hex(), device="cpu", dtype="float32", served_dtype="bfloat16", threads=1, window=4,
        temperature=1.0, top_p=1.0, stop_ids=[], stop=[], longest=ANSWER,
    ))  # fmt: skip
    out: dict[str, Any] = {"whole_s": _spent(partial(auditor.follow, parts[0]))}
    auditor.follow(parts[1])
    auditor.score([[(Version(1, 1), _claim(rng, vocabulary))]])  # what is done once is done
    for kind, of_version in zip(("sparse", "dense"), parts[2:], strict=True):
        out[f"{kind}_s"] = _spent(partial(auditor.follow, of_version))
    claims = [[(Version(1, 3), _claim(rng, vocabulary))] for _ in range(round(SHARE * TOKENS / ANSWER))]
    held = auditor.window.state
    assert held is not None
    auditor.window.take_stale()
    out["checked_tokens"], out["fill_s"] = ANSWER * len(claims), _spent(partial(auditor.model.fill, held, held.layout.by_name))
    out["score_s"] = _spent(partial(auditor.score, claims))
    return out


def _build(folder: Path, size: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    if size != "135m":
        build_random_model(folder, size=size)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, dtype="float32",
    ))  # fmt: skip
    model.save_pretrained(folder)
    return model


def _changed(old: FlatState, share: float, rng: np.random.Generator) -> FlatState:
    new = FlatState.in_memory(old.layout)
    new.bytes[...] = old.bytes
    for spec in old.layout.tensors:
        words = new.tensor(spec.name).reshape(-1)
        where = rng.random(len(words), np.float32) < share
        words[where] += rng.integers(1, 4, int(where.sum()), words.dtype)
    return new


def _publish(store: ChunkFolder, identity: Identity, step: int, state: FlatState, base: FlatState | None) -> list[bytes]:
    now, chunk = int(time.time()), chunk_bytes_for(state.layout.nbytes // 3)
    header = Header(
        run=RUN, version=Version(1, step), kind="delta" if base else "anchor", base=Version(1, step - 1) if base else None,
        base_digest=base.digest() if base else b"", codec=CODEC, segment_bytes=DEFAULT_SEGMENT, chunk_bytes=chunk, created=now,
        expires=now + 3600, layout=state.layout,
    )  # fmt: skip
    signer = ManifestSigner(identity, header)
    parts = [signer.header_part]
    for s in encode_version(state, base, store, segment_bytes=DEFAULT_SEGMENT, chunk_bytes=chunk):
        parts.append(signer.record(s.index, s.size, s.digests))
    return [*parts, signer.seal(state.tensor_digests(), state.digest())]


def _claim(rng: np.random.Generator, vocabulary: int) -> Claim:
    prompt, answer = (tuple(rng.integers(3, vocabulary, n).tolist()) for n in (PROMPT, ANSWER))
    return Claim(prompt, answer, (-1.0,) * ANSWER, seed=1)


def _generate(folder: Path, layout: Layout, vocabulary: int, rng: np.random.Generator) -> tuple[int, float]:
    """Tokens that the node's engine made, and seconds."""
    core = TransformersCore(TransformersSettings(dtype="float32", device="cpu"))
    core.load(folder / "model", StateFile(folder / "0.state", layout, Version(1, 0)))
    for i in range(LANES):
        prompt = tuple(rng.integers(3, vocabulary, PROMPT).tolist())
        core.add(Generate(str(i), prompt, SHORT, (0,), seed=i, min_version=Version(1, 0)))
    made = 0

    def run() -> None:
        nonlocal made
        while core.has_work():
            made += sum(event.count for event in core.step())

    spent = _spent(run)
    core.close()
    return made, spent


def _spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
