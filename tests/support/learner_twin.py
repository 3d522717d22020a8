"""A learner that can die between any two transactions, nodes that lie low and come back, and books of our own beside its.

The learner's part is the real one: Rollouts with its Ledger, Collector, Dispatcher and Journal, on a real file. Around it,
in one thread and without a clock: nodes that make tokens, a wire that keeps, doubles and reorders what they send, a trainer.

The books (`Disk`) are kept from what the journal was asked to write, and only from transactions that went through: what a
resume must find follows from them alone.
"""

from __future__ import annotations

import copy
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from learner.dispatch.dispatcher import NodeView
from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.journal.journal import Journal
from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings, mix
from learner.rollouts.outcomes import Sampling, TurnLimits
from learner.rollouts.taking_back import take_back
from learner.tasks.port import Prompt, Score, Task
from learner.trainer.packing import check_group
from learner.trajectory import Group, Trajectory
from p2p.errors import Refusal
from p2p.protocol.generation import Abort, Assign, GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent, unpack_ids
from p2p.version import Version

STOP, VOCABULARY = 0, 50
Made = tuple[int, float, Version | None]
"""A token, its log probability and the version that drew it; None and 0.0 where an environment gave it."""


class Killed(BaseException):
    """SIGKILL, as seen from inside."""


class Tokenizer:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1, 2, 3]

    def decode(self, ids: Any, **_: Any) -> str:
        return "x"


class Echo(Task):
    name = "echo"

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, f"{index}", None)

    def score(self, prompt: Prompt, completion: str) -> Score:
        return Score(1.0, True)


def draw(seed: int, position: int, step: int) -> tuple[int, float]:
    """The token of a position, by seed, position and weights alone: one in eight ends the sequence."""
    rng = random.Random(f"{seed} {position} {step}")
    token = STOP if rng.random() < 0.125 else rng.randrange(1, VOCABULARY)
    return token, float(np.float32(-10 * rng.random()))


def reply(turns: Sequence[Turn]) -> tuple[int, ...] | None:
    """What an environment answers: tokens by all that was sampled, none of them a stop token at the end; None: it is over."""
    rng = random.Random(repr([turn.sampled for turn in turns]))
    if rng.random() < 0.3:
        return None
    return (*(rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))), rng.randrange(1, VOCABULARY))


@dataclass
class RunnerTwin:
    """Whoever runs the episodes, in one life of the learner: it answers when the world says so."""

    answers: trio.MemoryReceiveChannel[TurnAnswer] = field(default_factory=lambda: trio.open_memory_channel[TurnAnswer](0)[1])
    asks: list[Episode] = field(default_factory=list)
    """not answered yet, also where the same was asked again since"""
    forgotten: set[EpisodeKey] = field(default_factory=set)
    given: list[TurnAnswer] = field(default_factory=list)
    _turns: dict[EpisodeKey, tuple[Turn, ...]] = field(default_factory=dict)

    def respond(self, episode: Episode) -> None:
        assert episode.key not in self.forgotten and episode.turns and all(turn.sampled for turn in episode.turns)
        assert not episode.turns[-1].given
        before = self._turns.get(episode.key, ())
        for old, new in zip(before, episode.turns, strict=False):
            assert old.sampled == new.sampled and old.given in ((), new.given), "an earlier turn changed"
        self._turns[episode.key] = episode.turns
        self.asks.append(episode)

    def forget(self, keys: Sequence[EpisodeKey]) -> None:
        self.forgotten |= set(keys)
        self.done(keys)

    def done(self, keys: Sequence[EpisodeKey]) -> None:
        self.asks = [e for e in self.asks if e.key not in keys]


@dataclass
class Booked:
    """A group as our books have it."""

    version: Version
    samples: int
    task_index: int
    state: str = "reserved"
    written: list[list[Made]] = field(default_factory=list)
    trajectories: list[list[Made]] = field(default_factory=list)


@dataclass
class Disk:
    """What went through: all that is left of a learner."""

    groups: dict[int, Booked] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    committed: int = 0


class BookedJournal(Journal):
    """The real journal; `disk` hears of every transaction that went through, `fuse` counts them down to a kill."""

    disk: Disk
    fuse: int | None = None
    fuse_after: bool = False
    on_durable: Callable[[], None]
    _through: bool = False

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        self._through = False
        if self.fuse is not None:
            self.fuse -= 1
        blown = self.fuse is not None and self.fuse < 0
        if blown and not self.fuse_after:
            raise Killed
        with super()._transaction(durable=durable):  # each transaction may be the one at which the learner is killed
            yield
        self._through = True
        if blown:
            raise Killed

    @contextmanager
    def _booked(self, durable: bool = False) -> Iterator[list[Callable[[], None]]]:
        """What is put into the list is done if the transaction inside went through, whatever happened then."""
        todo: list[Callable[[], None]] = []
        self._through = False
        try:
            yield todo
        finally:
            if self._through:
                for do in todo:
                    do()
                if durable:
                    self.on_durable()

    def record_reserved(self, groups: Any) -> None:
        groups = list(groups)
        with self._booked() as todo:
            todo.append(lambda: self.disk.groups.update(
                {
                    g.group_id: Booked(g.version, g.samples, g.task_index, written=[[] for _ in range(g.samples + g.extra)])
                    for g in groups
                }
            ))  # fmt: skip
            super().record_reserved(groups)

    def record_tokens(self, pieces: Any) -> None:
        pieces = list(pieces)

        def write() -> None:
            for p in pieces:
                written = self.disk.groups[p.group_id].written[p.member]
                assert p.start == len(written) and bool(p.node) == (p.version is not None)
                logprobs = p.event().logprobs.tolist() if p.version is not None else [0.0] * len(p)
                written.extend(zip(unpack_ids(p.ids), logprobs, [p.version] * len(p), strict=True))

        with self._booked() as todo:
            todo.append(write)
            super().record_tokens(pieces)

    def cut_tokens(self, ends: Any) -> None:
        ends = list(ends)

        def cut() -> None:
            for group_id, member, start in ends:
                del self.disk.groups[group_id].written[member][start:]

        with self._booked() as todo:
            todo.append(cut)
            super().cut_tokens(ends)

    def record_finished(self, group: Group) -> None:
        def finish() -> None:
            booked = self.disk.groups[group.group_id]
            assert booked.state == "reserved" and len(group.trajectories) == booked.samples
            booked.state, booked.trajectories = "finished", [made_of(t) for t in group.trajectories]

        with self._booked() as todo:
            todo.append(finish)
            super().record_finished(group)

    def record_aborted(self, group_ids: Any, reason: str) -> None:
        group_ids = list(group_ids)
        with self._booked() as todo:
            todo.append(lambda: [setattr(self.disk.groups[g], "state", reason) for g in group_ids] and None)
            super().record_aborted(group_ids, reason)

    def commit(self, step: int, checkpoint: str, group_ids: Sequence[int]) -> None:
        def consume() -> None:
            assert not set(group_ids) & set(self.disk.consumed), "a group was consumed twice"
            for group_id in group_ids:
                assert self.disk.groups[group_id].state == "finished"
                self.disk.groups[group_id].state = "consumed"
                self.disk.consumed[group_id] = step
            self.disk.committed = step

        with self._booked(durable=True) as todo:
            todo.append(consume)
            super().commit(step, checkpoint, group_ids)


def made_of(trajectory: Any) -> list[Made]:
    versions: list[Version | None] = [None] * len(trajectory.completion_ids)
    for span in trajectory.spans:
        versions[span.start : span.stop] = [span.version] * (span.stop - span.start)
    return list(zip(trajectory.completion_ids, trajectory.logprobs, versions, strict=True))


@dataclass
class NodeTwin:
    """A node and its engine: requests it has, what it has made of each, and what it has sent that nobody heard yet."""

    name: str
    version: Version = field(default_factory=lambda: Version(0, 0))
    up: bool = False
    requests: dict[str, tuple[GenerateRequest, list[int], int]] = field(default_factory=dict)
    """request id -> (request, completion so far, epoch that gave it)"""
    wire: list[tuple[Tokens, int]] = field(default_factory=list)
    """(message, epoch that gave the request)"""
    heard: list[tuple[Tokens, int]] = field(default_factory=list)


class World:
    """One history. Each operation may raise Killed when a fuse is set; `resume` follows."""

    def __init__(
        self, folder: Path, *, staleness: int, groups_per_step: int, samples: int, length: int, every: int,
        extra_groups: int = 0, extra_samples: int = 0, truncate: bool = False, turns: TurnLimits | None = None,
        beside: bool = False, catches: float = 0.0,
    ) -> None:  # fmt: skip
        """`catches`: the chance of each turn of `run` that a node is caught cheating."""
        self.folder, self.every, self.beside, self.catches = folder, every, beside, catches
        self.settings = RolloutSettings(
            max_staleness=staleness, groups_per_step=groups_per_step, samples=samples, seed=7,
            sampling=Sampling(length, (STOP,), turns=turns), micro_batch_groups=99,
            extra_groups=extra_groups, extra_samples=extra_samples, truncate_stuck_s=2.0 * truncate,
        )  # fmt: skip
        self.most_behind = self.late_commits = 0
        self.waited = self.truncated = self.answered = self.episodes = self.most_turns = 0
        self.runner: RunnerTwin | None = None
        self.nodes = {name: NodeTwin(name) for name in "abc"}
        self.disk = Disk()
        self.dead: set[Version] = set()
        """published, and lost in a crash: whatever was made under them must go"""
        self.alive: set[Version] = set()
        self.lives = self.accepted = self.regenerated = self.kept = self.ignored = 0
        self.refused: list[str] = []
        self.taken_back = 0
        self.snapshot: tuple[Path, Disk] | None = None
        self.journal: BookedJournal
        self._start()

    # --- lives -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.lives += 1
        journal = BookedJournal.open(self.folder / "journal.sqlite", "run", clock=lambda: 0.0)
        assert isinstance(journal, BookedJournal)
        self.journal = journal
        journal.disk, journal.on_durable = self.disk, self.save
        self.epoch = journal.new_epoch()
        self.save()
        self.step = self.disk.committed
        self.uncommitted: dict[int, int] = {}
        """group -> optimizer steps done with it, of what was taken and not committed"""
        self.writing: int | None = None
        """the step whose checkpoint is being written beside training"""
        self.runner = RunnerTwin() if self.settings.sampling.turns else None
        self.rollouts = Rollouts(
            self.settings, journal, Echo(), Tokenizer(), VOCABULARY, epoch=self.epoch, send=self._send, nodes=self._views,
            runner=self.runner, report=lambda peer, refusal: self.refused.append(str(refusal)), now=lambda: float(self.accepted),
        )  # fmt: skip
        self.rollouts.need_dispatch = self.rollouts.dispatch  # type: ignore[method-assign]  # no task here does it soon after
        self._publish()

    def _publish(self) -> None:
        self.current = Version(self.epoch, self.step)
        self.alive.add(self.current)
        self.rollouts.published(self.current)
        self.rollouts.dispatch()

    def save(self) -> None:
        """What the disk holds now survives even a power cut."""
        folder = self.folder / "safe"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in self.folder.glob("journal.sqlite*"):
            shutil.copy(file, folder)
        self.snapshot = (folder, copy.deepcopy(self.disk))

    def crash(self, *, power: bool = False, forget: bool = True) -> None:
        """The learner dies and comes back. `power`: so does its machine, and what was not synced is gone. `forget`: nodes
        notice, and stop; else they go on with what they had, and say so."""
        accepted = self._all_tokens()
        self.journal.close()
        if power and self.snapshot is not None:
            folder, disk = self.snapshot
            for file in self.folder.glob("journal.sqlite*"):
                if file.suffix != ".lock":
                    file.unlink()
            for file in folder.iterdir():
                shutil.copy(file, self.folder)
            self.disk = disk
        lost = {v for v in self.alive if v.step > self.disk.committed}
        self.dead |= lost
        self.alive -= lost
        for node in self.nodes.values():
            node.up = False
            if forget:
                node.requests.clear()
        expected = self._expected()
        self._start()
        self._check_resume(expected, accepted)

    def _all_tokens(self) -> dict[tuple[int, int], int]:
        groups = self.rollouts.collector.books.groups
        return {(g, m): len(member.completion.ids) for g, group in groups.items() for m, member in enumerate(group.members)}

    def _expected(self) -> tuple[dict[int, list[list[Made]]], set[int], set[int]]:
        """By our books: unfinished groups with the tokens that must be there, finished groups, orphaned ones."""
        unfinished: dict[int, list[list[Made]]] = {}
        finished, orphaned = set[int](), set[int]()
        for group_id, booked in self.disk.groups.items():
            if booked.state == "finished":
                whole = all(v not in self.dead for t in booked.trajectories for _, _, v in t)
                (finished if whole else orphaned).add(group_id)
            elif booked.state == "reserved":
                if booked.version in self.dead:
                    orphaned.add(group_id)
                    continue
                kept = []
                for made in booked.written:
                    end = next((i for i, (_, _, v) in enumerate(made) if v in self.dead), len(made))
                    kept.append(made[:end])
                unfinished[group_id] = kept
        return unfinished, finished, orphaned

    def _check_resume(self, expected: tuple[Any, ...], accepted: dict[tuple[int, int], int]) -> None:
        unfinished, finished, orphaned = expected
        assert set(self.rollouts.buffers.finished) == finished
        assert all(self.disk.groups[g].state == "orphaned" for g in orphaned)
        waiting = self._waiting_for_reward()
        groups = self.rollouts.collector.books.groups
        # The crash may have come between the group that filled a buffer and the abort of what is surplus by that.
        surplus = {g for g in unfinished if self.disk.groups[g].state == "surplus"} if self.settings.extra_groups else set()
        everything = sum(len(m) for members in unfinished.values() for m in members)
        unfinished = {g: members for g, members in unfinished.items() if g not in surplus}
        assert set(groups) | waiting == set(unfinished) | self._opened_now()
        for group_id, members in unfinished.items():
            booked = self.disk.groups[group_id]
            booked.written = members
            if group_id in waiting:
                assert sum(ended(made, self.settings.sampling.max_new_tokens) for made in members) == booked.samples
                continue
            for member, made in zip(groups[group_id].members, members, strict=True):
                c = member.completion
                assert c.ids == [i for i, _, _ in made] and c.logprobs == [p for _, p, _ in made]
                assert [s.version for s in c.spans for _ in range(s.start, s.stop)] == [v for _, _, v in made if v]
        for (group_id, member), count in accepted.items():
            if group_id in unfinished:
                self.regenerated += count - len(unfinished[group_id][member])
        self.kept += self.rollouts.resumed_tokens
        assert sum(len(m) for members in unfinished.values() for m in members) <= self.rollouts.resumed_tokens <= everything
        assert surplus or self.rollouts.resumed_tokens == everything

    def _opened_now(self) -> set[int]:
        return {g for g, booked in self.disk.groups.items() if booked.state == "reserved" and booked.version.epoch == self.epoch}

    def _waiting_for_reward(self) -> set[int]:
        # What waits in trio's channel, without taking it out.
        waiting = {f.group_id for f in self.rollouts.buffers.to_score._state.data}
        return {g for g in waiting if self.disk.groups[g].state not in ("surplus", "caught")}

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _views(self) -> list[NodeView]:
        working = self.rollouts.collector.working
        views = []
        for node in self.nodes.values():
            if node.up:
                load = len(working(node.name))
                live = node.version.epoch == self.epoch
                views.append(NodeView(node.name, node.version, min(load, 3), max(0, load - 3), 3, live=live))
        return views

    def _send(self, peer: str, message: object) -> None:
        node = self.nodes[peer]
        if not node.up:
            return
        match message:
            case Assign():
                for request in message.requests:
                    prefix = np.frombuffer(request.prefix_ids, "<u4").tolist()
                    node.requests[request.request_id] = (request, prefix, self.epoch)
            case Abort():
                for request_id in message.request_ids:
                    node.requests.pop(request_id, None)

    def join(self, name: str) -> None:
        """The node links with this learner, at its newest version."""
        node = self.nodes[name]
        if node.up:
            self.rollouts.on_node_lost(name)
        node.up, node.version = True, self.current
        self.rollouts.dispatch()

    def lose(self, name: str, *, forget: bool) -> None:
        node = self.nodes[name]
        if node.up:
            node.up = False
            if forget:
                node.requests.clear()
            self.rollouts.on_node_lost(name)

    def caught(self, name: str) -> None:
        """The node is caught: nothing of it is left but what the trainer has, and it is gone."""
        rollouts = self.rollouts
        back = take_back(rollouts, name)
        self.taken_back += back.groups + back.completions
        members = [m for group in rollouts.collector.books.groups.values() for m in group.members]
        assert not any(name == maker.node for m in members for maker in m.makers)
        assert not any(m.node for m in members if m.finish or m.asked)
        waiting = [group for g, group in rollouts.buffers.finished.items() if g not in self.uncommitted]
        assert not any(group.made_by(name) for group in [*waiting, *rollouts.buffers.scoring.values()])
        self.lose(name, forget=False)

    def install(self, name: str) -> None:
        node = self.nodes[name]
        if node.up and node.version != self.current:
            node.version = self.current
            self.rollouts.dispatch()

    def work(self, name: str, which: int, count: int) -> None:
        """The node's engine makes up to `count` tokens of one of its requests, and says so once."""
        node = self.nodes[name]
        if not node.requests:
            return
        request_id = sorted(node.requests)[which % len(node.requests)]
        request, made, epoch = node.requests[request_id]
        start, ids, logprobs, finish = len(made), [], [], ""
        while len(ids) < count and not finish:
            token, logprob = draw(request.seed, len(made), node.version.step)
            made.append(token)
            ids.append(token)
            logprobs.append(logprob)
            finish = "stop" if token == STOP else "length" if len(made) >= request.max_new_tokens else ""
        event = TokenEvent.of(request_id, start, tuple(ids), np.array(logprobs, np.float32), node.version, finish)
        node.wire.append((Tokens((event,)), epoch))
        if finish:
            del node.requests[request_id]

    def deliver(self, name: str, which: int, *, again: bool) -> None:
        """One message arrives: the next, or with `which` another, or with `again` one that was heard before."""
        node = self.nodes[name]
        queue = node.heard if again else node.wire
        if not queue:
            return
        message, epoch = queue[which % len(queue)]
        if not again:
            del node.wire[which % len(queue)]
            node.heard = [*node.heard[-20:], (message, epoch)]
        before, refused = self._all_tokens() if epoch != self.epoch else None, len(self.refused)
        try:
            accepted = self.rollouts.on_tokens(name, message)
        except Refusal as refusal:
            accepted = 0
            self.refused.append(str(refusal))
        self.accepted += accepted
        if before is not None:
            self.ignored += 1
            after = self._all_tokens()  # new groups may have been opened meanwhile
            assert accepted == 0 and all(after.get(k) == n for k, n in before.items()), "a token of an earlier epoch was taken"
            assert len(self.refused) == refused, "a token of an earlier epoch was held against somebody"

    # --- the learner -------------------------------------------------------------------------------------------------

    def reward(self) -> None:
        try:
            finished = self.rollouts.buffers.to_score.receive_nowait()
        except trio.WouldBlock:
            return
        for sample in finished.trajectories:
            made = self.check_made(sample)
            assert [s.start for s in sample.spans] == [0, *(s.stop for s in sample.spans[:-1])]
            assert ended(made, self.settings.sampling.max_new_tokens) == (sample.finish != "truncated") and made
            self.truncated += sample.finish == "truncated"
        booked = self.disk.groups[finished.group_id]
        seeds = [mix(7, booked.task_index, finished.group_id, member) for member in range(len(booked.written))]
        members = [seeds.index(sample.seed) for sample in finished.trajectories]
        assert members == sorted(set(members)) and len(members) == booked.samples
        self.rollouts.buffers.rewarded(finished.scored([Score(1.0, True)] * len(finished.trajectories)))

    def check_made(self, sample: Trajectory) -> list[Made]:
        """Every token was drawn, at its position and under its version, or is what the environment answered there."""
        made = made_of(sample)
        for position, (token, logprob, version) in enumerate(made):
            if version is not None:
                assert version not in self.dead, "a token of lost weights"
                assert (token, logprob) == draw(sample.seed, position, version.step), "a token that nobody drew"
        turns, at = list[Turn](), 0
        for gap in sample.given:
            turns.append(Turn(sample.completion_ids[at : gap.start]))
            assert sample.completion_ids[gap.start : gap.stop] == reply(turns), "not what the environment answered"
            at = gap.stop
        for (token, _, by), (_, _, then) in itertools.pairwise(made):
            assert token != STOP or by is None or then is None, "a turn went on after its end"
        assert sum(version is None for _, _, version in made) == sum(gap.stop - gap.start for gap in sample.given)
        return made

    # --- environments ------------------------------------------------------------------------------------------------

    def answer(self, which: int, how: int = 0) -> None:
        """The environment answers one of the turns that it was asked about. `how`: 1 it cannot be set back, 2 it failed."""
        assert self.runner is not None
        if not self.runner.asks:
            return
        episode = self.runner.asks.pop(which % len(self.runner.asks))
        key, number, given = episode.key, len(episode.turns), reply(episode.turns)
        if how:
            answer = TurnAnswer(key, number, anew="gone") if how == 1 else TurnAnswer(key, number, failed="broken")
        elif episode.over or given is None:
            answer = TurnAnswer(key, number, score=Score(1.0, True))
        else:
            answer = TurnAnswer(key, number, given)
        if not answer.given:
            self.runner.done([key])
        self.runner.given.append(answer)
        self.answered += 1
        self.rollouts.on_answer(answer)

    def answer_again(self, which: int) -> None:
        """A late or doubled answer of this life changes nothing."""
        assert self.runner is not None
        if self.runner.given:
            before = self._all_tokens()
            asks, groups = list(self.runner.asks), set(self.rollouts.collector.outstanding)
            self.rollouts.on_answer(self.runner.given[which % len(self.runner.given)])
            after = self._all_tokens()
            assert all(after.get(k) == n for k, n in before.items()) and groups <= set(self.rollouts.collector.outstanding)
            assert asks == self.runner.asks

    def _check_episodes(self) -> None:
        """Who waits for the environment is held by no node and waits for none, and the environment knows of it."""
        assert self.runner is not None
        collector = self.rollouts.collector
        latest = {e.key: e for e in self.runner.asks}
        pending = {r.request_id for r in collector.pending()}
        asked = set()
        for group_id, group in collector.books.groups.items():
            for index, member in enumerate(group.members):
                if member.asked:
                    key = EpisodeKey(group_id, index, member.life)
                    asked.add(key)
                    name = group.request_name(index)
                    assert not member.node and name not in pending
                    assert all(name not in collector.working(node) for node in "abc")
                    assert latest[key].over == member.over and len(latest[key].turns) == len(member.given) + 1
        assert asked == set(latest)

    def train(self) -> None:
        """The trainer takes the step, if its buffer is complete, begins a checkpoint when it is time to, and publishes."""
        rollouts = self.rollouts
        if not rollouts.ledger.ready(self.step):
            return
        groups = [rollouts.buffers.finished[g] for g in rollouts.ledger.occupied(self.step)]
        for group in groups:
            check_group(group, Version(self.epoch, self.step), self.settings.max_staleness)
            if self.runner is not None:
                for sample in group.trajectories:
                    self.check_made(sample)
                    assert sample.reward == 1.0
                    self.most_turns = max(self.most_turns, len(sample.given) + 1)
                    self.truncated += sample.finish == "truncated"
                self.episodes += len(group.trajectories)
            assert group.group_id not in self.disk.consumed and group.group_id not in self.uncommitted
        self.uncommitted |= {g.group_id: self.step + 1 for g in groups}
        if (self.step + 1) % self.every == 0:
            self.durable()  # a trainer waits for the checkpoint before
            self.step += 1
            self.writing = self.step
            if not self.beside:
                self.durable()
        else:
            self.step += 1
        rollouts.buffers.took(self.step)
        self.most_behind = max(self.most_behind, self.step - self.disk.committed)
        assert self.step - self.disk.committed < 2 * self.every + (not self.beside)
        self._publish()

    def durable(self) -> None:
        """The checkpoint that is being written is on the disk: it is committed, however far training is by now."""
        step, self.writing = self.writing, None
        if step is None:
            return
        of = {g for g, done in self.uncommitted.items() if done <= step}
        late = self.rollouts.ledger.step > step
        trained = self.rollouts.buffers.commit(step, f"c{step}")
        assert {g.group_id for done in trained for g in done.groups} == of and all(done.step <= step for done in trained)
        assert all(self.disk.consumed[g] == step for g in of)
        self.uncommitted = {g: done for g, done in self.uncommitted.items() if g not in of}
        assert all(g in self.rollouts.buffers.finished for g in self.uncommitted if g not in self.disk.consumed)
        self.late_commits += late

    def wait(self) -> None:
        """A second in which the trainer waits, and the head looks what for."""
        self.waited += 1
        self.rollouts.buffers.awaited = self.step
        self.rollouts.buffers.truncate_stuck(float(self.waited))

    def run(self, rng: random.Random, turns: int) -> None:
        """A while as it mostly goes: nodes are there, work, install, and what they say arrives in order."""
        for _ in range(turns):
            for name, node in self.nodes.items():
                if not node.up and rng.random() < 0.3:
                    self.join(name)
                if rng.random() < 0.5:
                    self.install(name)
                for _ in range(rng.randint(1, 4)):
                    self.work(name, rng.randrange(8), rng.randint(1, 3))
                while node.wire and rng.random() < 0.9:
                    self.deliver(name, 0, again=False)
            while self.runner is not None and self.runner.asks and rng.random() < 0.8:
                self.answer(rng.randrange(8), rng.choices((0, 1, 2), (20, 2, 1))[0])
            if self.catches and rng.random() < self.catches:
                self.caught(rng.choice("abc"))
            if rng.random() < 0.3:
                self.rollouts.tokens.write()
            if rng.random() < 0.3:
                self.wait()
            while rng.random() < 0.7:
                self.reward()
            if rng.random() < 0.3:
                self.durable()
            if rng.random() < 0.7:
                self.train()

    # --- what must always hold ---------------------------------------------------------------------------------------

    def check(self) -> None:
        counts = self.journal.counts()
        assert counts.groups.lost == counts.trajectories.lost == 0
        states = [b.state for b in self.disk.groups.values()]
        assert counts.groups.outstanding == states.count("reserved") and counts.groups.finished == states.count("finished")
        assert counts.groups.consumed == states.count("consumed") == len(self.disk.consumed)
        may = {"orphaned", "failures", "caught"} | ({"surplus"} if self.settings.extra_groups else set())
        assert set(counts.groups.aborted) <= may
        assert self.rollouts.ledger.surplus() is None
        if self.runner is not None:
            self._check_episodes()
        again = {b.task_index for b in self.disk.groups.values() if b.state not in ("surplus", "caught")}
        again |= set(self.rollouts.buffers.retry)
        assert all(b.task_index in again for b in self.disk.groups.values()), "a prompt was passed over"
        open_now = set(self.rollouts.collector.outstanding) | self._waiting_for_reward()
        assert open_now == {g for g, b in self.disk.groups.items() if b.state == "reserved"}
        outstanding = self.rollouts.ledger.outstanding
        assert outstanding == len(open_now) + sum(g not in self.uncommitted for g in self.rollouts.buffers.finished)
        assert all(0 <= self.disk.consumed[g] - 1 - self.disk.groups[g].version.step for g in self.disk.consumed)

    def drain(self) -> None:
        """Liveness: with one node that works, everything that is open ends, and training goes on."""
        goal = self.step + self.settings.max_staleness + 2
        self.journal.fuse = None
        self.join("a")
        for _ in range(20_000):
            if self.step >= goal:
                break
            self.install("a")
            self.work("a", 0, 4)
            while self.nodes["a"].wire:
                self.deliver("a", 0, again=False)
            if self.runner is not None:
                self.answer(0)
            self.reward()
            self.train()
        assert self.step >= goal, "training does not go on"
        self.check()


def ended(made: list[Made], length: int) -> bool:
    return bool(made) and (made[-1][0] == STOP or len(made) >= length)
