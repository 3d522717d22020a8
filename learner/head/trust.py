"""The head's books of its nodes' standing: what happened goes in with the time, and who is expelled loses its link. A thin shell.

What a record makes of it is `standing`, how much each node may hold `shares`. Must not know sequences or versions.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from learner.admission.head_door import HeadDoor
from learner.head.node_state import BackOffs, NodeState
from learner.rollouts.taking_back import TakenBack
from learner.standing.mismatch import MismatchWatch
from learner.standing.port import NodeConduct
from learner.standing.rests import Rest, Rests
from learner.standing.shares import MadeOfLate, NodeHolding, limits
from learner.standing.standing import Standing, StandingRules
from learner.standing.wave import ALERT_COMPLETIONS, WAVE_COMPLETIONS, WAVE_S, WaveWatch
from learner.trajectory import Group, Maker
from p2p.complaints import complain
from p2p.forgetting import forget_oldest, renewed
from p2p.membership.conduct import PeerConduct

KEEP_S = 5.0
"""Seconds between two times that records are written down: what a crash forgets."""

APART_S = 10.0
"""Seconds after the last proven node took work for which strangers still pass nothing on, if one is there."""

PROBES_S = 60.0
"""Seconds after the last probe for which work is withheld from nodes that have probes to show what they make."""

ODD_DOUBTS = 3
"""Doubts that are not forgotten, beyond which a node that is found wrong once more is expelled: no honest node is found so."""

SPARE_S = 0.5
"""While the unproven made more than their share, one of them is given one sequence so often: else large honest nodes would wait
long beside one small proven one."""

log = logging.getLogger("shoal.head")


class Trust(NodeConduct, PeerConduct):
    """`nodes` are the live ones, `door` asks here who is expelled, and its books keep the records. `wall` reads the Unix time;
    `expel(peer, why)` closes a link and keeps the peer away."""

    def __init__(
        self, rules: StandingRules, nodes: Mapping[str, NodeState], door: HeadDoor | None = None,
        max_staleness: int = 0, *, wall: Callable[[], float], expel: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.standing = Standing(rules)
        self._kept, self._keep_at = door.books if door is not None else None, 0.0
        if door is not None:
            door.standing = self.standing
            self.standing.restore(door.books.records())
        self._nodes, self._wall, self._expel = nodes, wall, expel
        self.back_offs = BackOffs(nodes)
        self._made, self._spare_at, self._with_unproven = MadeOfLate(), 0.0, 0
        self.mismatch, self._wave = MismatchWatch(max_staleness), WaveWatch()
        self.take_back: Callable[[str], TakenBack] = lambda peer: TakenBack()
        """makes what a caught node made again, as far as the trainer does not have it; the head sets it"""
        self.taken = TakenBack()
        """in all"""
        self.caught_nodes = 0
        """how often one was caught, in this life of the learner"""
        self.caught_last, self.caught_trained = "", 0
        """which one was last, and why; and tokens of all of them that the trainer has"""
        self.trained: Counter[str] = Counter()
        """tokens of each node that the trainer was handed, in this life of the learner; of nodes that are gone, the last ones"""
        self._rests = Rests()
        self._some_unhurt = False
        """whether a proven node was there that is on trial for others' faults alone"""
        self._credible_here = False
        """whether a proven node that takes work and is not on trial again was there at the last look"""
        self._apart_until = self._probes_at = float("-inf")
        """when the last of them was, and so much longer; and when probes were given last"""

    # ---- what happened (NodeConduct)

    def ended(self, peer: str, tokens: int) -> None:
        self.standing.ended(peer, tokens)
        self._made.ended(proven=self.standing.proven(peer))

    def doubt(self, peer: str, why: str) -> None:
        self._follow(peer, self.standing.doubt(peer, why, self._wall()))

    def odd(self, peer: str, why: str, now: float) -> None:
        """Some of what it made is grossly wrong, and not enough to expel it: what the trainer does not have of it is made again,
        it is doubted and gets nothing for as long unless nobody else is there, and is in question until it made something sound.
        While it rests or is away already it is made again, and no more. `now` is of the head's clock. sqlite3.Error as of
        `caught`."""
        if self.standing.trusts(peer):
            return
        back = self._make_again(peer)
        if self._rests.resting(peer, now) or self.standing.barred_s(peer, self._wall()):
            return
        self._found_wrong(peer, why)
        complain(log, peer, f"node {peer} is not believed for now: {why:.300}; {back}")
        self.doubt(peer, why)
        if self.standing.barred_s(peer, self._wall()):
            return
        if self.standing.of(peer).strikes > ODD_DOUBTS:
            self.caught(peer, f"{why}, and it was doubted {ODD_DOUBTS} times not long before")
            return
        self.standing.question([peer], math.inf, ALERT_COMPLETIONS if self.on_alert() else WAVE_COMPLETIONS)
        self._has_rest(peer, self._rests.begin(peer, self.standing.doubted_s(peer, self._wall()), now), now)

    def held_up(self, peer: str, now: float) -> None:
        rest = self._rests.again(peer, now) if self.standing.found_wrong(peer) else None
        if rest is not None:
            self._has_rest(peer, rest, now)

    def _has_rest(self, peer: str, rest: Rest, now: float) -> None:
        if not all(map(self.standing.found_wrong, self._nodes)):
            self.back_offs.of(peer).more(now, rest.lasts_s)

    def _make_again(self, peer: str) -> TakenBack:
        back = self.take_back(peer)
        self.taken = TakenBack(*(a + b for a, b in zip(self.taken, back, strict=True)))
        return back

    def _found_wrong(self, peer: str, why: str) -> None:
        proven, now = self.proven_here(), self._wall()
        if peer in proven and not self.standing.found_wrong(peer) and self._wave.found(peer, len(proven), now):
            self.standing.question(proven, now + WAVE_S)
            log.warning("several proven nodes turned at about the same time, the last one %s (%.200s): all that others make is "
                        "checked until some of it was sound", peer, why)  # fmt: skip

    def refused(self, peer: str, why: str, now: float, *, fatal: bool) -> bool:
        """As `p2p.membership.conduct` asks it; times here are the wall's. A fatal refusal expels: no honest node causes one."""
        expelled = fatal or self.standing.refused(peer, why, self._wall())
        if fatal:
            self.standing.expel(peer, why, self._wall())
        self._follow(peer, expelled)
        return fatal or (expelled and not self.standing.trusts(peer))

    def barred_s(self, peer: str, now: float) -> float:
        return self.standing.barred_s(peer, self._wall())

    def trained_on(self, by_node: object) -> None:
        """What the trainer says of a step: peer -> [tokens, sum of their mismatch in nats]; anything else is passed over. Who
        does not fit is expelled at once."""
        if not isinstance(by_node, dict):
            return
        step = {peer: (int(n), float(total)) for peer, (n, total) in filter(_is_sums, by_node.items())}
        self.mismatch.add(step)
        for peer, why in self.mismatch.outliers(self.credible).items():
            self.caught(peer, why)
            self.mismatch.forget(peer)

    def handed(self, groups: Iterable[Group]) -> None:
        """The trainer was handed these."""
        for group in groups:
            for t in group.trajectories:
                ends = [m.start for m in t.makers[1:]] + [len(t.completion_ids)]
                for maker, end in zip(t.makers or (Maker(0, t.node),), ends if t.makers else ends[-1:], strict=True):
                    self.trained[maker.node] += end - maker.start
                    renewed(self.trained, maker.node)
        forget_oldest(self.trained, stays=self._nodes.__contains__)

    def checks(self, on: bool, share: float = 0.0) -> None:
        """Whether what nodes make is checked (then it must be, before a node is proven), and which share of a proven node's."""
        if not on:
            self.standing.no_questions()
        self.standing.rules = replace(self.standing.rules, checks=on, audit_share=share)

    def is_checked(self, peer: str) -> bool:
        """Whether anything of what it makes is."""
        return self.standing.audit_share(peer) > 0

    def on_alert(self) -> bool:
        return self._wave.alert(self._wall())

    def answer_for(self, peer: str) -> None:
        """It is the learner's own: trusted."""
        self.standing.rules = replace(self.standing.rules, trusted=self.standing.rules.trusted | {peer})

    def caught(self, peer: str, why: str) -> None:
        """It cheated, or is broken: it goes at once, and what it made is made again where the trainer does not have it yet.
        sqlite3.Error when that cannot be written down."""
        if self.standing.trusts(peer):
            log.warning("node %s, which is trusted: %.500s", peer, why)
            return
        self.caught_nodes += 1
        self._found_wrong(peer, why)
        back = self._make_again(peer)
        trained = self.trained.pop(peer, 0)
        said = f"{why}; {trained:,} of its tokens went to the trainer; {back}"
        self.caught_trained += trained
        self.caught_last = f"{self._nodes[peer].link.name if peer in self._nodes else 'a node'} ({peer}): {said}"
        self.standing.expel(peer, said, self._wall())
        self._follow(peer, expelled=True)

    def tick(self) -> None:
        """Every now and then: write down what changed."""
        now = self._wall()
        if self._kept is None or now < self._keep_at:
            return
        self._keep_at = now + KEEP_S
        changed = self.standing.take_changed()
        try:
            self._kept.keep(changed)
        except sqlite3.Error as error:  # it is written down with the next change; nothing else waits for it
            log.warning("the standing of %d peers cannot be kept: %s", len(changed), error)

    def _follow(self, peer: str, expelled: bool) -> None:
        if expelled and not self.standing.trusts(peer):
            why = self.standing.why(peer)
            complain(log, peer, f"node {peer} is expelled: {why:.500}")
            self._expel(peer, why)

    # ---- what follows

    def passes_on(self, peer: str) -> bool:
        """A stranger passes nothing on while somebody proven is there: whoever withholds what others wait for would hold up each
        version by the seconds until they ask elsewhere. A proven node that takes no work for a moment, as between two versions,
        is still there."""
        return self._wall() >= self._apart_until or self.standing.proven(peer)

    def credible(self, peer: str) -> bool:
        """As `NodeConduct` asks it. Where all proven nodes are on trial again, those are believed that are so for others' faults;
        and else who has ended something since is better than nobody: else nothing that anybody holds could be taken."""
        if self.standing.proven(peer) and not self.doubted(peer):
            return True
        if self._credible_here or self.standing.doubts(peer) or self.standing.found_wrong(peer):
            return False
        return self._is_unhurt(peer) if self._some_unhurt else self.standing.made_since_expelled(peer)

    def anybody_proven(self) -> bool:
        return self._credible_here or self._some_unhurt

    def _is_unhurt(self, peer: str) -> bool:
        """Whether it is proven, and on trial for others' faults at the most."""
        return self.standing.proven(peer) and not self.standing.doubted_s(peer, self._wall()) and not (
            self.standing.doubts(peer) or self.standing.found_wrong(peer)
        )

    def doubted(self, peer: str) -> bool:
        return self.standing.doubted(peer, self._wall())

    def leaves(self, peer: str) -> bool:
        return peer in self._nodes and self._nodes[peer].draining

    def delivered(self, peer: str) -> bool:
        return self.standing.delivered(peer)

    def proven_here(self) -> frozenset[str]:
        """The proven nodes that have a link."""
        return frozenset(filter(self.standing.proven, self._nodes))

    def limits(self, load: Callable[[str], int], able: Callable[[NodeState], bool], slow: Container[str] = ()) -> dict[str, int]:
        """Most sequences of each node that may not hold as many as it can. `slow` ones give way to quicker ones. Those of
        which work is withheld are not among them."""
        held = [
            NodeHolding(p, node.capacity, load(p), able(node), p in slow) for p, node in self._nodes.items()
            if not self.withheld(p)
        ]  # fmt: skip
        now, proven = self._wall(), [node.peer for node in held if node.able and self.standing.proven(node.peer)]
        self._credible_here = not all(self.standing.doubted(peer, now) for peer in proven)
        self._some_unhurt = not self._credible_here and any(map(self._is_unhurt, proven))
        if proven:
            self._apart_until = now + APART_S
        elif not any(map(self.standing.proven, self._nodes)):
            self._apart_until = float("-inf")
        with_unproven = sum(node.load for node in held if not self.standing.proven(node.peer))
        if with_unproven > self._with_unproven:  # it is asked oftener than anything is given
            self._spare_at = now + SPARE_S
        self._with_unproven = with_unproven
        return limits(self.standing, held, self._made, int(now >= self._spare_at), now)

    def withheld(self, peer: str) -> bool:
        """Whether it gets no work but probes, to show what it makes: it is proven and was found wrong, there is an alert, probes
        are given, and another's word counts."""
        return (
            self.standing.found_wrong(peer) and self.standing.proven(peer) and self._credible_here and self.on_alert()
            and 0 <= self._wall() - self._probes_at < PROBES_S
        )  # fmt: skip

    def probes_given(self) -> None:
        """Some were just now."""
        self._probes_at = self._wall()

    def describe(self, peer: str) -> dict[str, Any]:
        """Its part of a node's row: its standing in a word, and what it may hold."""
        record = self.standing.of(peer)
        word = "trusted" if self.standing.trusts(peer) else "proven" if self.standing.proven(peer) else "on trial"
        return {"standing": word, "doubts": record.doubted, "expelled": record.expelled}

    def caught_status(self) -> dict[str, Any]:
        """What the nodes come to that were caught, in this life of the learner."""
        return {
            "nodes": self.caught_nodes, "last": self.caught_last, "trained_tokens": self.caught_trained,
            "remade_groups": self.taken.groups, "remade_completions": self.taken.completions, "remade_tokens": self.taken.tokens,
        }  # fmt: skip

    def status(self, peers: Iterable[str]) -> dict[str, int]:
        """How many of these are proven, and how many records there are."""
        return {"proven": sum(map(self.standing.proven, peers)), "records": len(self.standing)}


def _is_sums(item: tuple[object, object]) -> bool:
    peer, sums = item
    if not isinstance(peer, str) or not isinstance(sums, list) or len(sums) != 2:
        return False
    return all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in sums) and sums[0] >= 1
