"""Forecasts for the dispatcher: how long sequences will become, by when they must end, how fast engines are. Pure.

Joins the length predictor (`lengths`), the throughput fits (`throughput`) and the learner's own pace. `look` goes over everything
outstanding once in a while; between two looks, what is put on a node is added to what was counted there. The same object serves
the head and the simulator. Must not know the network, tokens, or how a group is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from learner.dispatch.dispatcher import WaitingSequence
from learner.dispatch.lengths import Belief, Lengths
from learner.dispatch.migration import Running
from learner.dispatch.node_table import NodeView
from learner.dispatch.throughput import Fit
from p2p.version import Version

IN_TIME = 0.9
"""A sequence needs the pace with which it ends in time with this probability."""

MARGIN_STEPS = 0.25
"""Learner steps by which a sequence should end before the learner needs its group."""

MIN_DUE_STEPS = 0.15
"""Learner steps that a sequence is given at the least: one that is late already must not need an infinite pace."""

STEP_WEIGHT = 0.3
"""Weight of the last step's time in the forecast of the next: some three steps count."""

ANY_VERSION = Version(0, 0)
"""Every version is at least this one."""

Key = tuple[int, int]
"""(group id, member)"""


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member of an unfinished group."""

    made: int
    """completion tokens so far"""
    ended: bool
    node: str = ""
    """the node that has it; "" when it waits for one or has ended"""
    request_id: str = ""
    min_version: Version = ANY_VERSION
    waiting: bool = False
    """it waits for a place in that node's memory"""


@dataclass(frozen=True, slots=True)
class GroupState:
    """An unfinished group."""

    group_id: int
    task_index: int
    prompt_tokens: int
    feature: float
    """a number of the prompt that may be correlated with the lengths of its completions"""
    step: int
    """step of the version that it was reserved at"""
    members: Sequence[MemberState]


@dataclass
class _Load:
    """Tokens that a node's sequences hold and will make, and tokens per second that the most urgent needs."""

    context: float = 0.0
    growth: float = 0.0
    need: float = 0.0


_NO_LOAD = _Load()
"""Of a node that holds nothing."""


@dataclass
class Forecast:
    """Told what happens, it answers for nodes and requests. Completions have at most `most` tokens; `max_staleness` is the bound
    in learner steps. Times are seconds of the caller's clock."""

    most: int
    max_staleness: int
    lengths: Lengths = field(init=False)
    prompt_tokens: float = field(default=0.0, init=False)
    """mean tokens of a prompt"""
    step_s: float = field(default=0.0, init=False)
    """seconds of a learner step; 0 until one was seen"""
    running: list[Running] = field(default_factory=list, init=False)
    """what nodes held at the last look, for `migrate`"""
    _began: float | None = field(default=None, init=False)
    _fits: dict[str, Fit] = field(default_factory=dict, init=False)
    _left: dict[Key, float] = field(default_factory=dict, init=False)
    _need: dict[Key, float] = field(default_factory=dict, init=False)
    _load: dict[str, _Load] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.lengths = Lengths(self.most)

    # ---- what happens

    def stepped(self, now: float) -> None:
        """The learner took a step, or begins with its first."""
        if self._began is not None:
            took = now - self._began
            self.step_s = took if not self.step_s else (1 - STEP_WEIGHT) * self.step_s + STEP_WEIGHT * took
        self._began = now

    def ended(self, task_index: int, feature: float, lengths: Sequence[int]) -> None:
        """Every member of a group has ended, with these numbers of tokens."""
        self.lengths.ended(task_index, feature, lengths)

    def observe(self, peer: str, running: int, tokens_per_s: float, context: float | None = None) -> None:
        """A node ran `running` sequences and made `tokens_per_s`. `context`: tokens that they held, where the caller knows better
        than the last look."""
        held = self._load.get(peer)
        if context is None:
            context = held.context if held is not None else 0.0
        self._fits.setdefault(peer, Fit()).observe(running, context, tokens_per_s)

    def forget(self, peer: str) -> None:
        """A node left; what comes back under its name may be another machine."""
        self._fits.pop(peer, None)
        self._load.pop(peer, None)

    def look(self, now: float, step: int, groups: Iterable[GroupState]) -> None:
        """Forecast all unfinished groups anew, the learner being at `step`."""
        self._left, self._need, self._load, self.running = {}, {}, {}, []
        prompts = count = 0
        for group in groups:
            prompts, count = prompts + group.prompt_tokens, count + 1
            ended = [m.made for m in group.members if m.ended]
            made = [m.made for m in group.members if not m.ended and m.made]
            belief = self.lengths.believe(group.task_index, group.feature, ended, made)
            due = self._due(group.step, step, now)
            for index, m in enumerate(group.members):
                if m.ended:
                    continue
                left, need = self._foresee(belief, m.made, due)
                self._left[group.group_id, index], self._need[group.group_id, index] = left, need
                if m.node:
                    held = group.prompt_tokens + m.made
                    self._count(m.node, held, left, need)
                    self.running.append(Running(
                        m.request_id, m.node, m.min_version, context=held, expected_tokens=left, need=need, waiting=m.waiting
                    ))  # fmt: skip
        if count:
            self.prompt_tokens = prompts / count

    def put(self, peer: str, request: WaitingSequence) -> None:
        """`peer` was given this request since the last look."""
        self._count(peer, request.context, request.expected_tokens, request.need)

    # ---- what it says

    @property
    def began(self) -> bool:
        """Whether the learner is at work."""
        return self._began is not None

    def view(self, node: NodeView) -> NodeView:
        """The same node with what is known of its speed and its load. What it holds beside training is in `node` already."""
        load, fit = self._load.get(node.peer, _NO_LOAD), self._fits.get(node.peer)
        model = fit.model if fit is not None else None
        # Field by field: `replace` takes four times as long, and some thousands are made a second.
        return NodeView(
            node.peer, node.version, node.running, node.waiting, node.capacity, tokens_per_s=node.tokens_per_s, live=node.live,
            draining=node.draining, holds_back=node.holds_back, model=model, context=node.context + load.context,
            growth=node.growth + load.growth, room=node.room, need=load.need, limit=node.limit, credible=node.credible,
            delivers=node.delivers, unheard_s=node.unheard_s,
        )  # fmt: skip

    def request(
        self, request: WaitingSequence, key: Key, now: float, step: int, task_index: int, feature: float
    ) -> WaitingSequence:
        """The same request with what is expected of it."""
        if key not in self._left:  # opened since the last look
            belief = self.lengths.believe(task_index, feature)
            due = self._due(request.reserved.step, step, now)
            self._left[key], self._need[key] = self._foresee(belief, request.tokens, due)
        return replace(request, expected_tokens=int(self._left[key]), need=self._need[key])

    def full_rate(self, peer: str, sequences: int) -> float:
        """Tokens per second that a node would make with so many sequences, by its fit; 0 where there is none yet."""
        fit = self._fits.get(peer)
        model = fit.model if fit is not None else None
        return model.rate(sequences, sequences * (self.prompt_tokens + self.usual / 2)) if model is not None else 0.0

    @property
    def usual(self) -> float:
        """Completion tokens of a new sequence."""
        return self.lengths.usual()

    # ---- inside

    def _due(self, reserved: int, step: int, now: float) -> float:
        """Seconds until the learner needs a group reserved at `reserved`; 0 when its pace is not known."""
        if not self.step_s or self._began is None:
            return 0.0
        due = (reserved + self.max_staleness - step) * self.step_s - (now - self._began)
        return max(due - MARGIN_STEPS * self.step_s, MIN_DUE_STEPS * self.step_s)

    def _foresee(self, belief: Belief, made: int, due: float) -> tuple[float, float]:
        """(tokens that it will probably still make, tokens per second that it needs)"""
        left = belief.expected(made, self.most) - made
        if not due or not self.lengths.weight:
            return left, 0.0
        return left, (belief.quantile(made, self.most, IN_TIME) - made) / due

    def _count(self, peer: str, context: float, growth: float, need: float) -> None:
        load = self._load.setdefault(peer, _Load())
        load.context += context
        load.growth += growth
        load.need = max(load.need, need)
