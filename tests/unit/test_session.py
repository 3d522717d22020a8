"""The scheduler of one manifest's spreading, alone and many of them in a simulated swarm."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from p2p.broadcast.leases import (
    DISTRUST_S,
    FIRST_WANTS,
    MAX_INFLIGHT,
    MAX_WANTS,
    MAX_WANTS_PER_PEER,
    SOURCE_AFTER_S,
    UNRELIABLE_AFTER,
)
from p2p.broadcast.session import MAX_QUEUED_WANTS, RESEND_AFTER_S, RESEND_MAX_S, Session
from p2p.limits import LEASE_S, REPAIR_AFTER_S
from tests.unit.swarm_sim import SOURCE, Sim

SEEDS = st.integers(0, 2**32 - 1)


def swarm(seed: int, peers: int, chunks: int, *, slowest: float = 0.02, **kwargs) -> Sim:
    sim = Sim(seed, chunks, **kwargs)
    sim.add(SOURCE, 0.01)
    for i in range(peers):
        sim.add(f"p{i}", sim.random.uniform(0.003, slowest))
    return sim


# --- the swarm


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 120), st.floats(0.0, 0.02))
def test_without_faults_the_source_sends_each_chunk_once_and_nothing_is_sent_twice(seed, peers, chunks, every) -> None:
    sim = swarm(seed, peers, chunks, slowest=0.01)
    sim.make(every)
    sim.run(120)
    note(f"seed {seed}: {sim.now:.2f} s")
    assert sim.finished
    assert sim.peers[SOURCE].sent == dict.fromkeys(range(chunks), 1)
    assert all(p.session.duplicates == 0 for p in sim.peers.values())
    total = sum(sum(p.sent.values()) for p in sim.peers.values())
    assert total == chunks * peers


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_every_live_peer_completes_whatever_happens(seed) -> None:
    """Random rates, losses, deaths, joins and withholders. Only the source must live."""
    rng = random.Random(seed)
    chunks = rng.randint(1, 100)
    sim = swarm(seed, rng.randint(1, 6), chunks, slowest=rng.choice([0.01, 0.05, 0.3]), loss=rng.choice([0, 0, 0.05, 0.3]))
    sim.make(rng.choice([0.0, 0.01, 0.1]))
    for i in range(rng.randint(0, 2)):
        sim.add(f"withholder{i}", 0.01, withholds=True)
    for i in range(rng.randint(0, 3)):
        sim.at(rng.uniform(0, 8), lambda i=i: sim.add(f"late{i}", rng.uniform(0.003, 0.1), catching=sim.sealed))
    for _ in range(rng.randint(0, 3)):

        def kill_one() -> None:
            mortal = [p.name for p in sim.others(SOURCE)]
            if len(mortal) > 1:
                sim.kill(rng.choice(mortal), rng.choice([0.05, 3.0]))

        sim.at(rng.uniform(0, 5), kill_one)
    sim.not_before = 9.0
    sim.run(400)
    missing = {p.name: chunks - len(p.session.held) for p in sim.peers.values() if p.alive and not p.session.complete}
    assert sim.finished, f"seed {seed} at {sim.now:.1f} s: missing {missing}"


def test_a_distributor_that_dies_before_it_relays() -> None:
    for seed in range(20):
        sim = swarm(seed, 4, 40)
        sim.peers["p0"].withholds = True  # takes what it is seeded, relays nothing, then dies
        sim.make(0.0)
        sim.at(0.3, lambda s=sim: s.kill("p0"))
        sim.run(30)
        assert sim.finished, f"seed {seed}"
        taken = sim.peers["p0"].got_from[SOURCE]
        assert taken > 0
        assert sim.now < 5, f"seed {seed}"
        # Only what died with it leaves the source again.
        assert sum(sim.peers[SOURCE].sent.values()) <= 40 + taken + MAX_INFLIGHT, f"seed {seed}"


def test_a_withholder_costs_a_few_leases_and_not_one_for_each_of_its_chunks() -> None:
    """It claims all 400 chunks at the start; at LEASE_S for each MAX_WANTS_PER_PEER that would be 100 s."""
    for seed in range(5):
        sim = swarm(seed, 3, 400, slowest=0.005)
        liar = sim.add("liar", 0.01, withholds=True)
        liar.session.held.update(range(400))
        for peer in sim.others("liar"):
            peer.session.peer_has("liar", range(400), 0.0)
        sim.make(0.0)
        sim.run(200)
        assert sim.finished and sim.now < 30, f"seed {seed}: {sim.now:.1f} s"


def test_a_late_joiner_is_served_by_peers() -> None:
    for seed in range(10):
        sim = swarm(seed, 4, 100)
        sim.make(0.0)
        sim.run(60)
        assert sim.finished
        before = sum(sim.peers[SOURCE].sent.values())
        late = sim.add("late", 0.01, catching=True)
        sim.run(sim.now + 60)
        assert sim.finished, f"seed {seed}"
        assert sum(sim.peers[SOURCE].sent.values()) - before < 20, f"seed {seed}"
        assert sum(late.got_from.values()) == 100 and late.session.duplicates == 0
        assert len([n for n, got in late.got_from.items() if got > 5 and n != SOURCE]) >= 3, "one peer did it all"


def test_the_swarm_finishes_without_its_source() -> None:
    """Everything left the source before it died: the peers complete among themselves."""
    for seed in range(10):
        sim = swarm(seed, 4, 60, slowest=0.05)
        sim.make(0.0)
        sim.at(0.9, lambda s=sim: s.kill(SOURCE))
        sim.run(60)
        assert sum(sim.peers[SOURCE].sent.values()) >= 60
        assert sim.finished, f"seed {seed}"


@pytest.mark.parametrize("neighbours", [1, 4, 8])
@pytest.mark.parametrize("down_s", [0.08, 0.5, 1.0])  # 256 KiB at 25, 4 and 2 Mbit/s
def test_a_joiner_with_a_slow_downlink_gets_everything_about_once(neighbours, down_s) -> None:
    for seed in range(3):
        sim = swarm(seed, neighbours, 100, slowest=0.004)
        sim.make(0.0)
        sim.run(60)
        assert sim.finished
        start = sim.now + 5
        sim.at(start, lambda s=sim: s.add("slow", 0.01, catching=True, down_s=down_s))
        sim.not_before = start + 1
        sim.run(start + 400 * down_s)
        assert sim.finished, f"seed {seed}"
        slow = sim.peers["slow"]
        assert slow.arrived <= 108, f"seed {seed}: {slow.arrived} chunks sent for 100"
        assert slow.done_at - start <= 1.15 * 100 * down_s + 1, f"seed {seed}: {slow.done_at - start:.1f} s"


@pytest.mark.parametrize("down_s", [0.08, 0.5])
def test_a_slow_receiver_of_pushes_gets_everything_about_once_and_holds_up_nobody(down_s) -> None:
    for seed in range(3):
        sim = swarm(seed, 4, 100, slowest=0.004)
        slow = sim.add("slow", 0.01, down_s=down_s)
        sim.make(0.0)
        sim.run(400 * down_s)
        assert sim.finished, f"seed {seed}"
        assert slow.arrived <= 135, f"seed {seed}: {slow.arrived} chunks sent for 100"
        assert slow.done_at <= 1.35 * 100 * down_s + 1, f"seed {seed}: {slow.done_at:.1f} s"
        others = max(p.done_at for p in sim.others(SOURCE) if p is not slow)
        assert others < 4, f"seed {seed}: {others:.1f} s"


def test_a_distributor_that_trickles_costs_seconds_and_not_its_whole_backlog() -> None:
    """Each of three others gets a chunk from it every 0.25 s; to pass on its share of 200 would take 48 s."""
    for seed in range(3):
        sim = swarm(seed, 3, 800, slowest=0.004)
        trickle = sim.add("trickle", 0.08)
        sim.make(0.0)
        sim.run(200)
        assert sim.finished, f"seed {seed}"
        assert trickle.got_from[SOURCE] >= 150
        honest = [p for p in sim.others(SOURCE) if p is not trickle]
        assert max(p.done_at for p in honest) < 20, f"seed {seed}: {sim.now:.1f} s"
        assert sum(p.session.duplicates for p in honest) < 40, f"seed {seed}"
        assert sum(sim.peers[SOURCE].sent.values()) < 1300, f"seed {seed}"


def test_a_node_whose_disk_was_full_for_long_is_served_again() -> None:
    sim = swarm(0, 0, 20)
    victim = sim.add("victim", 0.01)
    victim.full = True
    sim.make(0.0)
    sim.at(900.0, lambda: setattr(victim, "full", False))
    sim.run(1800)
    assert sim.finished
    assert sim.now < 900 + 2 * RESEND_MAX_S, f"{sim.now:.0f} s"
    assert victim.arrived < 300, "while nothing stays there, little is to be sent"


# --- one session


def receiver(chunks: int = 40, **kwargs) -> Session:
    session = Session(is_source=False, source=SOURCE, now=0.0, **kwargs)
    session.join(SOURCE, (), 0.0)
    session.learn(range(chunks), 0.0)
    session.close(chunks)
    return session


def test_at_most_max_inflight_chunks_are_unacknowledged() -> None:
    session = Session(is_source=True, source=None, now=0.0)
    session.join("a", (), 0.0)
    for chunk in range(30):
        session.hold(chunk, None, seed=False, now=0.0)
    handed = [session.next_for("a", 0.0) for _ in range(20)]
    assert [h for h in handed if h] == [(c, True) for c in range(MAX_INFLIGHT)]
    session.peer_has("a", [0, 1], 1.0)
    assert [session.next_for("a", 1.0) for _ in range(3)] == [(8, True), (9, True), None]


def test_a_missing_chunk_is_asked_of_its_holder_and_then_of_another() -> None:
    """Nothing comes at all, so every lease is twice as long as the one before."""
    session = receiver(1)
    session.join("a", [0], 0.0)
    session.join("b", [0], 0.1)
    assert session.wants(REPAIR_AFTER_S / 2) == {}
    assert session.wants(0.5) == {"a": [0]}
    assert session.wants(0.5 + LEASE_S / 2) == {}
    assert session.wants(0.5 + LEASE_S) == {"b": [0]}
    assert session.wants(0.5 + 2 * LEASE_S) == {}
    assert session.wants(0.5 + 3 * LEASE_S) == {SOURCE: [0]}
    session.wants(0.5 + 7 * LEASE_S)  # all broke it: from the start again
    assert session.wants(0.6 + 7 * LEASE_S) == {"a": [0]}
    assert session.hold(0, "a", seed=False, now=19.0) and session.complete
    assert session.wants(30.0) == {}


def test_the_source_is_asked_last_and_after_a_pause() -> None:
    session = receiver(1)
    assert session.wants(SOURCE_AFTER_S - 0.1) == {}
    assert session.wants(SOURCE_AFTER_S) == {SOURCE: [0]}


def test_a_peer_that_breaks_its_leases_is_not_asked_for_a_while() -> None:
    session = receiver(100)
    session.join("liar", range(100), 0.0)
    now, held = 1.0, 0
    asked: list[int] = []
    while len(asked) < UNRELIABLE_AFTER:  # the source answers at once, the liar never
        wants = session.wants(now)
        asked += wants.pop("liar", [])
        for chunk in wants.get(SOURCE, []):
            session.hold(chunk, SOURCE, seed=False, now=now)
            held += 1
        now += 0.5
    assert now < 1 + 4 * LEASE_S and held > 0
    now += 2 * LEASE_S
    for second in range(5):
        asked_now = session.wants(now + second)
        assert set(asked_now) == {SOURCE} and second + 2 * LEASE_S < DISTRUST_S
        deliver(session, asked_now, now + second)
    session.hold(99, "liar", seed=False, now=now + 5)  # it was only slow
    assert "liar" in session.wants(now + 6)


def deliver(session: Session, asked: dict[str, list[int]], now: float) -> None:
    for name, chunks in asked.items():
        for chunk in chunks:
            session.hold(chunk, name, seed=False, now=now)


def test_wants_start_small_grow_with_what_comes_and_stay_within_their_limits() -> None:
    session = receiver(1000, catching=True)
    for i in range(10):
        session.join(f"p{i}", range(1000), 0.0)
    sizes = []
    for round_trip in range(8):
        asked = session.wants(0.1 * round_trip)
        assert max(map(len, asked.values())) <= MAX_WANTS_PER_PEER
        chunks = [c for chunks in asked.values() for c in chunks]
        assert len(set(chunks)) == len(chunks)
        assert session.wants(0.1 * round_trip) == {}
        deliver(session, asked, 0.1 * round_trip + 0.05)
        sizes.append(len(chunks))
    assert sizes == [FIRST_WANTS, 4, 8, 16] + [MAX_WANTS] * 4


def test_wants_shrink_again_when_what_was_asked_for_comes_late() -> None:
    session = receiver(1000, catching=True)
    for i in range(4):
        session.join(f"p{i}", range(1000), 0.0)
    for round_trip in range(8):
        deliver(session, session.wants(0.1 * round_trip), 0.1 * round_trip + 0.05)
    queue: list[tuple[str, int]] = []
    for step in range(100):  # suddenly a chunk takes half a second, and all share one queue
        now = 1.0 + 0.5 * step
        if queue:
            name, chunk = queue.pop(0)
            session.hold(chunk, name, seed=False, now=now)
        queue += [(name, chunk) for name, chunks in session.wants(now).items() for chunk in chunks]
        assert 0 < len(queue) <= MAX_WANTS
        if step == 50:
            twice = session.duplicates
    assert len(queue) <= LEASE_S / 0.5 + 1
    assert session.duplicates == twice < MAX_WANTS / 2, "only what was out when the link broke down came twice"


def test_a_lease_lasts_while_chunks_come_from_its_peer_but_not_for_ever() -> None:
    session = receiver(40, catching=True)
    session.join("a", range(40), 0.0)
    session.join("b", [0], 0.0)
    session._peers["b"].has.discard(0)
    assert session.wants(0.0) == {"a": [0, 1]}
    session.hold(1, "a", seed=False, now=LEASE_S - 0.1)
    session.peer_has("b", [0], LEASE_S)
    assert 0 not in session.wants(LEASE_S + 0.1).get("b", []), "the one in front of it came just now"
    now = LEASE_S
    for chunk in range(10, 40):  # and then always others
        now += LEASE_S - 0.1
        session.hold(chunk, "a", seed=False, now=now)
        if 0 in session.wants(now).get("b", []):
            break
    else:
        pytest.fail("a peer may sit on a chunk for ever")
    assert chunk - 10 > MAX_INFLIGHT / 2


def test_a_chunk_sent_over_and_over_keeps_no_lease_alive() -> None:
    session = receiver(10, catching=True)
    session.join("a", range(10), 0.0)
    session.join("b", (), 0.0)
    session.hold(9, "a", seed=False, now=0.0)
    assert session.wants(0.0) == {"a": [0, 1]}
    session.peer_has("b", [0, 1], 0.1)
    for step in range(1, 21):
        session.hold(9, "a", seed=False, now=step * LEASE_S / 20)
    assert session.wants(LEASE_S) == {"b": [0, 1]}
    assert session.duplicates == 20


def test_a_chunk_on_a_slow_way_is_not_handed_over_again() -> None:
    """It was handed over longer than LEASE_S ago, but answers take that long there."""
    session = Session(is_source=True, source=None, now=0.0)
    session.join("a", (), 0.0)
    for chunk in range(4):
        session.hold(chunk, None, seed=False, now=0.0)
    assert [session.next_for("a", 0.0) for _ in range(4)] == [(c, True) for c in range(4)]
    session.peer_has("a", [0], 4.0)
    session.peer_has("a", [1], 8.0)
    session.peer_wants("a", [2], 8.0 + LEASE_S)
    assert session.next_for("a", 8.0 + LEASE_S) is None
    session.peer_wants("a", [2], 16.0 + LEASE_S)
    assert session.next_for("a", 16.0 + LEASE_S) == (2, False)


def test_a_chunk_that_is_pulled_from_the_source_is_not_seeded_again() -> None:
    session = Session(is_source=True, source=None, now=0.0)
    for name in ("a", "b"):
        session.join(name, (), 0.0)
    for chunk in range(6):
        session.hold(chunk, None, seed=False, now=0.0)
    session.peer_wants("a", [0, 1, 2], 0.0)
    assert [session.next_for("a", 0.0) for _ in range(3)] == [(0, True), (1, True), (2, True)]
    assert [session.next_for("b", 0.0) for _ in range(4)] == [(3, True), (4, True), (5, True), None]


def test_what_a_complete_peer_holds_takes_no_memory() -> None:
    session = Session(is_source=True, source=None, now=0.0)
    session.join("a", range(99_999), 0.0)
    session.close(100_000)
    assert not session.peer_complete("a") and len(session._peers["a"].has._bits) == 12_500
    session.peer_has("a", [99_999], 0.0)
    assert session.peer_complete("a") and len(session._peers["a"].has._bits) == 0


def test_chunks_that_were_dropped_over_there_do_not_fill_the_window_for_good() -> None:
    session = Session(is_source=True, source=None, now=0.0)
    session.join("a", (), 0.0)
    for chunk in range(20):
        session.hold(chunk, None, seed=False, now=0.0)
    assert [session.next_for("a", 0.0) for _ in range(MAX_INFLIGHT)][-1] == (MAX_INFLIGHT - 1, True)
    session.peer_wants("a", [15], LEASE_S / 2)
    assert session.next_for("a", LEASE_S / 2) is None
    session.peer_wants("a", [15], LEASE_S)
    assert session.next_for("a", LEASE_S) == (15, True)  # nobody had it from the source


def test_a_flood_of_wants_is_bounded() -> None:
    session = Session(is_source=False, source=SOURCE, now=0.0)
    session.learn(range(1000), 0.0)
    for chunk in range(1000):
        session.hold(chunk, SOURCE, seed=False, now=0.0)
    session.join("a", (), 0.0)
    session.peer_wants("a", list(range(1000)) * 5, 1.0)
    assert len(session._peers["a"].wanted) == MAX_QUEUED_WANTS
    session.leave("a")
    session.join("a", (), 0.0)
    sent = 0
    for second in range(1000):
        session.peer_wants("a", [7] * 50, float(second))
        while session.next_for("a", float(second)) is not None:
            sent += 1
        session.peer_has("a", [7], float(second))
    often = 1000 / RESEND_MAX_S
    assert often - 2 <= sent <= often + 2 + math.log2(RESEND_MAX_S / RESEND_AFTER_S)


def test_a_chunk_that_the_disk_lost_comes_from_a_peer_when_the_source_is_gone() -> None:
    session = receiver(2)
    session.join("a", (), 0.0)
    session.hold(0, "a", seed=False, now=0.0)
    session.hold(1, SOURCE, seed=True, now=0.0)
    session.leave(SOURCE)
    assert session.complete
    session.lose(0, 5.0)
    assert not session.complete and session.next_for("a", 5.0) == (1, False)
    assert session.wants(6.0) == {"a": [0]}
    assert session.hold(0, "a", seed=False, now=6.5) and session.complete


def test_a_duplicate_is_counted_and_changes_nothing() -> None:
    session = receiver(2)
    assert session.hold(0, SOURCE, seed=False, now=0.0)
    assert not session.hold(0, SOURCE, seed=False, now=0.0)
    assert session.duplicates == 1 and session.held == {0} and session.news() == [0] and session.news() == []


@pytest.mark.parametrize("call", ["peer_has", "peer_wants"])
def test_a_stranger_changes_nothing(call) -> None:
    session = receiver(4)
    getattr(session, call)("stranger", [0, 1], 0.0)
    assert session.peers() == [SOURCE] and session.next_for("stranger", 0.0) is None
