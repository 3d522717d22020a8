"""Messages arrive when max-min fair links say, as in a slow twin that works everything out anew, and in closed form."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netem.networks.profile import Access, Host, Profile, Step
from netem.simulator.flows import Arrival, FlowNetwork
from tests.support.network_twin import Twin, progressive_filling

MBIT = 1e6
KB = 1000
"""bytes: 1 KB takes 8 ms at 1 Mbit/s"""


def network(**hosts: tuple[float, float, float] | Host) -> FlowNetwork:
    """name = (up Mbit/s, down Mbit/s, delay in s), or a Host."""
    made = [
        h if isinstance(h, Host) else Host(name, Access(h[0] * MBIT, h[1] * MBIT, h[2])) for name, h in hosts.items()
    ]
    return FlowNetwork(Profile("test", tuple(made), {"lab": Access(100 * MBIT, 100 * MBIT, 0.0005)}, 1500, "cubic", 1.0))


def run(net: FlowNetwork, until: float = 1e9) -> list[Arrival]:
    """Stops at every event, as a simulator does."""
    out: list[Arrival] = []
    while (at := net.next_at) is not None and at <= until:
        out += net.advance(at)
    return out


def times(arrivals: list[Arrival]) -> dict[object, float]:
    return {a.tag: a.at for a in arrivals}


# --- against the twin ------------------------------------------------------------------------------------------------------

RATES = st.one_of(st.sampled_from([1.0, 2.0, 3.0, 4.0, 12.0]), st.floats(0.5, 20.0))
TRACES = st.lists(st.tuples(st.integers(0, 60), st.one_of(st.just(0.0), RATES), RATES), max_size=2, unique_by=lambda s: s[0])


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    hosts = [
        Host(
            f"h{i}",
            Access(draw(RATES) * MBIT, draw(RATES) * MBIT, draw(st.sampled_from([0.0, 0.01, 0.037]))),
            draw(st.sampled_from(["", "", "lab"])),
            trace=tuple(Step(at / 97, up * MBIT, down * MBIT) for at, up, down in sorted(draw(TRACES))),
        )
        for i in range(draw(st.integers(2, 6)))
    ]
    return Profile("random", tuple(hosts), {"lab": Access(15 * MBIT, 10 * MBIT, 0.0003)}, 1500, "cubic", 1.0)


CALLS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0, 7.0]),  # since the call before
        st.sampled_from(["send"] * 8 + ["twice"] * 4 + ["small", "rates", "remove", "restore"]),
        st.integers(0, 5), st.integers(0, 4), st.sampled_from([1, 500, 1000, 1000, 4000, 16_384]), RATES,
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(profiles(), CALLS)
def test_equals_progressive_filling_at_every_event(profile: Profile, calls: list[tuple[Any, ...]]) -> None:
    net, twin = FlowNetwork(profile), Twin(profile)
    names = [h.name for h in profile.hosts]
    arrived: list[Arrival] = []
    expected: dict[object, tuple[float, str, str]] = {}
    now, removed = 0.0, False

    def check() -> None:
        shares = twin.shares()
        load = dict.fromkeys(twin.rates, 0.0)
        for pair in permutations(names, 2):
            rate = net.rate(now, *pair)
            assert rate == pytest.approx(shares.get(pair, 0.0), rel=1e-9, abs=1e-6), pair
            assert net.backlog(now, *pair) == pytest.approx(twin.backlog(pair), abs=1.001)
            for link in twin.links(pair):
                load[link] += rate
        assert all(load[link] <= rate * (1 + 1e-9) for link, rate in twin.rates.items())
        for pair in shares:
            assert any(load[link] >= twin.rates[link] * (1 - 1e-9) for link in twin.links(pair)), "no link of it is full"

    def advance(to: float) -> None:
        nonlocal now
        now = to
        expected.update(twin.advance(now))
        for a in net.advance(now):
            arrived.append(a)
            if isinstance(a.tag, int) and calls[a.tag][1] == "twice":  # without delay that is when a connection falls idle
                net.send(now, a.source, a.target, a.size, (a.tag,))
                twin.send(a.source, a.target, a.size, (a.tag,))

    def go(to: float) -> None:
        while (at := net.next_at) is not None and at <= to:
            advance(at)
        advance(to)

    for tag, (wait, call, i, j, size, rate) in enumerate(calls):
        go(now + wait * 2**0.5 / 1000)  # nothing else happens at such times
        a, b = names[i % len(names)], names[(i + 1 + j % (len(names) - 1)) % len(names)]
        match call:
            case "send" | "twice":
                net.send(now, a, b, size, tag)
                twin.send(a, b, size, tag)
            case "small":
                net.send_small(now, a, b, size, tag)
                twin.send_small(a, b, tag)
            case "rates":
                net.set_rates(now, a, rate * MBIT, (21 - rate) * MBIT)
                twin.set_rates(a, rate * MBIT, (21 - rate) * MBIT)
            case "remove":
                net.remove_host(now, a)
                twin.remove_host(a)
                removed = True
            case "restore":
                net.restore_host(now, a)
                twin.gone.discard(a)
        check()
    go(now + 1)  # all traces are over
    for name in names:
        net.set_rates(now, name, MBIT, MBIT)
        twin.set_rates(name, MBIT, MBIT)
    check()
    go(now + 100)
    check()
    assert net.next_at is None and not twin.queues and not twin.under_way  # nobody waits, nothing is on its way
    assert times(arrived) == pytest.approx({tag: at for tag, (at, *_) in expected.items()}, rel=1e-9, abs=1e-9)
    assert all((a.source, a.target) == expected[a.tag][1:] for a in arrived)
    assert [a.at for a in arrived] == sorted(a.at for a in arrived) and len(arrived) == len(expected)
    for pair in permutations(names, 2):
        sent = [a.tag for a in arrived if (a.source, a.target) == pair and isinstance(a.tag, int) and calls[a.tag][1] != "small"]
        assert sent == sorted(sent), "out of order"
    if not removed:
        once = {tag for tag, c in enumerate(calls) if c[1] in ("send", "twice", "small")}
        assert {a.tag for a in arrived} == once | {(tag,) for tag in once if calls[tag][1] == "twice"}


@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_rates_stay_exact_where_everything_is_coupled(spread: float) -> None:
    """Sixty hosts with equal uplinks and downlinks and five connections each: nearly all links are full, and a change runs
    through many of them. Compared after every hundredth of 2000 arrivals that start something else."""
    rng = random.Random(5)
    rates = {f"{way} h{i}": 8 * MBIT * rng.uniform(1, spread) for i in range(60) for way in ("up", "down")}
    net = network(**{f"h{i}": Host(f"h{i}", Access(rates[f"up h{i}"], rates[f"down h{i}"], 0.01)) for i in range(60)})
    left: dict[tuple[str, str], int] = {}

    def start(now: float) -> None:
        a, b = (f"h{i}" for i in rng.sample(range(60), 2))
        net.send(now, a, b, rng.randrange(1000, 60_000))
        left[a, b] = left.get((a, b), 0) + 1

    for _ in range(300):
        start(0.0)
    arrivals = 0
    while arrivals < 2000:
        at = net.next_at
        assert at is not None
        for _ in net.advance(at):
            arrivals += 1
            start(at)
            if arrivals % 100 == 0:
                busy = [pair for pair in left if net.backlog(at, *pair)]
                wanted = progressive_filling(rates, {(a, b): (f"up {a}", f"down {b}") for a, b in busy})
                assert {pair: net.rate(at, *pair) for pair in busy} == pytest.approx(wanted, rel=1e-9)


def test_the_same_calls_give_the_same_bits() -> None:
    def once() -> list[Arrival]:
        rng = random.Random(3)
        net = network(**{f"h{i}": (rng.uniform(1, 9), rng.uniform(1, 9), rng.uniform(0, 0.1)) for i in range(9)})
        for tag in range(200):
            a, b = rng.sample([f"h{i}" for i in range(9)], 2)
            net.send(tag // 10 / 100, a, b, rng.randrange(1, 9000), tag)
        return run(net)

    first = once()
    assert len(first) == 200 and first == once()


# --- in closed form --------------------------------------------------------------------------------------------------------


def test_one_sender_shares_its_uplink_among_receivers() -> None:
    """8 Mbit/s to four: 2 each, so 10 KB take 40 ms; then 20 + 5 ms of delay."""
    net = network(s=(8, 8, 0.02), **{f"r{i}": (1, 100, 0.005) for i in range(4)})
    for i in range(4):
        net.send(0.0, "s", f"r{i}", 10 * KB, i)
    assert [net.rate(0.0, "s", f"r{i}") for i in range(4)] == [2 * MBIT] * 4
    assert net.uplink_backlog(0.01, "s") == 30 * KB and net.backlog(0.01, "s", "r0") == 7.5 * KB
    arrivals = run(net)
    assert [a.tag for a in arrivals] == [0, 1, 2, 3] and all(a.at == pytest.approx(0.065) for a in arrivals)
    assert arrivals[2] == Arrival(arrivals[2].at, "s", "r2", 2, 10 * KB)


def test_what_a_slow_receiver_leaves_goes_to_the_others() -> None:
    """Two levels: r0's downlink of 1 Mbit/s binds it, 7 of the 8 are for two others; s2 into r1 takes what is left of 4."""
    net = network(s=(8, 8, 0), s2=(9, 9, 0), r0=(1, 1, 0), r1=(1, 4, 0), r2=(1, 99, 0))
    for target in ("r0", "r1", "r2"):
        net.send(0.0, "s", target, KB)
    net.send(0.0, "s2", "r1", KB)
    rates = [net.rate(0.0, "s", r) / MBIT for r in ("r0", "r1", "r2")]
    assert rates == pytest.approx([1, 2, 5]) and net.rate(0.0, "s2", "r1") == pytest.approx(2 * MBIT)


def test_many_senders_share_one_downlink() -> None:
    """Ten into 10 Mbit/s: 1 each, 0.8 s for 100 KB; nine of them have half as much, so the tenth speeds up to its uplink."""
    net = network(r=(1, 10, 0), **{f"s{i}": (4, 1, 0.0) for i in range(10)})
    for i in range(10):
        net.send(0.0, f"s{i}", "r", 100 * KB if i == 0 else 50 * KB, i)
    at = times(run(net))
    assert [at[i] for i in range(1, 10)] == pytest.approx([0.4] * 9) and at[0] == pytest.approx(0.4 + 0.1)


def test_messages_of_a_connection_follow_each_other_without_a_gap() -> None:
    net = network(a=(8, 8, 0.05), b=(8, 8, 0.05))
    for tag in range(5):
        net.send(0.0, "a", "b", KB, tag)
    assert [a.at for a in run(net)] == pytest.approx([0.101 + 0.001 * i for i in range(5)])
    assert net.drain_sent() == [("a", "b")] and net.drain_sent() == []


def test_both_directions_do_not_disturb_each_other() -> None:
    net = network(a=(8, 2, 0), b=(8, 8, 0))
    net.send(0.0, "a", "b", KB, "there")
    net.send(0.0, "b", "a", KB, "back")
    assert times(run(net)) == pytest.approx({"there": 0.001, "back": 0.004})


def test_a_small_message_waits_for_nothing_and_takes_nothing() -> None:
    net = network(a=(1, 1, 0.02), b=(1, 1, 0.03))
    net.send(0.0, "a", "b", 125 * KB, "large")
    net.send_small(0.5, "a", "b", 100, "small")
    assert run(net) == [Arrival(0.55, "a", "b", "small", 100), Arrival(1.05, "a", "b", "large", 125 * KB)]


# --- changes ---------------------------------------------------------------------------------------------------------------


def test_a_rate_changes_in_the_middle_of_a_message() -> None:
    """Half of 1 Mbit at 1 Mbit/s, an outage of 2 s, the rest at 5, which then is the downlink's."""
    net = network(a=(1, 1, 0.1), b=(1, 5, 0.1))
    net.send(0.0, "a", "b", 125 * KB)
    net.set_rates(0.5, "a", 0.0, 1 * MBIT)
    assert net.next_at is None and net.backlog(1.0, "a", "b") == 62.5 * KB
    net.set_rates(2.5, "a", 50 * MBIT, 1 * MBIT)
    assert [a.at for a in run(net)] == pytest.approx([2.5 + 0.1 + 0.2])
    with pytest.raises(ValueError, match="rates"):
        net.set_rates(9.0, "a", -1.0, 1.0)


def test_a_trace_does_the_same_by_itself() -> None:
    trace = (Step(0.0, 1 * MBIT, 9 * MBIT), Step(0.5, 0.0, 9 * MBIT), Step(2.5, 50 * MBIT, 9 * MBIT))
    net = network(a=Host("a", Access(77 * MBIT, 77 * MBIT, 0.1), trace=trace), b=(1, 5, 0.1))
    net.send(0.0, "a", "b", 125 * KB)
    assert [a.at for a in net.advance(10.0)] == pytest.approx([2.5 + 0.1 + 0.2])


def test_a_removed_host_sends_and_gets_nothing_more() -> None:
    net = network(a=(1, 1, 0.1), b=(1, 1, 0.1), c=(1, 1, 0.1))
    net.send(0.0, "a", "b", 25 * KB, "sent whole")  # shares the uplink: out at 0.4 s
    net.send(0.0, "a", "c", 50 * KB, "half")
    net.send(0.0, "c", "a", 1 * KB, "to the dead")
    net.send(0.0, "c", "b", 50 * KB, "others")  # shares b's downlink, then has it
    net.remove_host(0.41, "a")
    assert net.backlog(0.41, "a", "c") == net.uplink_backlog(0.41, "a") == 0
    net.send(0.41, "a", "b", KB, "from the dead")
    net.send_small(0.41, "b", "a", KB, "small to the dead")
    assert net.rate(0.41, "c", "b") == MBIT
    arrivals = run(net)
    assert {a.tag for a in arrivals} == {"to the dead", "sent whole", "others"}  # the first came before
    assert times(arrivals)["sent whole"] == pytest.approx(0.6)


def test_hosts_that_go_one_after_the_other() -> None:
    """What the first had sent whole must not arrive at the second, which went later."""
    net = network(a=(1, 1, 0.1), b=(1, 1, 0.1))
    net.send(0.0, "a", "b", KB)
    net.remove_host(0.1, "a")
    net.remove_host(0.15, "b")
    assert net.next_at is None and net.advance(1.0) == []


def test_what_was_sent_to_the_host_before_it_came_back_does_not_arrive() -> None:
    net = network(a=(1, 1, 0.1), b=(1, 1, 0.1))
    net.send_small(0.0, "a", "b", 10, "before")
    net.send(0.0, "b", "a", KB, "its own, sent whole")
    net.remove_host(0.05, "b")
    net.restore_host(0.06, "b")
    net.send(0.06, "a", "b", KB, "after")
    assert times(run(net)) == pytest.approx({"its own, sent whole": 0.208, "after": 0.268})


def test_a_site_has_its_own_links() -> None:
    """LAN 100 Mbit/s and 0.5 ms an end, both ways of the WAN full meanwhile."""
    hosts = {name: Host(name, Access(1 * MBIT, 1 * MBIT, 0.05), site) for name, site in (("a", "lab"), ("b", "lab"), ("c", ""))}
    net = network(**hosts)
    net.send(0.0, "a", "b", 125 * KB, "lan")
    net.send(0.0, "a", "c", 125 * KB, "wan up")
    net.send(0.0, "c", "b", 125 * KB, "wan down")
    assert net.uplink_backlog(0.0, "a") == 250 * KB
    net.set_rates(0.0, "b", 0.0, MBIT)
    assert times(run(net)) == pytest.approx({"lan": 0.011, "wan up": 1.1, "wan down": 1.1})


def test_what_may_not_be_asked() -> None:
    net = network(a=(1, 1, 0), b=(1, 1, 0))
    net.advance(1.0)
    for call in (lambda: net.send(0.5, "a", "b", 1), lambda: net.send(1.0, "a", "b", 0), lambda: net.send(1.0, "a", "a", 1)):
        with pytest.raises(ValueError):
            call()
    for unknown in (lambda: net.send(1.0, "a", "x", 1), lambda: net.remove_host(1.0, "x"), lambda: net.uplink_backlog(1.0, "x")):
        with pytest.raises(KeyError):
            unknown()


def test_what_happens_at_one_instant_costs_one_recomputation() -> None:
    """Twenty connections begin, fall idle and go on at once, and end: three times the level of the uplink."""
    net = network(s=(8, 8, 0), **{f"r{i}": (8, 80, 0) for i in range(20)})
    for i in range(20):
        net.send(0.0, "s", f"r{i}", KB)
    at = net.next_at
    assert at is not None
    for a in net.advance(at):
        net.send(at, "s", a.target, KB)
    assert [net.rate(at, "s", f"r{i}") for i in range(20)] == [0.4 * MBIT] * 20
    assert [a.at for a in run(net)] == pytest.approx([0.04] * 20) and net.sharing.worked_out == 3


def test_a_transfer_costs_a_few_levels_where_uplinks_bind() -> None:
    """Work is counted, not timed: 200 hosts hand chunks to eight others each, and a start or an end concerns one uplink."""
    rng = random.Random(1)
    names = [f"h{i}" for i in range(200)]
    net = network(**{name: (rng.uniform(10, 30), 200, rng.uniform(0.005, 0.05)) for name in names})
    for i, name in enumerate(names):
        for step in range(1, 9):
            net.send(i / 1000, name, names[(i + step * step) % 200], 65_536)
    transfers = 0
    while transfers < 5000:
        at = net.next_at
        assert at is not None
        for a in net.advance(at):
            transfers += 1
            net.send(at, a.source, a.target, 65_536)
    assert net.sharing.worked_out < 3 * transfers
