"""Measured broadcasts: one player on each host of an emulated network, and in each round one payload.

`run_contest` is the shell: network, processes, deadlines. `Round` is pure and turns a round's events into its result. Must not
know what any player does with its network. Times count from the source's `published` to each node's `verified`.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from netem.contest.player_processes import Event, Players, Trouble, open_folder, open_players
from netem.contest.players.events import AskAccount, Expect, Prepare, Publish, Role, TurnRogue
from netem.emulation.backends import AUTO
from netem.emulation.underlay import Underlay, underlay
from netem.networks.faults import (
    Continue,
    Corrupt,
    Fault,
    Join,
    Kill,
    Outage,
    SetRates,
    Stop,
    Withhold,
    excused,
    in_order,
    joiners,
)
from netem.networks.profile import LEARNER, Profile

ANSWER_S = 120.0
"""Seconds that players have to make a payload, a torrent or connections, or to give their account. A broadcast has the caller's
`cut_s` instead."""

COPIES = 4
"""Copies of the payload that a player may have on disk at once: this round's and the last one's, whole and in pieces."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What was measured in one round."""

    published_at: float
    """seconds of CLOCK_MONOTONIC"""
    verified: dict[str, float]
    """node -> seconds from the publication to its verified payload; nodes that did not finish are missing"""
    source_bytes: int
    """bytes of payload that the source sent"""
    duplicate_bytes: int
    """bytes of payload that nodes received in vain, all nodes together"""
    cpu_s: float
    """processor seconds of all players, their children included"""
    cut_off: bool
    """whether the time was up before all nodes had the payload"""
    failures: tuple[str, ...] = ()
    """what failed, each as "HOST: why"; after a failure or a cut no more rounds are run"""
    late_s: float = 0.0
    """the latest that the emulator handed over a packet: above a few ms the machine was too slow for this network"""
    dropped: int = 0
    """packets that found a queue full"""
    congestion: str = ""
    """TCP congestion control in force on the hosts; a player may choose another for its own connections"""
    backend: str = ""
    """the back end that emulated the links, "tc" or "switch"; only the switch measures late_s"""
    joined: dict[str, float] = field(default_factory=dict)
    """late host -> seconds after the publication at which its player was up"""
    from_source: dict[str, int] = field(default_factory=dict)
    """host -> bytes that it had from the source itself; only of players that report it"""
    whence: dict[str, dict[str, int]] = field(default_factory=dict)
    """node -> host -> bytes that the node had from that host, duplicates included; only of players that report it"""
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """host -> nodes that refused something it sent"""
    reported: tuple[str, ...] = ()
    """hosts that the source refused, or that a node reported to it"""
    banned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """host -> nodes that have dropped it and keep away from it"""
    linked: dict[str, dict[str, str]] = field(default_factory=dict)
    """node -> node -> how the first says that it is linked with the other; only of players that report it"""
    unlinked: dict[str, dict[str, str]] = field(default_factory=dict)
    """node -> node that it has no link with -> why"""
    faults: tuple[Fault, ...] = ()
    """faults that were caused before the round was over"""

    @property
    def seconds(self) -> float:
        """Seconds until the last node had the payload; infinite if one never had it."""
        return float("inf") if self.cut_off or self.failures else max(self.verified.values())


class Round:
    """The state of one round, from its players' events; pure.

    The round is over when all `nodes` have the payload. The times of `others` that have it by then are kept too.
    """

    def __init__(self, number: int, nodes: Collection[str], source: str, digest: str, others: Collection[str] = ()) -> None:
        self._number, self._nodes, self._source, self._digest = number, frozenset(nodes), source, digest
        self._others = frozenset(others)
        self._gone: set[str] = set()
        self._published: float | None = None
        self._verified: dict[str, float] = {}
        self._accounts: dict[str, Event] = {}
        self.failures: list[str] = []

    def take(self, host: str, event: Event | None) -> None:
        """Take an event of a player; None says that the player has ended. Events of other rounds are dropped."""
        if host in self._gone:
            pass
        elif event is None or event.get("event") == "failed":
            why = "it ended" if event is None else str(event.get("why", "no reason given"))
            if not any(f.startswith(f"{host}: ") for f in self.failures):
                self.failures.append(f"{host}: {why}")
        elif event.get("round") != self._number:
            pass
        elif event["event"] == "published" and host == self._source:
            self._published = float(event["at"])
        elif event["event"] == "verified" and host in self._nodes | self._others:
            if event["digest"] == self._digest:
                self._verified.setdefault(host, float(event["at"]))
            else:
                self.failures.append(f"{host}: verified {event['digest'][:16]}, published was {self._digest[:16]}")
        elif event["event"] == "account":
            self._accounts[host] = event

    def lose(self, host: str) -> None:
        """`host` is about to be killed on purpose: its events, and its end, no longer count."""
        self._gone.add(host)

    @property
    def whole(self) -> bool:
        """Whether the round is over: all nodes have the payload, or a player failed."""
        return bool(self.failures) or (self._published is not None and self._verified.keys() >= self._nodes)

    @property
    def accounted(self) -> bool:
        return bool(self.failures) or self._accounts.keys() >= self._nodes | {self._source}

    @property
    def published_at(self) -> float | None:
        return self._published

    def result(self, **network: Any) -> RoundResult:
        """The result so far; `network` are the fields of RoundResult that the shell knows."""
        began = self._published
        return RoundResult(
            began if began is not None else float("nan"),
            {host: at - began for host, at in sorted(self._verified.items())} if began is not None else {},
            int(self._accounts.get(self._source, {}).get("sent", 0)),
            duplicate_bytes=sum(int(a["duplicates"]) for host, a in self._accounts.items() if host != self._source),
            cpu_s=sum(float(a["cpu_s"]) for a in self._accounts.values()),
            cut_off=not self.failures and not self.whole, failures=tuple(self.failures),
            from_source={h: int(a["from_source"]) for h, a in self._accounts.items() if "from_source" in a},
            whence={h: a["whence"] for h, a in self._accounts.items() if "whence" in a and h != self._source},
            linked={h: a["linked"] for h, a in self._accounts.items() if a.get("linked")},
            unlinked={h: a["why"] for h, a in self._accounts.items() if a.get("why")},
            named=self._by_whom(lambda account: (host for host, _ in account.get("reports", ()))),
            reported=tuple(sorted({host for host, _ in self._accounts.get(self._source, {}).get("reports", ())})),
            banned=self._by_whom(lambda account: account.get("banned", ())), **network,
        )  # fmt: skip

    def _by_whom(self, whom: Callable[[Event], Iterable[str]]) -> dict[str, tuple[str, ...]]:
        """host -> the nodes for whose account `whom` gives it."""
        out: dict[str, set[str]] = {}
        for node, account in self._accounts.items():
            for host in whom(account) if node != self._source else ():
                out.setdefault(host, set()).add(node)
        return {host: tuple(sorted(nodes)) for host, nodes in sorted(out.items())}


def run_contest(
    profile: Profile,
    player_argv: Callable[[Role], list[str]],
    payload_bytes: int,
    rounds: int,
    seed: int,
    cut_s: float,
    options: dict[str, Any] | None = None,
    *,
    faults: Sequence[Fault] = (),
    required: Collection[str] | None = None,
    backend: str = AUTO,
    on_result: Callable[[RoundResult], None] = lambda result: None,
) -> list[RoundResult]:
    """`rounds` broadcasts of `payload_bytes` from the learner to all nodes of `profile`; a round is cut off after `cut_s`.

    `faults` happen in the last round, which waits for the hosts of `required` only (None: all that can finish); other hosts are
    left out of its account. There are fewer results than rounds when one was cut off or failed, since traffic that its players
    still send would disturb the next round. UsageError or ShoalError when network or players do not come up. Blocks until all
    processes and namespaces are removed.
    """
    results: list[RoundResult] = []
    copies = COPIES * payload_bytes * len(profile.hosts)
    late = list(joiners(faults))
    with underlay(profile, backend) as network, open_folder(copies) as folder:
        sites = {host.name: host.site for host in profile.hosts}
        with open_players(
            network.addresses, player_argv, folder, options=options or {}, on_host=network.command, late=late, sites=sites
        ) as players:
            for number in range(1, rounds + 1):
                now = faults if number == rounds else ()
                result = _run_round(
                    network, players, number, size=payload_bytes, seed=seed + number, cut_s=cut_s,
                    trouble=_Trouble(network, players, profile, now), required=required if now else None,
                )  # fmt: skip
                results.append(result)
                on_result(result)
                if result.cut_off or result.failures:
                    break
    return results


def _run_round(
    network: Underlay, players: Players, number: int, *, size: int, seed: int, cut_s: float, trouble: _Trouble,
    required: Collection[str] | None,
) -> RoundResult:  # fmt: skip
    expect = prepare_round(players, number, size, seed)
    network.weather()
    nodes = (set(players.nodes) | set(trouble.late)) - trouble.excused if required is None else set(required)
    state = Round(number, nodes, LEARNER, expect.digest, others=network.addresses)
    players.tell([LEARNER], Publish(number))
    trouble.begin(state, expect)
    players.feed(state.take, lambda: state.whole, cut_s, trouble)
    weather = network.weather()
    if not state.failures:
        players.tell([name for name in players.names if name in nodes | {LEARNER}], AskAccount(number))
        players.feed(state.take, lambda: state.accounted, ANSWER_S)
    known = {"congestion": network.congestion, "backend": network.backend}
    return state.result(late_s=weather.late_s, dropped=weather.dropped, **known, **trouble.summary(state))


def prepare_round(players: Players, number: int, size: int, seed: int) -> Expect:
    """Have the source make a payload, and the nodes get ready for it. Returns what they were told. ShoalError when one does not
    answer."""
    players.tell([LEARNER], Prepare(number, size, seed))
    prepared = players.gather("prepared", [LEARNER], ANSWER_S)[LEARNER]
    extra = {name: value for name, value in prepared.items() if name not in ("event", "round", "digest")}
    expect = Expect(number, prepared["digest"], size, extra)
    players.tell(players.nodes, expect)
    players.gather("expecting", players.nodes, ANSWER_S)
    return expect


class _Trouble(Trouble):
    """Causes faults when their time has come."""

    def __init__(self, network: Underlay, players: Players, profile: Profile, faults: Sequence[Fault]) -> None:
        self._network, self._players, self._profile = network, players, profile
        self._waiting = deque(in_order(faults))
        self._done: list[Fault] = []
        self._up_at: dict[str, float] = {}
        self.late, self.excused = joiners(faults), excused(faults)

    def begin(self, state: Round, expect: Expect) -> None:
        """Start the clock of the faults: the source was told to publish, and will say so in a moment."""
        self._state, self._expect, self._began = state, expect, time.monotonic()

    @property
    def next_at(self) -> float:
        return self._began + self._waiting[0].at if self._waiting else float("inf")

    def act(self) -> None:
        """Cause all faults that are due."""
        while time.monotonic() >= self.next_at:
            fault = self._waiting.popleft()
            self._bring_about(fault)
            self._done.append(fault)

    def heard(self, host: str, event: Event | None) -> None:
        """Tell a late player that has come up what to expect, as the others were told before the round."""
        if event is not None and event["event"] == "ready" and host in self.late:
            self._up_at[host] = time.monotonic()
            self._players.tell([host], self._expect)

    def summary(self, state: Round) -> dict[str, Any]:
        began = state.published_at
        return {"faults": tuple(self._done), "joined": {h: at - began for h, at in self._up_at.items()} if began else {}}

    def _bring_about(self, fault: Fault) -> None:
        match fault:
            case Kill():
                self._state.lose(fault.host)
                self._players.signal(fault.host, signal.SIGKILL)
            case Stop():
                self._players.signal(fault.host, signal.SIGSTOP)
            case Continue():
                self._players.signal(fault.host, signal.SIGCONT)
            case SetRates():
                self._network.set_rates(fault.host, fault.up, fault.down)
            case Outage():
                for host in [fault.host] if fault.host else [h.name for h in self._profile.hosts]:
                    self._network.set_rates(host, 0.0, 0.0, fault.seconds)
            case Join():
                self._players.launch(fault.host)
            case Corrupt():
                self._players.tell([fault.host], TurnRogue("corrupt"))
            case Withhold():
                self._players.tell([fault.host], TurnRogue("withhold"))
