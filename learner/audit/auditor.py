"""The auditor: a process of the head's that holds the states of recent versions and scores completions under them. Needs torch.

It follows the versions as nodes do: the head hands it each manifest, the chunks lie in the head's store, and signatures and
digests are checked. It keeps one state and how to get from each version to the next (`states`), and one model that is filled from
that. It answers one request at a time, at a low priority, and ends when the head's end of its socket does. Must not know nodes or
verdicts.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import psutil
import torch
from transformers import AutoTokenizer

from learner.audit.auditor_settings import AuditorSettings
from learner.audit.claims import Claim, OwnGroup
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.own_completions import SampledBy
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import score
from learner.audit.self_calibration import measure_bfloat16
from learner.audit.served_model import ServedModel, state_bytes
from learner.audit.states import StateWindow, ToldState
from learner.audit.wire import Frames, pack, read_claims, read_own, score_answer
from learner.model_folder import first_line
from learner.rollouts.stop_strings import StopStrings
from learner.tasks.prompting import decode_completion
from learner.trainer.settings import LoraSection
from p2p.errors import Refusal, UsageError
from p2p.layout import Segment
from p2p.limits import GIB
from p2p.processes import give_back_what_is_freed, keep_blocks_apart
from p2p.version import Version
from p2p.weights.manifest import Manifest, open_header
from p2p.weights.store import ChunkFolder

NICE = 10
"""How much lower than the head's its priority is: of a busy core it gets a tenth."""

RECEIVE_BYTES = 1 << 20
"""Bytes that are taken from the socket at a time."""

WORK_BYTES = 512 << 20
"""Bytes beside states and model: torch itself, the activations of 16k tokens of a small model, and logits of one chunk."""

UNDO_STATES = 3
"""What is kept of other versions at the most, in states. Beyond it the oldest are given up. A delta of every word takes one
state, so this is all that the usual `max_staleness` of 2 can need; one of a few percent of the words takes three times as many
percent."""


GIVEN_BACK_FROM = 1_000_000
"""Parameters from which on freed memory is given back after each answer: of a smaller model it is little, and making its pages
anew at each forward was a quarter of the processor time of scoring forty of the demo's answers."""


class Auditor:
    """`settings` as told. UsageError when its model cannot be built, or memory is short."""

    def __init__(self, settings: AuditorSettings) -> None:
        self._settings, folder, dtype = settings, Path(settings.model), getattr(torch, settings.dtype)
        state = state_bytes(folder, getattr(torch, settings.served_dtype))
        model = state_bytes(folder, dtype) if settings.device == "cpu" else 0
        undo = min(UNDO_STATES, settings.window - 1) * state
        rounded = model // 2 if settings.dtype == "float32" else 0
        _check_memory(state + undo + model + rounded)
        self.model = ServedModel(folder, LoraSection(**settings.lora), device=settings.device, dtype=dtype)
        self.window = StateWindow(settings.window, undo)
        self._store = ChunkFolder(Path(settings.chunks))
        self._seen = SeenTokens()
        self._sampled = _sampled_by(settings)
        self._filled = False
        """the model has the weights of some version"""
        self._cannot = ""
        """why it makes no completions"""
        self.parameters = sum(parameter.numel() for parameter in self.model.model.parameters())

    def follow(self, parts: list[bytes], whole: str = "") -> None:
        """Take the next version; from the file `whole` rather than from chunks, where that is one. Refusal when its manifest, its
        chunks (or the file) or its digests are not in order."""
        manifest = self._open(parts)
        header, seal = manifest.header, manifest.seal
        assert seal is not None
        told = ToldState(
            header.version, header.segment_bytes, payload=partial(self._payload, manifest), tensor_digests=seal.tensor_digests,
            digest=seal.state_digest,
        )  # fmt: skip
        if whole:
            self.window.jump(told, _read(whole, header.version))
        elif header.kind == "anchor":
            self.model.check(header.layout)
            self.window.begin(told, header.layout)
        else:
            self.window.follow(told, header.base_digest)

    def _open(self, parts: list[bytes]) -> Manifest:
        s, key = self._settings, bytes.fromhex(self._settings.head_key)
        manifest = open_header(parts[0], head_key=key, run=s.run, min_epoch=s.epoch, now=time.time())
        for part in parts[1:]:
            manifest.add(part, key)
        if not manifest.whole:
            raise Refusal("its manifest is not whole", version=manifest.version)
        return manifest

    def _payload(self, manifest: Manifest, segment: Segment) -> bytes:
        pieces = []
        for digest in manifest.records[segment.index].digests:
            try:
                data = self._store.read(digest)
            except OSError as error:
                raise Refusal(f"chunk {digest.hex()[:16]} is not there: {error.strerror}", version=manifest.version) from None
            if blake3.blake3(data).digest() != digest:
                raise Refusal(f"chunk {digest.hex()[:16]} is damaged", version=manifest.version)
            pieces.append(data)
        return b"".join(pieces)

    def score(self, claims: list[list[tuple[Version, Claim]]]) -> list[list[Deviations | None]]:
        """Each part of each completion, None where its state is not held. In the order of versions, so that the state moves
        little."""
        found: list[list[Deviations | None]] = [[None] * len(of) for of in claims]
        wanted: dict[Version, list[tuple[int, int]]] = {}
        for i, of in enumerate(claims):
            for j, (version, _) in enumerate(of):
                wanted.setdefault(version, []).append((i, j))
        held, at = set(self.window.versions), self.window.at
        order = sorted(held & wanted.keys(), reverse=at is not None and 2 * sum(v < at for v in wanted) > len(wanted))
        for version in order:
            self.window.move(version)
            assert self.window.state is not None
            self.model.fill(self.window.state, self.window.take_stale())
            if not self._filled:
                self.model.check_logits()
                self._filled = True
            places = wanted[version]
            of_version = [claims[i][j][1] for i, j in places]
            scored = score(self.model.model, of_version, self._sampled.temperature, self._sampled.top_p)
            for (i, j), of_part in zip(places, scored, strict=True):
                found[i][j] = of_part
        return found

    def measure(self, groups: Sequence[OwnGroup], most: int) -> OwnDeviations:
        """What `measure_bfloat16` has of these groups, under the weights that it has. Nothing before it has any, or where
        transformers cannot generate with a model of this kind: what is shipped holds then, and `facts` say why."""
        if self._filled and most and not self._cannot:
            try:
                return measure_bfloat16(self.model.model, groups, most, self._sampled, seen=self._seen)
            except Exception as error:  # other people's code, for any architecture: audits go on without
                self._cannot = f"{type(error).__name__}: {first_line(error)}"
        return OwnDeviations.none()

    def answer(self, message: dict[str, Any]) -> bytes:
        """The answer to one request."""
        if message.get("do") == "follow":
            try:
                self.follow(message["parts"], message.get("whole", ""))
            except Refusal as refusal:
                return pack({"lost": str(refusal)})
            return pack({"ok": True})
        found = self.score(read_claims(message))
        return score_answer(found, self.measure(read_own(message), message["bfloat16"]), **self.facts())

    def facts(self) -> dict[str, Any]:
        """How it stands: for the status page."""
        return {
            "versions": len(self.window.versions), "undo_bytes": self.window.undo, "given_up": self.window.given_up,
            "cannot": self._cannot,
            "cpu_s": time.process_time(), "rss_bytes": psutil.Process().memory_info().rss,
        }  # fmt: skip


def _sampled_by(settings: AuditorSettings) -> SampledBy:
    stop = None
    if settings.stop:
        tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True, trust_remote_code=False)
        stop = StopStrings(partial(decode_completion, tokenizer), settings.stop)
    return SampledBy(settings.temperature, settings.top_p, frozenset(settings.stop_ids), stop, settings.longest)


def _read(file: str, version: Version) -> np.ndarray:
    """uint8 [bytes], the file's own: it is replaced whole or deleted, so what was opened stays as it is."""
    try:
        return np.memmap(file, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise Refusal(f"its state cannot be read from {file}: {error}", version=version) from None


def _check_memory(nbytes: int) -> None:
    """UsageError when the state, what is kept of others, and the model do not fit in the memory that is free."""
    need, free = nbytes + WORK_BYTES, psutil.virtual_memory().available
    if need > free:
        what = "audit.dtype and audit.device say how much the model takes of it; --audit 0 does without"
        raise UsageError(f"it needs {need / GIB:.1f} GiB of memory, and {free / GIB:.1f} are free ({what})")


def main() -> None:
    """`python -m learner.audit.auditor FD SETTINGS`."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    settings = AuditorSettings.read(sys.argv[2])
    torch.set_num_threads(settings.threads)
    np.seterr(all="ignore")
    frames = Frames()
    try:
        auditor = Auditor(settings)
        gives_back = auditor.parameters >= GIVEN_BACK_FROM
        if gives_back:
            keep_blocks_apart()
        os.nice(NICE)  # from here on: until it is ready nothing is checked, and a busy machine would keep it so for a minute
        sock.sendall(pack({"ready": True, **auditor.facts()}))
        while data := sock.recv(RECEIVE_BYTES):
            for message in frames.feed(data):
                sock.sendall(auditor.answer(message))
                if gives_back:
                    give_back_what_is_freed()
    except UsageError as error:
        sock.sendall(pack({"refused": str(error)}))
        sys.exit(2)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the head is gone


if __name__ == "__main__":
    main()
