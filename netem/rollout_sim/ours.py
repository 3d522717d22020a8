"""Shoal on simulated time: production's ledger, dispatcher, migration and forecast, told what a head is told."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from learner.dispatch.dispatcher import Dispatcher, NodeView, Strategies, WaitingSequence
from learner.dispatch.forecast import Forecast, GroupState, MemberState
from learner.dispatch.giving_way import GivingWay
from learner.dispatch.migration import migrate
from netem.rollout_sim.engine import Sequence
from netem.rollout_sim.sim import OpenedGroup
from netem.rollout_sim.staleflow import Bounded
from p2p.version import Version

REPORT_TICKS = 5
"""Ticks between two reports of an engine's rate: a node reports every few seconds."""

LOOK_TICKS = 10
"""Ticks between two looks at everything outstanding, after which sequences are moved: as often as production looks."""

MOST_MOVES = 128
"""Sequences that are moved at most after one look."""

ALL = Strategies()
"""The strategies that production has on."""


@dataclass
class _Watched:
    """An engine's counters at the last report."""

    at: float
    total: float
    running: int
    context: float
    debt: float


@dataclass
class Shoal(Bounded):
    """Production's decisions, with parts that can be switched off to see what each is worth."""

    strategies: Strategies = ALL
    migration: bool = True
    """a lost node's sequences keep their tokens"""
    streaming: bool = True
    """the learner begins before a step's groups are all there"""
    label: str = "shoal"
    """name in tables"""
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _ended: dict[str, tuple[int, float]] = field(default_factory=dict)
    """engine -> sequences that had ended there, and tokens made, when it was last told of any"""
    _ticks: int = 0

    def start(self) -> None:
        """See `RolloutPolicy.start`. Its dispatcher and its forecast begin with nothing known."""
        super().start()
        self.name, self.streams, self.keeps_tokens = self.label, self.streaming, self.migration
        self.dispatcher = Dispatcher(self.sim.workload.samples, self.strategies)
        self.forecast = Forecast(self.sim.workload.most, self.sim.settings.staleness)
        self.forecast.stepped(self.sim.now)
        self.giving_way = GivingWay()

    def tick(self) -> None:
        """Look, report and balance each at their own interval, as production does, and dispatch every time."""
        if self._ticks % LOOK_TICKS == 0:
            self._look()
            if self.strategies.migration:
                self._migrate()
        self._ticks += 1
        if self._ticks % REPORT_TICKS == 0:
            self._report()
        self._dispatch()

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.forecast.ended(prompt.group_id, prompt.feature, [m.length for m in prompt.members])

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        super().stepped(step, taken)
        self.forecast.stepped(self.sim.now)

    # ---- inside

    def _dispatch(self) -> None:
        while self.pending or any(self.ledger.room(v) for v in set(self.sim.serves.values())):
            waiting = {_name(s): s for s in self.pending.values()}
            asked = {name: self._request(s) for name, s in waiting.items()}
            views = self._give_way([self._view(name) for name in self.sim.engines])
            prompt, usual = self.sim.workload.prompt, self.forecast.usual
            plan = self.dispatcher.choose(views, asked.values(), lambda v: self.ledger.room(v.step), prompt, usual)
            for name, node in plan.assign:
                self.sim.place(waiting.pop(name), node)
                self.forecast.put(node, asked[name])
                self.giving_way.gave(node, self.sim.now)
            self.pending = {s.key: s for s in waiting.values()}
            opened = [self.reserve(o.version.step) for o in plan.open for _ in range(o.groups)]
            if not any(opened):
                return

    def _give_way(self, views: list[NodeView]) -> list[NodeView]:
        if not self.strategies.give_way or not views:
            return views
        for name, e in self.sim.engines.items():
            before, total = self._ended.get(name, (0, 0.0))
            for i in range(ended := e.ended - before):  # one after the other, as a head hears of them
                self.giving_way.ended(name, int(total + (e.total - total) * (i + 1) / ended), self.sim.now)
            if ended:
                self._ended[name] = (e.ended, e.total)
            self.giving_way.count(name, len(e.running) + len(e.waiting), int(e.total), self.sim.now)
        room = self.ledger.room(max(self.sim.serves[name] for name in self.sim.engines))
        outstanding = len(self.pending) + sum(n.load for n in views) + self.sim.workload.samples * room
        return self.giving_way.look(views, outstanding, self.sim.now)

    def _view(self, name: str) -> NodeView:
        e = self.sim.touch(name)
        seen = NodeView(name, Version(1, self.sim.serves[name]), len(e.running), len(e.waiting), e.limit, room=e.room)
        return self.forecast.view(seen)

    def _request(self, s: Sequence) -> WaitingSequence:
        prompt = self.sim.groups[s.group]
        version = Version(1, prompt.version)
        plain = WaitingSequence(
            _name(s), s.group, version, version, int(s.made), attempt=s.attempt, prompt_tokens=s.prompt
        )  # fmt: skip
        return self.forecast.request(
            plain, s.key, self.sim.now, step=self.sim.step, task_index=prompt.group_id, feature=prompt.feature
        )  # fmt: skip

    def _look(self) -> None:
        for name in self.sim.engines:
            self.sim.touch(name)
        self.forecast.look(self.sim.now, self.sim.step, (self._state(p) for p in self.sim.groups.values() if p.left))

    def _state(self, prompt: OpenedGroup) -> GroupState:
        version = Version(1, prompt.version)
        members = [
            MemberState(
                int(self.sim.engines[m.node].made(m) if m.node else m.made), m.made >= m.length, m.node,
                request_id=_name(m), min_version=version, waiting=bool(m.node) and not m.runs,
            )
            for m in prompt.members
        ]  # fmt: skip
        return GroupState(
            prompt.group_id, prompt.group_id, self.sim.workload.prompt, feature=prompt.feature, step=prompt.version,
            members=members,
        )  # fmt: skip

    def _report(self) -> None:
        for name in self.sim.engines:
            e = self.sim.touch(name)
            then = self._watched.get(name)
            if then is not None and not then.debt and not e.debt and then.running == len(e.running):
                rate = (e.total - then.total) / (self.sim.now - then.at)
                self.forecast.observe(name, then.running, rate, (then.context + e.context) / 2)
            self._watched[name] = _Watched(self.sim.now, e.total, len(e.running), e.context, e.debt)

    def _migrate(self) -> None:
        for move in migrate([self._view(name) for name in self.sim.engines], self.forecast.running, MOST_MOVES):
            group, member = map(int, move.request_id.split("."))
            self.sim.move(self.sim.groups[group].members[member], move.target)
        self._look()


def _name(s: Sequence) -> str:
    return f"{s.group}.{s.member}"
