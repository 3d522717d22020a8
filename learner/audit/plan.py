"""Which completions are checked, in what order, and what follows from what was found. Pure: told what ended and what a score is.

A completion is the work of several nodes under several versions: each run of its tokens is charged to its own node, under its own
version (`MadePart`). What an environment gave is nobody's. Whose are chosen is `Standing.audit_share`, by a keyed hash. Proven
nodes' are chosen of some versions only, where one version's share is too little to be worth its cost (`versions`).

What waits is bounded (`waiting`). What has no place there is counted, and counts as checked for nobody. Must not know processes,
models or how a node is expelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from learner.audit.bets import grossness
from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.choosing import chosen
from learner.audit.claims import places_of, prompt_number
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.judged import Judged
from learner.audit.long_ones import LongCompletions
from learner.audit.looks import GROWN, GROWN_ON_ALERT, LookKey, Looks
from learner.audit.node_tests import MOST_TESTED, NodeTests
from learner.audit.parts import MadePart, most_of, parts_of, tokens_of
from learner.audit.repeats import SeenByNode
from learner.audit.sequential import FALSE_ALARM, NodeTest, Verdict
from learner.audit.versions import ChosenVersions
from learner.audit.waiting import WaitingLines
from learner.rollouts.group import RunningGroup, so_far
from learner.rollouts.probe import Probe
from learner.standing.standing import Standing
from learner.trajectory import Group, Trajectory
from p2p.forgetting import forget_oldest, renewed
from p2p.version import Version

MAY_BE_GROSS = 1e-3
"""Bound on the mean of `grossness` from which on nothing follows from a single token of a node of such a kind: of the 4,096
tokens that are looked at then, some more may be so. The bound is that of a prompt as loud as they may be, and of 4.5 million
simulated tokens of prompts at 6 x 10^-5 to 10^-3 none was so (bench/audit.md); the bench's kinds have 2 to 6 x 10^-5."""

DRAWN_AGAIN = 16
"""Versions in which a prompt that comes again is the same one to a node's test: prompts of groups that are made again are drawn
again soon, and a cheat in a group must not have the others answer one that is loud until they are called wrong. Where a task has
few prompts each says something anew after so many."""

LOOK_TOKENS = 16_384
"""Tokens of completions under way that one look at what the trainer waits for takes at the most, and one completion more: it
looks four times a second, and a thousand nodes hold four thousand sequences."""

SOON_TOKENS = 8_192
"""Tokens that wait beyond which probes are looked at when they are over, and not before."""

OWN_KIND = NodeArithmetic("transformers", "bfloat16", "cpu")
"""What an auditor on a processor can compute itself."""

OWN_AT_ONCE = 1_024
"""Tokens that the auditor makes itself beside what it checks, at the most: checks do not wait long for it."""


class ToldKind(NamedTuple):
    """What a node says of how it computes."""

    arithmetic: NodeArithmetic
    keeps: bool = False
    """its tokens after an install in the midst of a sequence are of no one version"""


@dataclass(frozen=True, slots=True)
class Check:
    """A completion that is to be scored again: only `parts` of it are."""

    group_id: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    seed: int
    parts: tuple[MadePart, ...]
    kinds: tuple[NodeArithmetic, ...]
    """of each part's node, as it said when the completion ended"""
    given: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    """it has ended, is of one node's making, and all of it was or is checked"""

    @property
    def length(self) -> int:
        """Tokens that are read for it, at least."""
        return len(self.prompt_ids) + max(part.stop for part in self.parts)


@dataclass
class AuditPlan:
    """`kind_of(peer)`: what a node says of itself; None when it says nothing now. `calibrates()`: whether trusted nodes are
    looked at now, to measure. `on_alert()`: whether what is longer than usual is checked while it is waited for. `secret`: 16
    bytes or more that no node knows."""

    secret: bytes
    epoch: int
    standing: Standing
    calibration: Calibration
    kind_of: Callable[[str], ToldKind | None]
    false_alarm: float = FALSE_ALARM
    calibrates: Callable[[], bool] = lambda: False
    on_alert: Callable[[], bool] = lambda: False
    own_kind: NodeArithmetic = OWN_KIND
    """of which the auditor can make tokens itself"""
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """tokens by what became of them: "checked", "calibrated", "dropped" (no place), "unknown" (their state is not held, or they
    are of no one version), "own" (the auditor made them, to measure), "probed" (nobody waited for them); and "caught" nodes"""
    versions: ChosenVersions = field(init=False, repr=False)
    _waiting: WaitingLines[Check] = field(init=False, repr=False)
    _tests: NodeTests = field(init=False, repr=False)
    _long: LongCompletions = field(init=False, repr=False)
    _seen: SeenByNode = field(init=False, repr=False)
    _looks: Looks = field(default_factory=Looks, init=False, repr=False)
    _kinds: dict[str, ToldKind] = field(default_factory=dict, init=False, repr=False)
    """as told last, of nodes that may be gone"""

    def __post_init__(self) -> None:
        self._waiting = WaitingLines(self._drop)
        self.versions = ChosenVersions(self.secret)
        self._seen = SeenByNode(self.secret, MOST_TESTED, self._is_here)
        self._tests = NodeTests(self.calibration, self.false_alarm, self._is_here, anew=self._seen.forget)
        self._long = LongCompletions(lambda: self.standing.rules.audit_share, self._is_here)

    # ---- what is checked

    def whole(self, group: Group) -> None:
        """A group's completions have ended: those that are chosen wait from here on."""
        for trajectory in group.trajectories:
            key, made = LookKey(group.group_id, trajectory.seed), list(parts_of(trajectory))
            self._made(made)
            long = self._long.ended(tokens_of(made))
            left = self._looks.behind(key, trajectory.completion_ids, made)
            parts = [part for part in left if self._chosen(part, key)]
            known = [part for part in parts if self._has_state(trajectory, part)]
            self.counts["unknown"] += tokens_of(parts) - tokens_of(known)
            longs = [part for part in left if part not in parts and self._takes_long(part, trajectory, long)]
            whole = len(known) + len(longs) == len(left) and len({part.node for part in made}) == 1
            self._check(key, trajectory, sorted(known + longs), soon=bool(longs), whole=whole)
        self._looks.ended(group.group_id)

    def waited_for(self, groups: Iterable[RunningGroup], soon: int) -> None:
        """The trainer waits for these: `running` is told of those that are looked at. On alert no more than `soon` tokens wait:
        what cannot be read soon would only keep waiting what comes after."""
        room = LOOK_TOKENS if not self.on_alert() else min(LOOK_TOKENS, soon - self.first_tokens)
        for group in groups:
            for member in group.members:
                length, makers = len(member.completion.ids), (maker.node for maker in member.makers)
                if member.node and room > 0 and self.looks_at(group.group_id, member.seed, length, makers):
                    room -= self.running(group.group_id, so_far(group, member))

    def looks_at(self, group_id: int, seed: int, length: int, makers: Iterable[str]) -> bool:
        """Whether `running` is to be told of a completion that goes on and is waited for, of which enough was made since the
        last time: a long one, one that was chosen by chance, or one with makers of which all is checked; on alert any that
        is longer than usual."""
        key, alert = LookKey(group_id, seed), self.on_alert()
        if not self._looks.due(key, length, self._long.least, GROWN_ON_ALERT if alert else GROWN):
            return False
        by_chance = chosen(self.secret, *key, self.standing.rules.audit_share)
        return (alert and length > self._long.usual) or by_chance or length >= self._long.least or any(map(self.all_of, makers))

    def running(self, group_id: int, trajectory: Trajectory) -> int:
        """What there is of a completion that `looks_at` named is checked at once: what is chosen of it, and of a long one what
        its makers' allowances have room for; on alert all of it. The rest is checked when it has ended. Tokens that are read."""
        key, made, ids = LookKey(group_id, trajectory.seed), list(parts_of(trajectory)), trajectory.completion_ids
        long = tokens_of(made) >= self._long.least
        left = [part for part in self._looks.behind(key, ids, made) if self._has_state(trajectory, part)]
        tokens = len(trajectory.prompt_ids) + len(ids)
        if left and not self._waiting.takes_first(most_of(left), tokens):
            return 0  # it is looked at when there is room again
        alert = self.on_alert()
        parts = [part for part in left if self._chosen(part, key, alert=alert) or self._takes_long(part, trajectory, long)]
        self._looks.looked(key, ids, parts)  # before: it may be dropped at once
        self._check(key, trajectory, parts, soon=True, first=True)
        return tokens if parts else 0

    def probe(self, probe: Probe) -> bool:
        """There is more of a probe, or it is over. All of it is checked when it is, whether it ended or not, in place of what
        waits of it; before, as far as `looks_at` says so and there is room for it. Whether anything waits from here on."""
        key, due = LookKey(-probe.number, probe.request.seed), probe.over and probe.tokens > 0
        if not probe.over and self._has_room(probe.node, len(probe.request.prompt_ids) + probe.tokens):
            due = self.looks_at(*key, probe.tokens, (probe.node,))
        if due:
            made = probe.so_far()
            for check in self._waiting.take_out(probe.node, lambda one: one.group_id == key.group_id) if probe.over else ():
                self._looks.not_checked(key, check.parts)
            left = self._looks.behind(key, made.completion_ids, list(parts_of(made)))
            parts = [part for part in left if self.standing.audit_share(part.node) > 0 and self._has_state(made, part)]
            self._looks.looked(key, made.completion_ids, parts)
            # What its node can tell for a copy shows nothing of what else it makes.
            whole = probe.ended and not probe.behind and len(parts) == len(left)
            self._check(key, made, parts, soon=True, whole=whole)
            due = bool(parts)
        if probe.over:
            self.counts["probed"] += probe.tokens
            self._looks.ended(key.group_id)
        return due

    def _has_room(self, node: str, tokens: int) -> bool:
        """Whether so many tokens of a node's would be read soon: asked first, since it is asked of each event."""
        return self.waiting_tokens + tokens <= SOON_TOKENS and self._waiting.takes(node, tokens)

    def remade(self, node: str) -> None:
        """What this node makes under way is made again."""
        self._looks.remade(node)

    def _check(
        self, key: LookKey, trajectory: Trajectory, parts: Sequence[MadePart], *, soon: bool, whole: bool = False,
        first: bool = False,
    ) -> None:  # fmt: skip
        """These parts wait."""
        if parts:
            self._wait(Check(
                key.group_id, trajectory.prompt_ids, trajectory.completion_ids, trajectory.logprobs,
                seed=trajectory.seed, parts=tuple(parts), kinds=tuple(self._kind(part.node).arithmetic for part in parts),
                given=tuple((gap.start, gap.stop) for gap in trajectory.given), whole=whole,
            ), soon=soon, first=first)  # fmt: skip

    def published(self, version: Version, size: int = 0) -> int:
        """A version is out; see `ChosenVersions.published`."""
        return self.versions.published(version, self.standing.rules.audit_share, size)

    def next(self, most_tokens: int) -> list[Check]:
        """What is checked now, taken from what waits: of so many tokens, one completion at least. [] when nothing waits."""
        return self._waiting.next(most_tokens)

    @property
    def waiting(self) -> int:
        """Completions that wait."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait."""
        return self._waiting.tokens

    @property
    def urgent(self) -> bool:
        """Whether a completion waits of a node of which all are checked, which is not proven or was doubted; or a long one."""
        return self._waiting.some_soon

    @property
    def first_tokens(self) -> int:
        """Tokens that wait of what the trainer waits for."""
        return self._waiting.first_tokens

    def waits_for(self) -> set[Version]:
        """The versions under which what waits is scored."""
        return {part.version for check in self._waiting for part in check.parts}

    def all_of(self, node: str) -> bool:
        """Whether all of this node's completions are checked."""
        return self.standing.audit_share(node) >= 1.0

    def drop(self, node: str = "") -> None:
        """What waits of this node (of all nodes) is not checked."""
        self._waiting.drop(node)

    def lost(self, checks: Sequence[Check]) -> None:
        """These were taken, and are not checked after all."""
        for check in checks:
            self._drop(check)

    # ---- what was found

    def found(self, check: Check, found: Sequence[Deviations | None]) -> list[Judged]:
        """Take what scoring gave of each part, None where the state was not held any more. What it says of each node; those whom
        it proves wrong are told again each time, until the operator forgives them or their kind's bounds change."""
        said: dict[str, tuple[int, Verdict]] = {}
        for node in {part.node for part in check.parts}:  # here: between two parts a verdict is not told yet
            if not self.standing.of(node).expelled:
                self._tests.not_expelled(node)
        for part, kind, deviations in zip(check.parts, check.kinds, found, strict=True):
            if deviations is None:
                self.counts["unknown"] += part.stop - part.first
                continue
            tokens = len(deviations.distance)
            trusted, places = self.standing.trusts(part.node), places_of(part.first, part.stop, check.given)
            test = None if trusted else self._tests.test(part.node, kind)  # before: where it begins anew, nothing was seen
            seen = self._seen.of(str(kind) if trusted else part.node)  # a kind is measured on all of its trusted nodes
            again = seen.again(check.prompt_ids, check.completion_ids, places, deviations.claimed, deviations.recomputed)
            if test is None:
                self.counts["calibrated"] += tokens
                prompts = np.full(tokens, prompt_number(check.prompt_ids), np.float64)
                self.calibration.add(kind, *deviations, repeated=~np.isnan(again), prompts=prompts)
                continue
            self.counts["checked"] += tokens
            was = test.caught_at
            prompt = prompt_number((*check.prompt_ids, -1 - part.version.step // DRAWN_AGAIN))
            verdict = test.look(*deviations, again=again, prompts=np.full(tokens, float(prompt)))
            verdict = replace(
                verdict, notable=verdict.notable or self._tests.notable(part.node, test, deviations, again),
                gross=int((grossness(deviations.distance, deviations.shift) >= 1.0).sum()) * (test.honest.gross < MAY_BE_GROSS),
            )  # fmt: skip
            self.counts["caught"] += bool(test.caught_at and not was)
            before = said.get(part.node)
            if before is not None and before[1].caught:
                verdict = before[1]
            elif before is not None:
                verdict = replace(verdict, notable=verdict.notable or before[1].notable, gross=verdict.gross + before[1].gross)
            said[part.node] = (tokens + (before[0] if before is not None else 0), verdict)
        whole = check.whole and all(deviations is not None for deviations in found)
        return [Judged(node, tokens, verdict, whole) for node, (tokens, verdict) in said.items()]

    def own(self, own: OwnDeviations) -> bool:
        """What the auditor itself would have come to as a node of the kind `own_kind`. Whether it is measured with these."""
        wanted, found = self.calibration.wants_own(self.own_kind), own.found
        drawn = np.isfinite(found.claimed)  # one that float32's nucleus has not counts: so does rounding to a nucleus
        self.counts["own"] += int(drawn.sum())
        columns, repeated, prompts = (column[drawn] for column in found), own.repeated[drawn], own.prompts[drawn]
        self.calibration.add(self.own_kind, *columns, repeated=repeated, prompts=prompts, own=True)
        return wanted and not self.calibration.wants_own(self.own_kind)

    def wants_own(self, checks: Sequence[Check]) -> int:
        """Tokens of its own that the auditor is asked for with these completions: none where what their nodes are held to does
        not rest on them."""
        kinds = {kind for check in checks for kind in check.kinds}
        rest_on_it = not all(map(self.calibration.stands, kinds))
        return OWN_AT_ONCE if rest_on_it and self.calibration.wants_own(self.own_kind) else 0

    def tests(self, node: str) -> list[NodeTest]:
        """Its tests, one for each kind of arithmetic that it had."""
        return self._tests.of(node)

    # ---- inside

    def _made(self, made: Sequence[MadePart]) -> None:
        """A completion has ended: proven nodes' tokens of which a share is checked."""
        for part in made:
            if not self.all_of(part.node) and not self.standing.trusts(part.node):
                self.versions.made(part.stop - part.first)
                self._long.made(part.node, part.stop - part.first)

    def _chosen(self, part: MadePart, key: LookKey, *, alert: bool = False) -> bool:
        times = self.versions.times(part.version)
        if self.standing.trusts(part.node):
            return times > 0 and self.calibrates() and self.calibration.wants(self._kind(part.node).arithmetic)
        share = self.standing.audit_share(part.node)
        if alert:
            return share > 0
        share *= times if share < 1.0 else 1.0
        return share > 0 and chosen(self.secret, *key, share)

    def _takes_long(self, part: MadePart, trajectory: Trajectory, long: bool) -> bool:
        """Whether a part that was not chosen is checked since its completion is long."""
        node, tokens = part.node, part.stop - part.first
        some = long and not self.standing.trusts(node) and self.standing.audit_share(node) > 0
        return some and self._has_state(trajectory, part) and self._long.takes(node, tokens)

    def _kind(self, node: str) -> ToldKind:
        kind = self.kind_of(node)
        if kind is None:
            return self._kinds.get(node, UNTOLD)
        self._kinds[node] = kind
        renewed(self._kinds, node)
        forget_oldest(self._kinds, MOST_TESTED, self._is_here)
        return kind

    def _is_here(self, node: str) -> bool:
        return self.kind_of(node) is not None

    def _has_state(self, trajectory: Trajectory, part: MadePart) -> bool:
        """Whether a part, or a piece of one, was made under one version of this learner's life: where its node keeps keys and
        values, and had the sequence already, those of older weights went into it."""
        run = next(made for made in parts_of(trajectory) if made.first <= part.first < made.stop)
        begun = next((m.start for m in reversed(trajectory.makers) if m.start <= run.first), 0)
        return part.version.epoch == self.epoch and not (self._kind(part.node).keeps and run.first > begun)

    def _wait(self, check: Check, *, soon: bool, first: bool) -> None:
        node = most_of(check.parts)
        self._waiting.add(node, check, soon=soon or self.all_of(node), first=first)

    def _drop(self, check: Check) -> None:
        self.counts["dropped"] += tokens_of(check.parts)
        self._looks.not_checked(LookKey(check.group_id, check.seed), check.parts)


UNTOLD = ToldKind(NodeArithmetic("unknown", "unknown", "unknown"))
"""A node that never said how it computes."""
