"""Copies of sequences, made only to be checked: which nodes are given one, and what came of it. Pure, told the time.

Proven nodes that turn together and cheat now and then each hold the trainer up once before they are found. While that goes on
(`learner.standing.wave`), places that nobody needs are given copies of what others are given in the same moment: nobody waits for
them, all of them is checked, and nothing of them is trained on. A copy has its original's name, prompt and seed and goes out with
it, so that who sees one of them cannot tell by it which it is (docs/design/audits.md says what tells it all the same). Must not
know how a token is checked, or links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.rollouts.beside import Taken
from learner.rollouts.event_checks import Expected, add_event
from learner.rollouts.stop_strings import StopStrings
from learner.trajectory import Trajectory
from p2p.errors import Refusal
from p2p.forgetting import forget_oldest
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Completion, Generate, TokenEvent
from p2p.version import Version

COPIES = 3
"""Copies of a sequence: of those that get it for the first time, so many in four are found by what nobody waits for."""

MOST_PROBES = 16
"""Probes that a node ends in one alert, unless it was found wrong meanwhile. Who cheats in one completion of ten is found by
these in five cases of six."""

MOST_AT_ONCE = 64
"""Probes under way: what they make waits to be checked."""

PROBE_S, MOST_S = 60.0, 600.0
"""Seconds without a token after which a probe is given up, and after which it is in any case. Nobody is doubted for it: nobody
waits."""

MOST_OVER = 16_384
"""Probes that are over and whose late tokens are still known for what they are."""


class FreeNode(NamedTuple):
    """A node that may be given a probe."""

    peer: str
    version: Version
    """that it serves"""
    free: int
    """places that it has"""
    found_wrong: bool = False
    """it gets nothing else until it has shown what it makes"""


@dataclass(slots=True, eq=False)
class Probe:
    """A copy at its node."""

    number: int
    node: str
    request: Generate
    given: float
    """when"""
    since: float
    """when it was given, or brought its last tokens"""
    completion: Completion = field(default_factory=Completion)
    ended: bool = False
    """as asked"""
    over: bool = False
    """nothing more is taken of it"""

    @property
    def tokens(self) -> int:
        """That it has so far."""
        return len(self.completion.ids)

    def so_far(self) -> Trajectory:
        """What it comes to if it ends here."""
        made = self.completion
        return Trajectory(
            prompt_ids=self.request.prompt_ids, completion_ids=tuple(made.ids), logprobs=tuple(made.logprobs),
            spans=tuple(made.spans), finish="length", node=self.node, seed=self.request.seed,
        )  # fmt: skip


class Heard(NamedTuple):
    """What came of an event, and of which probe."""

    taken: Taken
    probe: Probe | None = None
    """None: of one that was over"""


class ProbeBook:
    """All of one learner's life. `stop`: strings that end a sequence; `published`: versions of which tokens may come."""

    def __init__(self, vocab_size: int | None, stop: StopStrings | None, published: Container[Version]) -> None:
        self._vocab_size, self._stop, self._published = vocab_size, stop, published
        self._held: dict[str, dict[str, Probe]] = {}
        """node -> request id -> what it works on"""
        self._over: dict[str, None] = {}
        """"node request-id" of what is not looked for any more, oldest first"""
        self._shown: Counter[str] = Counter()
        """probes of each node that ended since the alert began"""
        self._last = 0
        self.counts: Counter[str] = Counter()
        """"given", "ended", and "tokens" that came of them"""

    def rest(self) -> None:
        """There is no alert: in the next one each node is probed anew."""
        self._shown.clear()

    def anew(self, node: str) -> None:
        """It was found wrong, and has as much to show again."""
        del self._shown[node]

    # ---- work out

    def give(
        self, given: Iterable[tuple[str, GenerateRequest]], nodes: Sequence[FreeNode], now: float
    ) -> list[tuple[str, GenerateRequest]]:
        """`given`: what goes out now, and to whom; `nodes`: those that may be given a probe, full ones too. Who is given a copy
        of which: COPIES of each that begins, MOST_AT_ONCE under way in all and in no more than half of the places that are
        free, one at a node. First those that were found wrong, then those that were probed least."""
        places = sum(max(0, n.free) for n in nodes)
        most = min(MOST_AT_ONCE, (places + len(self._held)) // 2)
        free = [
            n for n in nodes
            if n.free > 0 and n.peer not in self._held and (n.found_wrong or self._shown[n.peer] < MOST_PROBES)
        ]  # fmt: skip
        free.sort(key=lambda n: (not n.found_wrong, self._shown[n.peer], n.peer))
        newest = max((n.version for n in free), default=None)
        out: list[tuple[str, GenerateRequest]] = []
        fresh = [
            (peer, r) for peer, r in given
            if newest is not None and not r.prefix_ids and r.exact_version is None and r.min_version <= newest
        ]  # fmt: skip
        for peer, request in fresh * COPIES:
            if not free or len(self._held) >= most:
                break
            node = next((n for n in free if n.peer != peer and n.version >= request.min_version), None)
            if node is None or f"{node.peer} {request.request_id}" in self._over:
                continue
            free.remove(node)
            self._last += 1
            self._held[node.peer] = {request.request_id: Probe(self._last, node.peer, request.generate(), now, now)}
            self.counts["given"] += 1
            out.append((node.peer, request))
        return out

    def expire(self, now: float) -> list[Probe]:
        """Those that brought nothing for PROBE_S, or are under way for MOST_S, are given up."""
        held = [probe for of in self._held.values() for probe in of.values()]
        late = [p for p in held if not (0 <= now - p.since < PROBE_S and now - p.given < MOST_S)]
        for probe in late:
            self.drop(probe)
        return late

    # ---- work in

    def owns(self, node: str, request_id: str) -> bool:
        """Whether this is, or was, a probe there."""
        return request_id in self._held.get(node, ()) or f"{node} {request_id}" in self._over

    def tokens(self, node: str, event: TokenEvent, now: float) -> Heard:
        """Take one event of what `owns` knows. Never raises on anything a node can send."""
        probe = self._held.get(node, {}).get(event.request_id)
        if probe is None:
            return Heard(Taken(late=True))
        request, made = probe.request, probe.completion
        added = add_event(made, event, Expected(
            held=len(made.ids), limit=request.max_new_tokens, stop_ids=request.stop_ids, published=self._published,
            least=made.spans[-1].version if made.spans else request.min_version, vocab_size=self._vocab_size,
        ), self._stop)  # fmt: skip
        wrong, taken = added.wrong, added.event.count if added.event is not None else 0
        probe.ended = bool(added.ending)
        if wrong is None and event.finish in ("error", "abort") and not probe.ended:
            wrong = f"gave up with {event.finish}: {event.message:.200}"
        if wrong is not None:
            self.drop(probe)
            refusal = Refusal(f"request {event.request_id}: {wrong}", peer=node, version=event.version)
            return Heard(Taken(taken, refusal, ((node, event.request_id),)), probe)
        probe.since = now if taken else probe.since
        self.counts["tokens"] += taken
        if probe.ended or event.finish:
            self.drop(probe)
        self.counts["ended"] += probe.ended
        self._shown[node] += probe.ended
        cancel = ((node, event.request_id),) if added.cut and not event.finish else ()
        return Heard(Taken(taken, cancel=cancel, made=probe.tokens * probe.ended), probe)

    def drop(self, probe: Probe) -> None:
        """It is over. What still comes of it is nobody's fault."""
        probe.over, held = True, self._held.get(probe.node, {})
        if held.pop(probe.request.request_id, None) is not None:
            self._over[f"{probe.node} {probe.request.request_id}"] = None
            forget_oldest(self._over, MOST_OVER)
        if not held:
            self._held.pop(probe.node, None)

    def lost(self, node: str) -> list[Probe]:
        """What it holds is over: it is gone, or not believed."""
        held = list(self._held.get(node, {}).values())
        for probe in held:
            self.drop(probe)
        return held

    def working(self, node: str) -> Mapping[str, Probe]:
        """Request id -> what `node` works on."""
        return self._held.get(node, {})
