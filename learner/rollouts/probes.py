"""Copies of sequences, made only to be checked: which nodes are given one, and what came of it. Pure, told the time.

Proven nodes that turn together and cheat now and then each hold the trainer up once before they are found. While that goes on
(`learner.standing.wave`), places that nobody needs are given copies of what others are given in the same moment: nobody waits for
them, all of them is checked, and nothing of them is trained on. A copy has its original's name, prompt and seed and goes out with
it, so that who sees one of them cannot tell by it which it is (docs/design/audits.md says what tells it all the same). Must not
know how a token is checked, or links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from msgspec.structs import replace

from learner.rollouts.beside import Taken
from learner.rollouts.event_checks import Expected, add_event
from learner.rollouts.probe import FreeNode, Probe, footprint_of
from learner.rollouts.silences import Usual
from learner.rollouts.stop_strings import StopStrings
from p2p.errors import Refusal
from p2p.forgetting import forget_oldest
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import TokenEvent
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

MOST_LOOKS = 2_048
"""Nodes that are looked at for all copies of one moment, so that thousands which suit none cost little."""

MOST_GIVEN_UP = 16
"""Probes that are given up at one moment: each may have thousands of tokens that are to be checked."""

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


@dataclass(slots=True)
class _Count:
    """Of the probes that a node was given since the alert began, one forgotten each FADE_S."""

    given: float = 0.0
    at: float = 0.0
    """when the last one was"""

    def now(self, now: float) -> float:
        """How many they are."""
        return max(0.0, self.given - max(0.0, now - self.at) / FADE_S)

    def add(self, now: float) -> None:
        """One more."""
        self.given, self.at = self.now(now) + 1, now


@dataclass(slots=True)
class _Known:
    """Of a node."""

    held: dict[str, Probe] = field(default_factory=dict)
    """request id -> what it works on"""
    shown: _Count = field(default_factory=_Count)
    """those of the version that their originals are of"""
    behind: _Count = field(default_factory=_Count)
    """the others"""
    waits_until: float = float("-inf")
    """it is given none before"""
    waited_s: float = 0.0
    """how long that was last"""

    def gave_none(self, now: float) -> None:
        """One did not end."""
        self.waited_s = min(max(2 * self.waited_s, WAITS_S[0]), WAITS_S[1])
        self.waits_until = now + self.waited_s


Wanted = Sequence[tuple[str, GenerateRequest]]
"""Who has the original, and what is to be copied."""


class _HandedOut(NamedTuple):
    given: list[tuple[FreeNode, GenerateRequest]]
    left: list[tuple[str, GenerateRequest]]
    """for which nobody was found, as they are `Wanted`"""


class Heard(NamedTuple):
    """What came of an event, and of which probe."""

    taken: Taken
    probe: Probe | None = None
    """None: of one that was over"""


class ProbeBook:
    """All of one learner's life. `stop`: strings that end a sequence; `draw()`: a number from 0 to 1 that no node knows.
    `behind`: whether nodes that serve the version before the newest are given copies too, of their own version."""

    def __init__(
        self, vocab_size: int | None, stop: StopStrings | None, draw: Callable[[], float], *, behind: bool = True
    ) -> None:
        self._vocab_size, self._stop, self._draw, self._takes_behind = vocab_size, stop, draw, behind
        self._published: set[Version] = set()
        self._newest: Version | None = None
        self._before: Version | None = None
        """the newest, while both are of one life of the learner"""
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

    def published(self, version: Version) -> None:
        """Tokens of it may come from now on."""
        self._published.add(version)
        if self._newest is None or version > self._newest:
            same = self._newest is not None and self._newest.epoch == version.epoch
            self._before, self._newest = self._newest if same else None, version

    def rest(self) -> None:
        """There is no alert: in the next one each node is probed anew."""
        if not self._rests:
            self._rests = True
            for known in self._nodes.values():
                known.shown, known.behind = _Count(), _Count()
                known.waited_s, known.waits_until = 0.0, float("-inf")

    def anew(self, node: str) -> None:
        """It was found wrong, and has as much to show again."""
        if node in self._nodes:
            self._nodes[node].shown = _Count()

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
        first those that were given fewest. What is left when all that serve a sequence's version were asked goes to those
        that serve the version before. These can tell that it is a copy, so it counts for nothing but what is wrong."""
        fresh = [(peer, r) for peer, r in given if not r.prefix_ids and r.exact_version is None][:MOST_AT_ONCE]
        out: list[tuple[str, GenerateRequest]] = []
        if not fresh:
            return out
        left, looks = fresh * COPIES, iter(range(MOST_LOOKS))
        for behind in (False, True):
            if behind:
                left = [(peer, r) for peer, r in left if self._before is not None and r.min_version == self._newest]
            if not left or (behind and not self._takes_behind):
                break
            least = min(self._wants(request, behind=behind) for _, request in left)
            able = [node for node in nodes if node.version >= least]
            places = sum(max(0, node.free) for node in able) - len(out)
            most = min(MOST_AT_ONCE, (places + len(self._under_way)) // 2)
            if len(self._under_way) >= most:
                continue
            able = [node for node in able if node.version == self._before] if behind else able
            found = self._hand_out(left, self._in_turn(able, now, behind=behind), most, looks, behind=behind)
            out += [self._begin(node, request, now, behind=behind) for node, request in found.given]
            left = found.left
        return out

    def _wants(self, request: GenerateRequest, *, behind: bool) -> Version:
        """What a node serves at the least that is given a copy of it."""
        return self._before if behind and self._before is not None else request.min_version

    def _hand_out(
        self, wanted: Wanted, free: list[FreeNode], most: int, looks: Iterator[int], *, behind: bool
    ) -> _HandedOut:
        """Who of `free` gets a copy of which of `wanted`, `most` under way with those that are."""
        tokens = sum(sum(probe.footprint) for probe in self._under_way.values())
        out, none_for = _HandedOut([], []), list[tuple[Version, int]]()
        for peer, request in wanted:
            least, length = self._wants(request, behind=behind), len(request.prompt_ids)
            node, fits = None, False
            if len(self._under_way) + len(out.given) < most and tokens < MOST_TOKENS:
                suits_nobody = any(least >= version and length >= other for version, other in none_for)
                for n, _ in zip(() if suits_nobody else free, looks, strict=False):
                    if n.version >= least and n.fits(request):
                        fits = True
                        if n.peer != peer and not self.owns(n.peer, request.request_id):
                            node = n
                            break
                if not fits:  # where its own node alone is free, another request may have a copy there
                    none_for.append((least, length))
            if node is None:
                out.left.append((peer, request))
                continue
            free.remove(node)
            self._wrong_next = not node.found_wrong
            tokens += sum(footprint_of(request))
            out.given.append((node, request))
        return out

    def _in_turn(self, nodes: Sequence[FreeNode], now: float, *, behind: bool) -> list[FreeNode]:
        """Those that may be given one, in the order in which they are."""
        turns: tuple[list[tuple[float, float, FreeNode]], ...] = ([], [])
        for n in nodes:
            known = self._nodes.get(n.peer) or _Known()
            shown = (known.behind if behind else known.shown).now(now)
            may = n.free > 0 and len(known.held) < AT_NODE and now >= known.waits_until
            if may and ((n.found_wrong and not behind) or shown <= MOST_PROBES - 1):
                turns[n.found_wrong].append((shown, self._draw(), n))
        for turn in turns:
            turn.sort(key=lambda one: one[:2])
        pairs = zip_longest(turns[self._wrong_next], turns[not self._wrong_next])
        return [one[2] for one in chain.from_iterable(pairs) if one is not None]

    def _begin(self, node: FreeNode, request: GenerateRequest, now: float, *, behind: bool) -> tuple[str, GenerateRequest]:
        known = self._nodes.pop(node.peer, None) or _Known()
        self._nodes[node.peer] = known
        (known.behind if behind else known.shown).add(now)
        forget_oldest(self._nodes, MOST_KNOWN, stays=lambda one: bool(self._nodes[one].held) or one == node.peer)
        self._last += 1
        copy = replace(request, min_version=self._wants(request, behind=behind))
        patience = PATIENCE[0] + (PATIENCE[1] - PATIENCE[0]) * self._draw()
        probe = Probe(self._last, node.peer, copy.generate(), given=now, since=now, patience=patience, behind=behind)
        known.held[request.request_id] = self._under_way[self._last] = probe
        self.counts["given"] += 1
        self._rests = False
        return node.peer, copy

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
