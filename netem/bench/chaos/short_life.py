"""One short life of a learner, in a process that is made to be killed: the real trainer, checkpoints, rollouts and journal.

In place of sockets, nodes and engines there is `LocalHead`: rollouts in a thread of their own, and a node whose tokens follow
from seed, position and version. What a life does is written down before it is done (`taps`), so that whoever kills it can tell
what must be true afterwards. The model has one buffer more, the ids of the groups that each step trained on: so a checkpoint says
itself what it was made of. Must not know when it is killed.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import blake3
import numpy as np
import torch
import transformers
import transformers.models.qwen3.modeling_qwen3  # here, before lives are forked: seconds that each would take
import trio
from torch import Tensor

from learner.client.beside import Beside
from learner.client.port import ResumeInfo, Weights
from learner.dispatch.dispatcher import NodeView
from learner.journal.journal import Journal
from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import Sampling
from learner.tasks.port import Score
from learner.tasks.registry import make_task
from learner.trainer import opening, trainer
from learner.trainer.checkpoints.writing import Checkpoints
from learner.trainer.model import LoadedModel, load_model
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import Trained
from learner.trajectory import Group, MicroBatch
from p2p.errors import ShoalError
from p2p.protocol.generation import Abort, Assign, GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version

RUN, JOURNAL, TAPS, MODEL, CHECKPOINTS = "lives", "journal.sqlite", "taps.jsonl", "model", "checkpoints"
"""The run's id, and names in the folder of all lives."""

GROUPS, SAMPLES, STALENESS, LENGTH = 3, 3, 2, 12
"""A step's groups, a group's samples, the bound on staleness and the most tokens of a completion: steps of some tens of
milliseconds, so that a life of a second has many."""

MOST_STEPS = 20_000
"""Steps for which there is room in the buffer of what was trained on."""

NODE, PLACES, STOP = "node", 16, 0
"""The one node's name, how many sequences it runs, and its end token."""

SEAL_S = 0.03
"""The longest time that a version takes to go out, beside the next step."""

Answer = TypeVar("Answer")

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # before a life is forked: threads would not come along


class PlayedToken(NamedTuple):
    """A token and its log probability."""

    token: int
    logprob: float


def draw(seed: int, position: int, version: Version, vocabulary: int) -> PlayedToken:
    """The token at a position: one in eight ends the completion."""
    rng = random.Random(f"{seed} {position} {version}")
    token = STOP if rng.random() < 0.125 else rng.randrange(1, vocabulary)
    return PlayedToken(token, float(np.float32(-5 * rng.random())))


def digest_of(trained: Trained, optimizer: torch.optim.Optimizer) -> str:
    """Of every tensor that a checkpoint holds."""
    digest = blake3.blake3()
    states = optimizer.state_dict()["state"]
    moments = ((f"{i}.{key}", torch.as_tensor(value)) for i in sorted(states) for key, value in sorted(states[i].items()))
    for name, tensor in (*trained.named_state(), *moments):
        digest.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class LocalHead:
    """A `TrainerClient` over real rollouts and a real journal, which one thread drives: `commit` comes from another one than the
    trainer's."""

    def __init__(self, root: Path, vocabulary: int, tokenizer: object, tap: Callable[..., None]) -> None:
        self._vocabulary, self._tap, self._rng = vocabulary, tap, random.Random()
        self._thread, self._seal = ThreadPoolExecutor(1, thread_name_prefix="head"), Beside("seal")
        self._requests: dict[str, tuple[GenerateRequest, list[int]]] = {}
        self._version = Version(0, 0)
        self._do(self._open, root, tokenizer)

    def _do(self, work: Callable[..., Answer], *arguments: Any) -> Answer:
        return self._thread.submit(work, *arguments).result()

    def _open(self, root: Path, tokenizer: object) -> None:
        self._journal = Journal.open(root / JOURNAL, RUN)
        self.epoch = self._journal.new_epoch()
        settings = RolloutSettings(
            max_staleness=STALENESS, groups_per_step=GROUPS, samples=SAMPLES, seed=7, sampling=Sampling(LENGTH, (STOP,)),
            micro_batch_groups=GROUPS,
        )  # fmt: skip
        self._rollouts = Rollouts(
            settings, self._journal, make_task("reverse", 0), tokenizer, self._vocabulary, epoch=self.epoch, send=self._send,
            nodes=self._nodes, report=self._refused, now=time.monotonic,
        )  # fmt: skip

    def _refused(self, peer: str, refusal: object) -> None:
        raise ShoalError(f"{peer}: {refusal}")

    def _send(self, peer: str, message: object) -> None:
        match message:
            case Assign():
                for request in message.requests:
                    self._requests[request.request_id] = request, np.frombuffer(request.prefix_ids, "<u4").tolist()
            case Abort():
                for request_id in message.request_ids:
                    self._requests.pop(request_id, None)

    def _nodes(self) -> list[NodeView]:
        load = len(self._rollouts.collector.working(NODE))
        running = min(load, PLACES)
        return [NodeView(NODE, self._version, running, load - running, PLACES, live=self._version.epoch == self.epoch)]

    def _generate(self) -> None:
        """A turn of the node, in random pieces, and of whoever scores."""
        for request_id, (request, made) in list(self._requests.items()):
            start, drawn = len(made), list[PlayedToken]()
            for _ in range(self._rng.randint(1, 6)):
                drawn.append(draw(request.seed, len(made), self._version, self._vocabulary))
                made.append(drawn[-1][0])
                if made[-1] == STOP or len(made) >= request.max_new_tokens:
                    break
            finish = "stop" if made[-1] == STOP else "length" if len(made) >= request.max_new_tokens else ""
            ids, logprobs = tuple(token for token, _ in drawn), np.array([p for _, p in drawn], np.float32)
            if finish:
                del self._requests[request_id]
            event = TokenEvent.of(request_id, start, ids, logprobs, self._version, finish=finish)
            self._rollouts.on_tokens(NODE, Tokens((event,)))
        while True:
            try:
                group = self._rollouts.buffers.to_score.receive_nowait()
            except trio.WouldBlock:
                break
            scores = [Score(float(sum(t.completion_ids) % 2), False) for t in group.trajectories]
            self._rollouts.buffers.rewarded(group.scored(scores))
        if self._rng.random() < 0.5:
            self._rollouts.tokens.write()
        self._rollouts.dispatch()

    def _groups(self, step: int) -> tuple[Group, ...]:
        """The step's groups, once they are all there."""
        buffers, ledger = self._rollouts.buffers, self._rollouts.ledger
        if ledger.step != step:
            buffers.advance(step)
        self._generate()
        return tuple(buffers.finished[i] for i in ledger.occupied(step)) if ledger.ready(step) else ()

    def _sealed(self, step: int) -> None:
        self._rollouts.buffers.took(step)
        self._version = Version(self.epoch, step)
        self._rollouts.published(self._version)
        self._rollouts.dispatch()

    # --- the port ----------------------------------------------------------------------------------------------------

    def resume(self) -> ResumeInfo:
        last = self._do(self._journal.last_commit)
        return ResumeInfo(self.epoch, last.step if last else 0, Path(last.checkpoint) if last else None)

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """The step's groups, all at once."""
        while not (groups := self._do(self._groups, step)):
            pass
        self._tap("handed", self.epoch, step, {g.group_id: versions_of(g) for g in groups})
        yield MicroBatch(step, groups, True, len(groups))

    def commit(self, step: int, checkpoint: Path) -> None:
        self._do(self._rollouts.buffers.commit, step, str(checkpoint))

    def due(self, step: int) -> bool:
        return True

    def publish(self, step: int, tensors: Weights, *, wait: bool = True) -> None:
        """The version is sealed, now or soon; nothing is encoded."""
        self._seal.settle()
        takes = 0.0 if wait else self._rng.random() * SEAL_S

        def go_out() -> None:
            time.sleep(takes)
            self._tap("sealed", self.epoch, step)
            self._do(self._sealed, step)

        self._seal.start(go_out)
        if wait:
            self._seal.settle()

    def discard(self, step: int, group_ids: Sequence[int], reason: str) -> None:
        raise ShoalError(f"step {step} was discarded: {reason}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._tap("logged", self.epoch, step, metrics["time/commit"], metrics["checkpoint/behind"])

    def finish(self) -> None:
        self._seal.settle()
        self._do(self._journal.close)


def versions_of(group: Group) -> list[list[int]]:
    found = {span.version for t in group.trajectories for span in t.spans}
    return [[version.epoch, version.step] for version in sorted(found)]


def live(root: Path, steps: int, every: int) -> None:
    """A learner's life, until it is killed or has taken `steps`. It checks what it resumes from, and ends with an exception where
    that is not what the life before had."""
    taps = os.open(root / TAPS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tap(*values: object) -> None:
        os.write(taps, (json.dumps(values) + "\n").encode())

    loaded = with_room(load_model(root / MODEL, "cpu"))
    head = LocalHead(root, len(loaded.tokenizer), loaded.tokenizer, tap)
    tap_training(head.epoch, loaded.model.get_buffer("trained_groups"), tap)
    load, opening.load_model = trainer.read_checkpoint, lambda *_: loaded

    def checked(path: Path, trained: Trained, optimizer: torch.optim.Optimizer) -> int:
        step = load(path, trained, optimizer)
        tap("resumed", head.epoch, step, digest_of(trained, optimizer), loaded.model.get_buffer("trained_groups")[:step].tolist())
        return step

    trainer.read_checkpoint = checked
    tap("began", head.epoch)
    trainer.run_trainer(head, TrainerConfig(
        model=str(root / MODEL), checkpoint_dir=str(root / CHECKPOINTS), steps=steps, device="cpu", threads=1, lr=1e-4,
        max_new_tokens=LENGTH, max_staleness=STALENESS, checkpoint_every=every,
    ))  # fmt: skip


def with_room(loaded: LoadedModel) -> LoadedModel:
    """A buffer for what each step trains on: saved with the weights, and only then true."""
    loaded.model.register_buffer("trained_groups", torch.full((MOST_STEPS, GROUPS), -1, dtype=torch.int64))
    return loaded


def tap_training(epoch: int, trained_groups: Tensor, tap: Callable[..., None]) -> None:
    """Write down, from here on, what each step trains on and each checkpoint is taken of."""
    classes: tuple[Any, Any] = PolicyTrainer, Checkpoints
    policy, checkpoints = classes
    step_of, begin_of = policy.step, checkpoints.begin

    def step(self: PolicyTrainer, number: int) -> dict[str, float]:
        ids = list(self.group_ids)
        metrics: dict[str, float] = step_of(self, number)
        trained_groups[number] = torch.tensor(ids)
        tap("trained", epoch, number + 1, ids)
        return metrics

    def begin(self: Checkpoints, number: int) -> None:
        tap("begun", epoch, number, digest_of(self._trained, self._optimizer))
        begin_of(self, number)

    policy.step, checkpoints.begin = step, begin


def run(root: str, steps: int, every: int) -> None:
    """`live`, as the target of a process."""
    partial(live, Path(root))(steps, every)
