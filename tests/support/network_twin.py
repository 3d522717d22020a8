"""A second, slow implementation of the network of flows, for comparison: progressive filling, everything worked out anew at
every event, all connections looked at each time."""

from __future__ import annotations

from math import inf

from netem.networks.profile import Profile

Pair = tuple[str, str]


def progressive_filling(rates: dict[str, float], flows: dict[Pair, tuple[str, str]]) -> dict[Pair, float]:
    """Max-min fair rate of each flow; `flows` gives its two links. The textbook: again and again, the link that has the
    least rate left for each unfrozen flow freezes its flows at that."""
    left = dict(rates)
    frozen: dict[Pair, float] = {}
    while len(frozen) < len(flows):
        open_flows = {f: links for f, links in flows.items() if f not in frozen}
        counts = {link: sum(link in links for links in open_flows.values()) for link in left}
        share, tightest = min((max(0.0, left[link]) / n, link) for link, n in counts.items() if n)
        for flow, links in open_flows.items():
            if tightest in links:
                frozen[flow] = share
                for link in links:
                    left[link] -= share
    return frozen


class Twin:
    def __init__(self, profile: Profile) -> None:
        self.profile, self.now = profile, 0.0
        self.sites = {h.name: h.site for h in profile.hosts}
        self.rates: dict[str, float] = {}
        for host in profile.hosts:
            self.rates |= {f"up {host.name}": host.access.up, f"down {host.name}": host.access.down}
            if host.site:
                lan = profile.sites[host.site]
                self.rates |= {f"lan up {host.name}": lan.up, f"lan down {host.name}": lan.down}
        self.queues: dict[Pair, list[tuple[int, object]]] = {}
        self.left: dict[Pair, float] = {}
        """bits of the first message"""
        self.under_way: list[tuple[float, str, str, object]] = []
        self.gone: set[str] = set()
        self.steps = sorted((s.at, h.name, s.up, s.down) for h in profile.hosts for s in h.trace)

    def links(self, pair: Pair) -> tuple[str, str]:
        lan = "lan " if self.sites[pair[0]] and self.sites[pair[0]] == self.sites[pair[1]] else ""
        return f"{lan}up {pair[0]}", f"{lan}down {pair[1]}"

    def shares(self) -> dict[Pair, float]:
        return progressive_filling(self.rates, {pair: self.links(pair) for pair in self.queues})

    def advance(self, now: float) -> dict[object, tuple[float, str, str]]:
        """tag -> (when, source, target) of what arrived by `now`."""
        while True:
            shares = self.shares()
            ends = {pair: self.now + self.left[pair] / rate for pair, rate in shares.items() if rate > 0}
            at = min([*ends.values(), self.steps[0][0] if self.steps else inf, now])
            for pair, rate in shares.items():
                self.left[pair] -= rate * (at - self.now)
            self.now = at
            for pair, end in ends.items():
                if end == at:
                    self._sent(pair)
            while self.steps and self.steps[0][0] <= at:
                _, host, up, down = self.steps.pop(0)
                self.set_rates(host, up, down)
            if at == now and at not in ends.values():
                break
        out = {tag: (when, a, b) for when, a, b, tag in self.under_way if when <= now}
        self.under_way = [m for m in self.under_way if m[0] > now]
        return out

    def _sent(self, pair: Pair) -> None:
        _, tag = self.queues[pair].pop(0)
        self._leave(*pair, tag)
        if self.queues[pair]:
            self.left[pair] = 8.0 * self.queues[pair][0][0]
        else:
            del self.queues[pair], self.left[pair]

    def send(self, source: str, target: str, size: int, tag: object) -> None:
        if source in self.gone or target in self.gone:
            return
        queue = self.queues.setdefault((source, target), [])
        queue.append((size, tag))
        self.left.setdefault((source, target), 8.0 * size)

    def send_small(self, source: str, target: str, tag: object) -> None:
        if source not in self.gone and target not in self.gone:
            self._leave(source, target, tag)

    def _leave(self, source: str, target: str, tag: object) -> None:
        delay_s = self.profile.delay(self.profile.host(source), self.profile.host(target))
        self.under_way.append((self.now + delay_s, source, target, tag))

    def set_rates(self, host: str, up: float, down: float) -> None:
        self.rates[f"up {host}"], self.rates[f"down {host}"] = up, down

    def remove_host(self, host: str) -> None:
        self.gone.add(host)
        for pair in [p for p in self.queues if host in p]:
            del self.queues[pair], self.left[pair]
        self.under_way = [m for m in self.under_way if m[2] != host]

    def backlog(self, pair: Pair) -> float:
        """bytes"""
        return sum(size for size, _ in self.queues[pair][1:]) + self.left[pair] / 8 if pair in self.queues else 0.0
