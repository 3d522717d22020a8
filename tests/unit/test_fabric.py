"""Packets arrive when a link's rate, queue and delay say, are lost as often as they should be, and stay in order."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.emulation.fabric import Fabric, Pipe
from netem.networks.profile import LEARNER, build_profile

SIZE = 1500


def test_rate_and_delay_of_a_saturated_pipe() -> None:
    """1000 packets at once over 12 Mbit/s: one a millisecond, 25 ms later."""
    pipe = Pipe(12e6, 0.025)
    arrivals = [pipe.offer(0.0, SIZE) for _ in range(1000)]
    assert arrivals == pytest.approx([0.025 + 0.001 * (i + 1) for i in range(1000)])
    assert pipe.offer(5.0, SIZE) == pytest.approx(5.026)  # idle meanwhile: no credit is saved up


def test_a_full_queue_drops_the_tail() -> None:
    pipe = Pipe(12e6, queue=0.0105)
    assert [pipe.offer(0.0, SIZE) is not None for _ in range(20)] == [True] * 11 + [False] * 9
    assert pipe.overflowed == 9
    assert pipe.offer(0.004, SIZE) == pytest.approx(0.012)  # room again


def test_loss_lies_within_its_confidence_interval() -> None:
    n, p = 40_000, 0.01
    pipe = Pipe(1e12, loss=p, seed=7)
    lost = sum(pipe.offer(float(i), SIZE) is None for i in range(n))
    assert lost == pipe.lost and abs(lost / n - p) < 3 * math.sqrt(p * (1 - p) / n)


def test_jitter_spreads_and_keeps_the_order() -> None:
    pipe = Pipe(1e12, 0.05, jitter=0.005, seed=3)
    delays = [arrival - i for i in range(5000) if (arrival := pipe.offer(float(i), SIZE)) is not None]
    mean = sum(delays) / len(delays)
    spread = math.sqrt(sum((d - mean) ** 2 for d in delays) / len(delays))
    assert mean == pytest.approx(0.05, abs=0.0005) and spread == pytest.approx(0.005, rel=0.1)
    dense = Pipe(1e9, 0.05, jitter=0.005, seed=3)
    arrivals = [dense.offer(i * 1e-5, SIZE) for i in range(5000)]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(arrivals))


def test_a_trace_changes_the_rate_in_the_middle_of_a_packet_and_through_an_outage() -> None:
    pipe = Pipe(99e9, steps=[(0.0, 12e6), (0.0015, 6e6), (1.0, 0.0), (2.0, 12e6)])
    assert pipe.offer(0.0, SIZE) == pytest.approx(0.001)
    assert pipe.offer(0.0, SIZE) == pytest.approx(0.0015 + 0.001)  # half at 12, half at 6 Mbit/s
    assert pipe.offer(0.999, SIZE) == pytest.approx(2.0005)  # half of it before the outage, half after
    assert Pipe(1e6, steps=[(1.0, 0.0)]).offer(2.0, SIZE) is None  # an outage for ever


@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(40, 9000)), min_size=1, max_size=80),
    st.floats(1e5, 1e9),
    st.floats(0, 0.5),
)
def test_nothing_arrives_faster_than_the_rate_allows(packets, rate, delay) -> None:
    """In any interval between two arrivals at most rate x time passes, and no packet beats the delay."""
    pipe, now, arrivals = Pipe(rate, delay), 0.0, []
    for wait, size in packets:
        now += wait
        at = pipe.offer(now, size)
        assert at is not None and at >= now + delay + 8 * size / rate - 1e-9
        arrivals.append((at, size))
    for (before, _), (after, size) in pairwise(arrivals):
        assert after - before >= 8 * size / rate - 1e-9


def fabric(seed: int = 0, extra: str = "") -> Fabric:
    import tomllib

    return Fabric(build_profile(tomllib.loads("""
        [sites.lab]
        preset = "lan"
        [learner]
        up_mbit = 12
        down_mbit = 100
        delay_ms = 10
        [[nodes]]
        name = "far"
        up_mbit = 6
        down_mbit = 24
        delay_ms = 40
        [[nodes]]
        name = "lab"
        count = 2
        site = "lab"
        up_mbit = 1
        down_mbit = 1
        delay_ms = 100
    """ + extra), "test"), seed)  # fmt: skip


def run(net: Fabric, until: float = 100.0) -> list[tuple[float, str, object]]:
    out = []
    while net.next_at is not None and net.next_at <= until:
        out += [(d.at, d.host, d.packet) for d in net.due(net.next_at)]
    return out


def test_through_both_links() -> None:
    net = fabric()
    for i in range(3):
        assert net.push(0.0, LEARNER, "far", SIZE, i)
    # 1 ms each up, 10 ms, 0.5 ms down, 40 ms
    assert run(net) == [(pytest.approx(0.0515 + 0.001 * i), "far", i) for i in range(3)]
    assert net.next_at is None


def test_two_senders_share_a_downlink() -> None:
    net = fabric()
    for i in range(5):
        net.push(0.0, LEARNER, "lab-1", SIZE, ("learner", i))
    net.push(0.0, "far", "lab-1", SIZE, ("far", 0))
    arrivals = [at for at, _, _ in run(net)]
    assert len(arrivals) == 6
    assert all(b - a >= 0.012 - 1e-9 for a, b in pairwise(arrivals))  # 1 Mbit/s: 12 ms a packet


def test_a_site_has_its_own_lan() -> None:
    net = fabric()
    net.push(0.0, "lab-1", "lab-2", SIZE, "near")
    ((at, host, _),) = run(net)
    assert host == "lab-2" and at == pytest.approx(0.0002 + 2 * 12e-6)
    assert net.up["lab-1"].offer(0.0, SIZE) == pytest.approx(0.112)  # nothing was ahead


def test_the_same_seed_gives_the_same_network() -> None:
    def lossy(seed: int) -> list[tuple[float, str, object]]:
        net = fabric(seed, '\n[[nodes]]\nname = "sat"\npreset = "geo-sat"\n')
        for i in range(2000):
            net.push(i * 0.01, "sat", LEARNER, SIZE, i)
        return run(net)

    assert lossy(1) == lossy(1) != lossy(2)
    assert 1950 < len(lossy(1)) < 2000
