"""Which chunk leaves next, by hand: whose turn it is, what is charged, what goes ahead of a chunk, when the uplink is idle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2p.broadcast.policies.port import Push, Relieved
from p2p.broadcast.pump_core import LONGEST_PAUSE_S, OUTSIDE, SHORTEST_PAUSE_S, PumpCore
from p2p.broadcast.transfer import Neighbour, Traffic, Transfer
from p2p.channel.port import Channel
from p2p.protocol.versions import Parts, Relieve
from p2p.version import Version


class Core(PumpCore):
    """With an uplink that only writes down what it is told."""

    def __init__(self, *transfers: Transfer, wait: float = 0.0) -> None:
        super().__init__({t.manifest.mid: t for t in transfers})
        self.charged: list[int] = []
        self.idle_at: list[float] = []
        self.uplink: Any = SimpleNamespace(
            wait=lambda now: wait, spent=lambda now, nbytes: self.charged.append(nbytes), idle=self.idle_at.append
        )

    def wake(self) -> None:
        """Nobody sleeps here."""


def transfer(step: int, *pushes: Push, relieved: tuple[Relieved, ...] = (), size: int = 100) -> Transfer:
    """A version whose session hands out `pushes` in order, each when its peer is ready. Chunks 0 to 3 are a segment each."""
    left, mid = list(pushes), bytes([step]) * 16

    def choose(ready: list[str], now: float) -> Push | None:
        return left.pop(0) if left and left[0].peer in ready else None

    session: Any = SimpleNamespace(next=choose, relieved=lambda: list(relieved), source=None, places=None, news=list, outside=())
    manifest: Any = SimpleNamespace(
        version=Version(1, step), mid=mid, chunk_size=lambda chunk: size - chunk, size=64 * size,
        segment_of=lambda chunk: chunk if chunk < 4 else None,
        part=lambda segment: b"header" if segment < 0 else b"record %d" % segment,
    )  # fmt: skip
    return Transfer(manifest, session, Traffic(), wanted=True)


def enter(core: PumpCore, names: str) -> dict[str, list[object]]:
    """These become neighbours; what is posted to each."""
    posted: dict[str, list[object]] = {name: [] for name in names}
    for name in names:
        core.enter(Neighbour(name, posted[name].append, Channel(), 0.0))
    return posted


def serving(step: int, queues: dict[str, int], outside: str = "") -> Transfer:
    """A version of which each peer lacks so many chunks; those in `outside` are strangers."""
    found = transfer(step)

    def choose(ready: list[str], now: float) -> Push | None:
        peer = next((p for p in ready if queues[p]), None)
        if peer is None:
            return None
        queues[peer] -= 1
        return Push(peer, queues[peer], 0)

    found.session.next, found.session.outside = choose, outside  # type: ignore[method-assign]
    return found


def order_of(core: PumpCore, most: int) -> list[tuple[int, str]]:
    """Of which version to whom each chunk goes."""
    out: list[tuple[int, str]] = []
    while len(out) < most and (peer := core.next(1.0)) is not None:
        assert peer.job is not None
        out.append((peer.job.transfer.manifest.version.step, peer.name))
        peer.job = None
    return out


def test_strangers_are_served_last_also_of_older_versions_but_not_never() -> None:
    core = Core(serving(1, {"a": 3, "s": 40, "t": 40}, "st"), serving(2, {"a": 90, "s": 9, "t": 9}, "st"))
    enter(core, "sat")
    order = order_of(core, 80)
    assert [step for step, peer in order if peer == "a"] == [1] * 3 + [2] * (len([p for _, p in order if p == "a"]) - 3)
    strange = [n for n, (_, peer) in enumerate(order) if peer in "st"]
    assert strange == list(range(OUTSIDE - 1, 80, OUTSIDE)), "one in so many"
    assert {order[n][0] for n in strange} == {1}, "the older version first among them"


def test_strangers_turn_comes_before_the_others_of_all_versions() -> None:
    core = Core(serving(1, {"a": 99, "s": 0}, "s"), serving(2, {"a": 0, "s": 9}, "s"))
    enter(core, "as")
    order = order_of(core, 2 * OUTSIDE)
    assert [n for n, one in enumerate(order) if one == (2, "s")] == [OUTSIDE - 1, 2 * OUTSIDE - 1]


def test_what_nobody_else_can_take_goes_to_strangers() -> None:
    core = Core(serving(1, {"a": 0, "s": 5}, "s"), serving(2, {"a": 2, "s": 5}, "s"))
    enter(core, "as")
    assert order_of(core, 99) == [(2, "a")] * 2 + [(1, "s")] * 5 + [(2, "s")] * 5


def test_an_older_version_goes_first_and_a_chunk_costs_its_own_size() -> None:
    core = Core(transfer(2, Push("a", 3, 0)), transfer(1, Push("b", 1, 5)))
    enter(core, "ab")
    first, second = core.next(1.0), core.next(1.0)
    assert first is not None and first.job is not None and second is not None and second.job is not None
    assert (first.name, first.job.chunk, first.job.duty) == ("b", 1, 5) and (second.name, second.job.chunk) == ("a", 3)
    assert core.charged == [99, 97] and first.served_at == 1.0
    assert core.next(1.0) is None


def test_whoever_was_served_goes_to_the_end_and_is_not_asked_for_until_it_has_room() -> None:
    asked: list[list[str]] = []
    core = Core(made := transfer(1, Push("a", 0, 0), Push("a", 1, 0)))
    choose = made.session.next
    made.session.next = lambda ready, now: (asked.append(list(ready)), choose(ready, now))[1]  # type: ignore
    enter(core, "abc")
    got = core.next(0.0)
    assert got is not None and list(core.order) == ["b", "c", "a"]
    assert core.next(0.0) is None
    got.job = None
    assert core.next(0.0) is got and asked == [["a", "b", "c"], ["b", "c"], ["b", "c", "a"]]


@pytest.mark.parametrize(("busy", "idle"), [(0, True), (1, True), (2, True), (3, False), (4, False)])
def test_the_uplink_is_idle_while_half_of_the_channels_have_room(busy: int, idle: bool) -> None:
    """The others may be slow at their far end; with more than half of them full it is our uplink that is."""
    core = Core(*(transfer(step, Push(name, 0, 0)) for step, name in enumerate("abcd"[:busy], 1)))
    enter(core, "abcd")
    for _ in range(busy):
        assert core.next(1.0) is not None
    assert core.next(2.0) is None
    assert core.idle_at == ([2.0] if idle else [])


def test_who_is_relieved_is_told_if_it_is_still_here() -> None:
    core = Core(made := transfer(1, Push("a", 0, 0), relieved=(Relieved("b", 3), Relieved("gone", 4))))
    posted = enter(core, "ab")
    core.next(0.0)
    assert posted == {"a": [], "b": [Relieve(made.manifest.mid, (3,))]}


def test_the_header_and_each_record_go_ahead_once_to_each_neighbour() -> None:
    made = transfer(1, Push("a", 1, 0), Push("a", 1, 0), Push("a", 2, 0), Push("b", 2, 0), Push("b", 7, 0))
    core, mid, ahead = Core(made), made.manifest.mid, []
    enter(core, "ab")
    while (peer := core.next(0.0)) is not None:
        assert peer.job is not None
        ahead.append(core.ahead(peer, peer.job))
        peer.job = None
    records = Parts(mid, (b"header", b"record 1")), Parts(mid, (b"record 2",)), Parts(mid, (b"header", b"record 2"))
    assert ahead == [[records[0]], [], [records[1]], [records[2]], []]


def test_what_was_dropped_gets_nothing_and_does_not_drop_who_came_after_it() -> None:
    core = Core(transfer(1, Push("a", 0, 0)))
    enter(core, "a")
    old = core.order["a"]
    enter(core, "a")
    core.drop(old)
    assert old.gone and not core.order["a"].gone
    core.drop(core.order["a"])
    assert core.next(0.0) is None and not core.charged


@pytest.mark.parametrize(
    ("wait", "pause"),
    [(0.0, 0.0), (SHORTEST_PAUSE_S, 0.0), (0.02, 0.02), (LONGEST_PAUSE_S, LONGEST_PAUSE_S), (3.0, LONGEST_PAUSE_S)],
)
def test_a_pause_is_worth_a_timer_and_ends_while_the_pace_may_have_changed(wait: float, pause: float) -> None:
    assert Core(wait=wait).pause(0.0) == pause


def test_what_left_counts_for_its_version_and_in_all() -> None:
    made = transfer(1, Push("a", 0, 0))
    core = Core(made)
    enter(core, "a")
    peer = core.next(0.0)
    assert peer is not None and peer.job is not None
    core.count_sent(peer.job)
    assert core.sent == made.traffic.sent == 100
