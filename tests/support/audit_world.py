"""A small model's versions, published as a head does, and completions that the real engine makes while it installs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.audit.auditor_settings import AuditorSettings
from learner.trainer.adapter.adapted import AdaptedModel
from learner.trainer.adapter.peft_form import adapter_file
from learner.trainer.model import served_tensors
from learner.trainer.settings import LoraSection
from learner.trajectory import Maker, Trajectory
from node.engine.port import StateFile
from node.engine.settings import TransformersSettings
from node.engine.transformers import TransformersCore
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version
from p2p.weights.encode import encode_version
from p2p.weights.manifest import CODEC, Header, ManifestSigner
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkFolder

VOCABULARY, SEGMENT, CHUNK = 60, 4096, 1024
RUN = "run"


class AuditWorld:
    """`rank` above 0: of an adapter. Versions 1.0, 1.1 ... of one model, each a step of random changes from the one before."""

    def __init__(self, folder: Path, *, versions: int, rank: int = 0, now: float) -> None:
        torch.manual_seed(0)
        self.folder, self.identity, self.now = folder, Identity.from_seed(b"a" * 32), now
        self.model_dir = folder / "model"
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=48, head_dim=16, max_position_embeddings=128,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(self.model_dir)
        self.lora = LoraSection(rank=rank)
        if rank:
            (self.model_dir / "adapter_config.json").write_bytes(adapter_file(self.lora, str(self.model_dir)))
        self.store = ChunkFolder(folder / "chunks")
        self.states: list[FlatState] = []
        self.parts: list[list[bytes]] = []
        """the manifest of each version: an anchor, then deltas"""
        adapted = AdaptedModel(model, self.lora) if rank else None
        for step in range(versions):
            if step:
                with torch.no_grad():
                    for _, parameter in adapted.parameters() if adapted else model.named_parameters():
                        parameter.add_(0.05 * torch.randn_like(parameter))
            if adapted is not None:
                named = {name: t.detach().bfloat16() for name, t in (*adapted.frozen_state(), *adapted.parameters())}
                served = {name: ("bfloat16", t.view(torch.int16).numpy().view(np.uint16)) for name, t in named.items()}
            else:
                served = served_tensors(model)
            self._publish(Version(1, step), served)

    def _publish(self, version: Version, served: dict[str, tuple[str, np.ndarray]]) -> None:
        layout = Layout.build([(name, dtype, bits.shape) for name, (dtype, bits) in served.items()])
        state = FlatState.create(self.folder / f"{version}.state", layout)
        for name, (_, bits) in served.items():
            state.write_tensor(name, bits)
        self.parts.append(self.manifest(version, state, self.states[-1] if self.states else None))
        self.states.append(state)

    def manifest(self, version: Version, state: FlatState, base: FlatState | None) -> list[bytes]:
        """The signed parts of a version whose chunks are in the store."""
        header = Header(
            run=RUN, version=version, kind="delta" if base else "anchor", base=Version(1, version.step - 1) if base else None,
            base_digest=base.digest() if base else b"", codec=CODEC, segment_bytes=SEGMENT, chunk_bytes=CHUNK,
            created=int(self.now), expires=int(self.now) + 3600, layout=state.layout,
        )  # fmt: skip
        signer = ManifestSigner(self.identity, header)
        parts = [signer.header_part]
        for s in encode_version(state, base, self.store, segment_bytes=SEGMENT, chunk_bytes=CHUNK):
            parts.append(signer.record(s.index, s.size, s.digests))
        digests = state.tensor_digests()
        return [*parts, signer.seal(digests, state.digest())]

    def settings(self, window: int) -> AuditorSettings:
        return AuditorSettings(
            model=str(self.model_dir), lora=self.lora.model_dump(), chunks=str(self.store.root), run=RUN, epoch=1,
            head_key=self.identity.public_key.hex(), device="cpu", dtype="float32", served_dtype="bfloat16", threads=1,
            window=window, temperature=1.0, top_p=1.0, stop_ids=[], stop=[], longest=40,
        )  # fmt: skip

    def file(self, step: int) -> StateFile:
        return StateFile(self.folder / f"{Version(1, step)}.state", self.states[step].layout, Version(1, step))

    def generate(self, seeds: Sequence[int], steps: Sequence[int], every: int, most: int = 40) -> list[Trajectory]:
        """One completion a seed, by a node named "engine": it installs the versions of `steps`, one each `every` tokens."""
        core = TransformersCore(TransformersSettings(dtype="float32", device="cpu"))
        core.load(self.model_dir, self.file(steps[0]))
        prompts = {str(seed): (1 + seed % 7, 5, 9, 2 + seed % 3) for seed in seeds}
        for name, prompt in prompts.items():
            core.add(Generate(name, prompt, most, (0,), seed=int(name), min_version=Version(1, steps[0])))
        made, at, count = {name: Completion() for name in prompts}, 0, 0
        while core.has_work():
            for event in core.step():
                made[event.request_id].add(event)
            count += 1
            if not count % every and at + 1 < len(steps):
                at += 1
                core.stage(self.file(steps[at]))
                core.commit()
        core.close()
        return [
            Trajectory(
                prompt_ids=prompts[name], completion_ids=tuple(c.ids), logprobs=tuple(c.logprobs), spans=tuple(c.spans),
                finish="stop", node="engine", seed=int(name), makers=(Maker(0, "engine"),),
            )
            for name, c in made.items()
        ]  # fmt: skip


