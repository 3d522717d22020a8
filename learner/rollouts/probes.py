"""Copies of sequences, made only to be checked: which nodes are given one, and what came of it. Pure, told the time.

Proven nodes that turn together and cheat now and then each hold the trainer up once before they are found. While that goes on
(`learner.standing.wave`), places that nobody needs are given copies of what others are given in the same moment: nobody waits for
them, all of them is checked, and nothing of them is trained on. A copy has its original's name, prompt and seed and goes out with
it, so that who sees one of them cannot tell by it which it is (docs/design/audits.md says what tells it all the same). Must not
know how a token is checked, or links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from msgspec.structs import replace

from learner.dispatch.node_table import FILL, peak
from learner.rollouts.beside import Footprint, Taken
from learner.rollouts.event_checks import Expected, add_event
from learner.rollouts.silences import SLOWER, Usual
from learner.rollouts.stop_strings import StopStrings
from learner.trajectory import Trajectory
from p2p.errors import Refusal
from p2p.forgetting import forget_oldest
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Completion, Generate, TokenEvent
from p2p.version import Version

COPIES = 3
"""Copies of a sequence: of those that get it for the first time, so many in four are found by what nobody waits for."""

MOST_PROBES, FADE_S = 16, 30.0
"""Probes that a node is given at once in an alert, unless it was found wrong meanwhile, and one more each so many seconds. Who
cheats in one completion of ten is found by the first ones in five cases of six; who waits until they are over, by those after."""

MOST_AT_ONCE, AT_NODE = 64, 2
"""Probes under way, and at a node. What they make waits to be checked. Were it one at a node, who keeps one for long would know
all else for what it is."""

MOST_TOKENS = 65_536
"""Tokens that all which are under way have, with their prompts and what they will probably still make: an auditor on a processor
reads them in some fifteen seconds."""

UNKNOWN_GROWTH = 256
"""Tokens that one which has fewer will probably still make; others as many as they have."""

PROBE_S, MOST_S = 60.0, 600.0
"""Seconds without a token after which a probe is given up, and after which it is in any case."""

BEHIND = 1
"""Versions that a node may be behind what its original wants; it is asked for its own then. After each publication most are for a
moment, and the auditor still has the state before the newest."""

MOST_LOOKS = 2_048
"""Nodes that are looked at for all copies of one moment, so that thousands which suit none cost little."""

MOST_GIVEN_UP = 16
"""Probes that are given up at one moment: each may have thousands of tokens that are to be checked."""

ID_BYTES = 4
"""Of a packed token id."""

PATIENCE = (0.5, 3.0)
"""It is given up sooner where it is silent for so many times as long as what is made at once, or has come SLOWER times slower
than is usual for as long; how many times is drawn for each. An original is taken for that while the trainer waits: who is silent
shall not see soon that nobody waits for it. Nobody is doubted for it."""

WAITS_S = (0.5, 30.0)
"""A node of which a probe was given up, or that gave one back, is given none for so long: doubled each time up to the second,
until it ends one. Else who gives back at once has all of them."""

MOST_OVER = 16_384
"""Probes that are over and whose late tokens are still known for what they are."""

MOST_KNOWN = 4_096
"""Nodes that hold none and of which it is known what they were given."""


class FreeNode(NamedTuple):
    """A node that may be given a probe."""

    peer: str
    version: Version
    """that it serves"""
    free: int
    """places that it has"""
    found_wrong: bool = False
    """it gets nothing else until it has shown what it makes"""
    holds: Footprint = Footprint()
    """what its sequences take of its key-value memory"""
    room: float = 0.0
    """tokens that this memory has; 0 when it does not say"""

    def fits(self, request: GenerateRequest) -> bool:
        """Whether it has memory for one more, as the dispatcher asks it."""
        if not self.room or not self.holds.context:
            return True
        growth = min(request.max_new_tokens, UNKNOWN_GROWTH)
        return bool(
            peak(self.holds.context + len(request.prompt_ids) // ID_BYTES, self.holds.growth + growth) <= FILL * self.room
        )


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
    patience: float
    """times as long as others it may be silent or slow"""
    began: float | None = None
    """when its first tokens came"""
    completion: Completion = field(default_factory=Completion)
    ended: bool = False
    """as asked"""
    over: bool = False
    """nothing more is taken of it"""

    @property
    def tokens(self) -> int:
        """That it has so far."""
        return len(self.completion.ids)

    @property
    def footprint(self) -> Footprint:
        """What it takes. How long it becomes nobody foretells."""
        growth = min(self.request.max_new_tokens - self.tokens, max(self.tokens, UNKNOWN_GROWTH))
        return Footprint(float(len(self.request.prompt_ids) + self.tokens), float(growth))

    def so_far(self) -> Trajectory:
        """What it comes to if it ends here."""
        made = self.completion
        return Trajectory(
            prompt_ids=self.request.prompt_ids, completion_ids=tuple(made.ids), logprobs=tuple(made.logprobs),
            spans=tuple(made.spans), finish="length", node=self.node, seed=self.request.seed,
        )  # fmt: skip

    def late(self, now: float, usual: Usual) -> bool:
        """Whether it is given up. `usual`: what is, of this node's, where an original would be taken for being late."""
        at_once_s = self.patience * usual.at_once_s
        silent_s = at_once_s if self.began is not None else self.patience * usual.begins_s
        if not (0 <= now - self.since < min(PROBE_S, silent_s) and now - self.given < MOST_S):
            return True
        lasts_s = now - self.began if self.began is not None else 0.0
        return lasts_s > at_once_s and SLOWER * self.tokens < lasts_s * usual.tokens_per_s


@dataclass(slots=True)
class _Known:
    """Of a node."""

    held: dict[str, Probe] = field(default_factory=dict)
    """request id -> what it works on"""
    given: float = 0.0
    """probes since the alert began, of late: see `shown`"""
    at: float = 0.0
    """when the last one was"""
    waits_until: float = float("-inf")
    """it is given none before"""
    waited_s: float = 0.0
    """how long that was last"""

    def shown(self, now: float) -> float:
        """Probes that it was given, one forgotten each FADE_S."""
        return max(0.0, self.given - max(0.0, now - self.at) / FADE_S)

    def gave_none(self, now: float) -> None:
        """One did not end."""
        self.waited_s = min(max(2 * self.waited_s, WAITS_S[0]), WAITS_S[1])
        self.waits_until = now + self.waited_s


class Heard(NamedTuple):
    """What came of an event, and of which probe."""

    taken: Taken
    probe: Probe | None = None
    """None: of one that was over"""


def _behind(version: Version) -> Version:
    """What a node serves at the least that is given a copy of what wants this version."""
    return Version(version.epoch, max(0, version.step - BEHIND))


class ProbeBook:
    """All of one learner's life. `stop`: strings that end a sequence; `published`: versions of which tokens may come; `draw()`: a
    number from 0 to 1 that no node knows."""

    def __init__(
        self, vocab_size: int | None, stop: StopStrings | None, published: Container[Version], draw: Callable[[], float]
    ) -> None:
        self._vocab_size, self._stop, self._published, self._draw = vocab_size, stop, published, draw
        self._nodes: dict[str, _Known] = {}
        """the one that was given something last is the last"""
        self._under_way: dict[int, Probe] = {}
        """by number"""
        self._over: dict[str, None] = {}
        """"node request-id" of what is not looked for any more, oldest first"""
        self._rests = True
        """nothing was given since the last alert"""
        self._wrong_next = True
        """whether the next one is for one that was found wrong"""
        self._last = 0
        self.counts: Counter[str] = Counter()
        """"given", "ended", and "tokens" that came of them"""

    def rest(self) -> None:
        """There is no alert: in the next one each node is probed anew."""
        if not self._rests:
            self._rests = True
            for known in self._nodes.values():
                known.given, known.waited_s, known.waits_until = 0.0, 0.0, float("-inf")

    def anew(self, node: str) -> None:
        """It was found wrong, and has as much to show again."""
        if node in self._nodes:
            self._nodes[node].given = 0.0

    @property
    def under_way(self) -> int:
        """How many are."""
        return len(self._under_way)

    # ---- work out

    def give(
        self, given: Iterable[tuple[str, GenerateRequest]], nodes: Sequence[FreeNode], now: float
    ) -> list[tuple[str, GenerateRequest]]:
        """`given`: what goes out now, and to whom; `nodes`: those that may be given a probe, full ones too. Who is given a copy
        of which: COPIES of each that begins, as far as there is room for MOST_AT_ONCE and MOST_TOKENS under way, and in no more
        than half of the places that are free; one at a node now. Those that were found wrong and others by turns, of each
        first those that were given fewest."""
        places = sum(max(0, n.free) for n in nodes)
        most = min(MOST_AT_ONCE, (places + len(self._under_way)) // 2)
        tokens = sum(sum(probe.footprint) for probe in self._under_way.values())
        if len(self._under_way) >= most or tokens >= MOST_TOKENS:
            return []
        fresh = [(peer, r) for peer, r in given if not r.prefix_ids and r.exact_version is None][:MOST_AT_ONCE]
        free = self._in_turn(nodes, min((_behind(r.min_version) for _, r in fresh), default=None), now)
        out: list[tuple[str, GenerateRequest]] = []
        looks, none_for = iter(range(MOST_LOOKS)), list[GenerateRequest]()
        for peer, request in fresh * COPIES:
            if not free or len(self._under_way) >= most or tokens >= MOST_TOKENS:
                break
            if any(request.min_version >= r.min_version and len(request.prompt_ids) >= len(r.prompt_ids) for r in none_for):
                continue
            node = next((n for n, _ in zip(free, looks, strict=False) if n.peer != peer and self._suits(n, request)), None)
            if node is None:
                none_for.append(request)
                continue
            free.remove(node)
            self._wrong_next = not node.found_wrong
            copy = replace(request, min_version=min(request.min_version, node.version))
            tokens += sum(self._begin(node.peer, copy, now).footprint)
            out.append((node.peer, copy))
        return out

    def _in_turn(self, nodes: Sequence[FreeNode], least: Version | None, now: float) -> list[FreeNode]:
        """Those that may be given one of `least` or newer, in the order in which they are."""
        if least is None:
            return []
        turns: tuple[list[tuple[float, float, FreeNode]], ...] = ([], [])
        for n in nodes:
            known = self._nodes.get(n.peer) or _Known()
            shown = known.shown(now)
            may = n.free > 0 and n.version >= least and len(known.held) < AT_NODE and now >= known.waits_until
            if may and (n.found_wrong or shown <= MOST_PROBES - 1):
                turns[n.found_wrong].append((shown, self._draw(), n))
        for turn in turns:
            turn.sort(key=lambda one: one[:2])
        pairs = zip_longest(turns[self._wrong_next], turns[not self._wrong_next])
        return [one[2] for one in chain.from_iterable(pairs) if one is not None]

    def _suits(self, node: FreeNode, request: GenerateRequest) -> bool:
        able = node.version >= _behind(request.min_version) and not self.owns(node.peer, request.request_id)
        return able and node.fits(request)

    def _begin(self, node: str, request: GenerateRequest, now: float) -> Probe:
        known = self._nodes.pop(node, None) or _Known()
        known.given, known.at, self._nodes[node] = known.shown(now) + 1, now, known
        forget_oldest(self._nodes, MOST_KNOWN, stays=lambda one: bool(self._nodes[one].held) or one == node)
        self._last += 1
        patience = PATIENCE[0] + (PATIENCE[1] - PATIENCE[0]) * self._draw()
        probe = Probe(self._last, node, request.generate(), given=now, since=now, patience=patience)
        known.held[request.request_id] = self._under_way[self._last] = probe
        self.counts["given"] += 1
        self._rests = False
        return probe

    def expire(self, now: float, usual: Callable[[str, str], Usual]) -> list[Probe]:
        """Those that are late are given up, some at a time. `usual(node, request id)`: see `Probe.late`."""
        those = (p for p in self._under_way.values() if p.late(now, usual(p.node, p.request.request_id)))
        late = list(islice(those, MOST_GIVEN_UP))
        for probe in late:
            self.drop(probe, now)
        return late

    # ---- work in

    def owns(self, node: str, request_id: str) -> bool:
        """Whether this is, or was, a probe there."""
        return request_id in self.working(node) or f"{node} {request_id}" in self._over

    def tokens(self, node: str, event: TokenEvent, now: float) -> Heard:
        """Take one event of what `owns` knows. Never raises on anything a node can send."""
        probe = self.working(node).get(event.request_id)
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
        if taken:
            probe.since, probe.began = now, now if probe.began is None else probe.began
            self.counts["tokens"] += taken
        if wrong is not None:
            self.drop(probe, now)
            refusal = Refusal(f"request {event.request_id}: {wrong}", peer=node, version=event.version)
            return Heard(Taken(taken, refusal, ((node, event.request_id),)), probe)
        if probe.ended or event.finish:
            self.drop(probe, now)
        self.counts["ended"] += probe.ended
        cancel = ((node, event.request_id),) if added.cut and not event.finish else ()
        return Heard(Taken(taken, cancel=cancel, made=probe.tokens * probe.ended), probe)

    def drop(self, probe: Probe, now: float) -> None:
        """It is over. What still comes of it is nobody's fault."""
        known = self._nodes.get(probe.node)
        if probe.over or known is None:
            return
        probe.over = True
        del known.held[probe.request.request_id], self._under_way[probe.number]
        self._over[f"{probe.node} {probe.request.request_id}"] = None
        forget_oldest(self._over, MOST_OVER)
        if probe.ended:
            known.waited_s = 0.0
        else:
            known.gave_none(now)

    def lost(self, node: str, now: float) -> list[Probe]:
        """What it holds is over: it is gone, or not believed."""
        held = list(self.working(node).values())
        for probe in held:
            self.drop(probe, now)
        return held

    def working(self, node: str) -> Mapping[str, Probe]:
        """Request id -> what `node` works on."""
        known = self._nodes.get(node)
        return known.held if known is not None else {}
