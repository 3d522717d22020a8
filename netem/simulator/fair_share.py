"""Max-min fair rates of flows over access links, kept up to date as flows come and go. Pure numbers.

Must not know hosts, messages or latency: a flow has bits to send over two links, one at its sender, one at its receiver.

The **level** of a link is the most that any flow gets of it: finite for a link in full use, infinite for one with rate to
spare. A flow's rate is the lower level of its two links, and it is **bound** by that link. Levels are consistent when each
is the water-filling level of its link, given those at the other ends of the link's flows:

    sum over the flows of min(level, level at the other end) = rate,   or infinite if that sum stays below the rate

Consistent levels give the max-min fair allocation, that of progressive filling (Bertsekas and Gallager, Data Networks,
6.5.2): no link carries too much, and each flow has on its way a link in full use on which nobody gets more. There is only
one such allocation, so it may be approached in any order. `settle` starts at what changed and works a link out anew only
when a rate on it changed and, if it has rate to spare, only when next to none is left. It comes to an end: no level worked
out is below the smallest rate / flows of all links, so once every waiting link had two turns the links of that level have
it for good; what they give is fixed from then on, and the same holds for the links that remain.

All flows bound by a link have one rate. Hence a link has one **clock**, the bits that each of them was sent, a flow knows
at which clock it is done, and a new level costs nothing a flow.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import inf

EXACT = 1e-12
"""A level that moved by less, relatively, has not moved: else two links could hand a rounding error to and fro for ever."""

NEARLY_FULL = 1 - 1e-6
"""The load of a link with rate to spare is kept by adding up changes. From this part of its rate on, its level is worked
out; the rounding errors of many millions of additions lie far below the difference."""

STALE = 64
"""Entries of flows that left a link's heap, beyond twice the flows it has, before they are cleared out."""


class FairLink:
    """One direction of a host's access. Rate and level in bit/s, clock in bits."""

    __slots__ = ("bound", "clock", "due", "flows", "level", "load", "rate", "sends", "since", "waits")

    def __init__(self, rate: float, *, sends: bool) -> None:
        self.rate, self.sends = rate, sends
        self.flows: dict[Flow, None] = {}
        """those with something to send, in the order in which they joined"""
        self.level = inf
        self.load = 0.0
        """sum of its flows' rates, kept while its level is infinite"""
        self.waits = False
        """for its level to be worked out"""
        self.clock = self.since = 0.0
        """the bits that a flow bound here all along was sent by the time `since`, the last change of `level`"""
        self.bound: list[tuple[float, int, Flow]] = []
        """heap of (clock when it is done, mark, flow); stale unless the mark is the flow's"""
        self.due = inf
        """for the owner: when it expects `first` to be done"""

    def served(self, now: float) -> float:
        """The clock at `now`."""
        return self.clock if self.level == inf else self.clock + self.level * (now - self.since)

    def first(self) -> Flow | None:
        """Of the flows bound here, the one that is done first."""
        while self.bound and self.bound[0][2].mark != self.bound[0][1]:
            heappop(self.bound)
        return self.bound[0][2] if self.bound else None

    def _enter(self, flow: Flow) -> None:
        if len(self.bound) > 2 * len(self.flows) + STALE:
            self.bound = [entry for entry in self.bound if entry[2].mark == entry[1]]
            heapify(self.bound)
        heappush(self.bound, (flow.done, flow.mark, flow))


class Flow:
    """A source of bits over two links."""

    __slots__ = ("by", "done", "down", "mark", "rate", "up")

    def __init__(self, up: FairLink, down: FairLink) -> None:
        self.up, self.down = up, down
        self.rate = 0.0
        """bit/s, current while the sharing is settled"""
        self.by: FairLink | None = None
        """the link it is bound by; None while it sends nothing and until its first rate is known"""
        self.done = 0.0
        """clock of `by` at which its bits are sent; the number of bits while `by` is None"""
        self.mark = 0
        """of its entry in `by.bound`"""

    def left(self, now: float) -> float:
        """Bits not sent by `now`."""
        return self.done if self.by is None else max(0.0, self.done - self.by.served(now))


class Sharing:
    """Links and flows at one instant. The owner passes times that never fall, and calls `settle` before time passes."""

    def __init__(self) -> None:
        self._work: deque[FairLink] = deque()
        self._joined: list[Flow] = []
        self._touched: dict[FairLink, None] = {}
        self._marks = 0
        self.settled = True
        """nothing has changed since the last `settle`"""
        self.worked_out = 0
        """levels, in total: what rates cost"""

    def join(self, flow: Flow, bits: float) -> None:
        """An idle flow has `bits` to send."""
        self.settled = False
        up, down = flow.up, flow.down
        up.flows[flow] = down.flows[flow] = None
        flow.done = bits
        rate = min(up.level, down.level)
        if rate < inf:
            flow.rate = rate
            up.load += rate
            down.load += rate
        self._joined.append(flow)
        self._wait(up)
        if down.level < inf or down.load > down.rate * NEARLY_FULL:
            self._wait(down)

    def more(self, flow: Flow, bits: float) -> None:
        """A flow that is done just now goes on with `bits`."""
        assert flow.by is not None
        self.settled = False
        flow.done += bits
        self._mark(flow, flow.by)

    def leave(self, flow: Flow) -> None:
        """A flow has nothing to send any more."""
        self.settled = False
        for link in (flow.up, flow.down):
            del link.flows[flow]
            link.load = link.load - flow.rate if link.flows else 0.0
            if link.level < inf:
                self._wait(link)
        if flow.by is not None:
            self._touched[flow.by] = None
        flow.rate, flow.by, flow.mark = 0.0, None, 0

    def change(self, link: FairLink, rate: float) -> None:
        """A link has another rate. 0 is an outage."""
        self.settled = False
        link.rate = rate
        self._wait(link)

    def settle(self, now: float) -> dict[FairLink, None]:
        """Make all levels consistent. Returns the links on which the first flow to be done, or when, may have changed."""
        work, full = self._work, NEARLY_FULL
        self.settled = True
        changed: dict[FairLink, None] = {}
        while work:
            link = work.popleft()
            link.waits = False
            old, new = link.level, self._level(link)
            if new == old or (old != inf and abs(new - old) <= EXACT * old):
                continue
            link.clock, link.since, link.level = link.served(now), now, new
            changed[link] = None
            sends = link.sends
            for flow in link.flows:
                other = flow.down if sends else flow.up
                rate = other.level
                if new < rate:
                    rate = new
                was = flow.rate
                if rate != was:
                    flow.rate = rate
                    other.load += rate - was
                    if not other.waits and (other.level != inf or other.load > other.rate * full):
                        other.waits = True
                        work.append(other)
        for link in changed:
            for flow in link.flows:
                by = flow.up if flow.up.level <= flow.down.level else flow.down
                if by is not flow.by:
                    self._bind(flow, by, now)
        for flow in self._joined:  # if no level changed: others left at this instant, or the rate is 0
            if flow.by is None and flow in flow.up.flows:
                self._bind(flow, flow.up if flow.up.level <= flow.down.level else flow.down, now)
        self._joined.clear()
        touched, self._touched = self._touched, {}
        return touched | changed

    def _bind(self, flow: Flow, by: FairLink, now: float) -> None:
        left = flow.left(now)
        if flow.by is not None:
            self._touched[flow.by] = None
        if by.first() is None:
            by.clock, by.since = 0.0, now  # nobody counts by it: keep it small, and so exact
        flow.by, flow.done = by, by.served(now) + left
        self._mark(flow, by)

    def _mark(self, flow: Flow, by: FairLink) -> None:
        self._marks += 1
        self._touched[by] = None
        flow.mark = self._marks
        by._enter(flow)

    def _wait(self, link: FairLink) -> None:
        if not link.waits:
            link.waits = True
            self._work.append(link)

    def _level(self, link: FairLink) -> float:
        """Water filling over one link, from the lowest level at the other ends up."""
        self.worked_out += 1
        flows, rest = link.flows, link.rate
        n = len(flows)
        if not n:
            link.load = 0.0
            return inf
        caps = [flow.down.level for flow in flows] if link.sends else [flow.up.level for flow in flows]
        share = rest / n
        if min(caps) >= share:
            return share
        caps.sort()
        for cap in caps:
            share = rest / n
            if cap >= share:
                return share
            rest -= cap
            n -= 1
        link.load = link.rate - rest
        return inf
