"""The scheduler of one manifest's spreading, alone and many of them in a simulated swarm."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from p2p.broadcast.leases import (
    DISTRUST_S,
    FIRST_WANTS,
    MAX_AHEAD,
    MAX_WANTS,
    MAX_WANTS_PER_PEER,
    SOURCE_AFTER_S,
    UNRELIABLE_AFTER,
)
from p2p.broadcast.policies.seeding import HELP_AFTER_S, OVERDUE_S
from p2p.broadcast.session import MAX_INFLIGHT, MAX_QUEUED_WANTS, RESEND_AFTER_S, RESEND_MAX_S, Session
from p2p.limits import LEASE_S, REPAIR_AFTER_S
from tests.support.swarm_sim import SOURCE, Sim

SEEDS = st.integers(0, 2**32 - 1)


def swarm(seed: int, peers: int, chunks: int, *, slowest: float = 0.02, source_s: float = 0.01, **kwargs) -> Sim:
    sim = Sim(seed, chunks, **kwargs)
    sim.add(SOURCE, source_s)
    for i in range(peers):
        sim.add(f"p{i}", sim.random.uniform(0.003, slowest))
    return sim


# --- the swarm


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 120), st.floats(0.0, 0.04))
def test_a_source_with_nothing_to_spare_sends_each_chunk_about_once_and_hardly_any_arrives_twice(
    seed, peers, chunks, every
) -> None:
    """Only when all chunks are handed out may it take over the last few."""
    sim = swarm(seed, peers, chunks, slowest=0.01, source_s=0.05)
    sim.make(every)
    sim.run(120)
    note(f"seed {seed}: {sim.now:.2f} s")
    assert sim.finished
    sent = sim.peers[SOURCE].sent
    assert set(sent) == set(range(chunks)) and sum(sent.values()) <= chunks + 2 * peers
    twice = sum(p.session.duplicates for p in sim.peers.values())
    assert twice <= peers
    assert chunks * peers + twice <= sum(sum(p.sent.values()) for p in sim.peers.values()) <= chunks * peers + 2 * peers


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 300), st.sampled_from([0.002, 0.005, 0.01]))
def test_a_source_that_can_spare_copies_helps_and_little_is_sent_twice(seed, peers, chunks, source_s) -> None:
    """All chunks are there at once. Only what is taken over while its distributor comes to it may come twice."""
    sim = swarm(seed, peers, chunks, slowest=0.01, source_s=source_s)
    sim.make(0.0)
    sim.run(120)
    note(f"seed {seed}: {sim.now:.2f} s")
    assert sim.finished
    sent, total = sim.peers[SOURCE].sent, sum(sum(p.sent.values()) for p in sim.peers.values())
    assert set(sent) == set(range(chunks)) and max(sent.values()) <= peers
    twice = sum(p.session.duplicates for p in sim.peers.values())
    assert chunks * peers + twice <= total <= chunks * peers + 4 * peers + 0.05 * chunks * peers


def test_chunks_that_are_made_slowly_are_not_sent_twice() -> None:
    """Every uplink has time to spare between two chunks. The encoder's pace is the usual limit of a small version."""
    for seed in range(5):
        sim = swarm(seed, 2, 200, slowest=0.01, source_s=0.003)
        sim.make(0.01)
        sim.run(60)
        assert sim.finished
        assert sum(p.session.duplicates for p in sim.peers.values()) <= 0.05 * 400, f"seed {seed}"


def test_the_uplink_that_the_source_has_to_spare_shortens_the_round() -> None:
    """Four receivers at 20 ms a chunk carry 100 chunks to each other in 6 s and more; the source does its share."""
    for seed in range(5):
        took = []
        for source_s in (0.05, 0.02, 0.005):
            sim = Sim(seed, 100)
            sim.add(SOURCE, source_s)
            for i in range(4):
                sim.add(f"p{i}", 0.02)
            sim.make(0.0)
            sim.run(60)
            assert sim.finished
            took.append(sim.now)
            bound = max(100 * source_s, 400 / (1 / source_s + 4 / 0.02))
            assert sim.now <= 1.35 * bound + 0.3, f"seed {seed}: {sim.now:.2f} s, and the fluid bound is {bound:.2f} s"
        assert took == sorted(took, reverse=True)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from(["star", "chain", "tree"]), st.integers(1, 7), st.integers(1, 60), st.floats(0.0, 0.05))
def test_every_plain_policy_completes_without_faults_and_sends_nothing_twice(seed, policy, peers, chunks, every) -> None:
    sim = swarm(seed, peers, chunks, policy=policy)
    sim.make(every)
    sim.run(120)
    assert sim.finished
    assert all(p.session.duplicates == 0 for p in sim.peers.values())
    assert sum(sim.peers[SOURCE].sent.values()) == chunks * {"star": peers, "chain": 1, "tree": min(peers, 2)}[policy]
    assert sum(sum(p.sent.values()) for p in sim.peers.values()) == chunks * peers


@settings(max_examples=80, deadline=None)
@given(SEEDS)
@example(4284492)  # a lost answer was repeated after 190 s, which was then waited for each time
def test_every_live_peer_completes_whatever_happens(seed) -> None:
    """Random rates, losses (of chunks and of announcements), deaths, joins, withholders and peers that never acknowledge.
    Only the source must live."""
    rng = random.Random(seed)
    chunks = rng.randint(1, 100)
    sim = swarm(
        seed, rng.randint(1, 6), chunks, slowest=rng.choice([0.01, 0.05, 0.3]), source_s=rng.choice([0.003, 0.01, 0.05]),
        loss=rng.choice([0, 0, 0.05, 0.3]), deafness=rng.choice([0, 0, 0.3]),
    )  # fmt: skip
    sim.make(rng.choice([0.0, 0.01, 0.1]))
    for i in range(rng.randint(0, 2)):
        sim.add(f"withholder{i}", 0.01, withholds=True)
    for i in range(rng.choice([0, 0, 1])):
        sim.add(f"deaf{i}", 0.01).deaf = True
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
        assert others < OVERDUE_S + 2, f"seed {seed}: {others:.1f} s"  # what was seeded there is sent by the source then


def test_a_slow_downlink_that_many_share_pulls_nothing_while_it_is_busy() -> None:
    """Each of twelve gets a chunk through in a second and a half in the mean, and now and then in many."""
    for seed in range(3):
        sim = swarm(seed, 12, 300, slowest=0.03)
        slow = sim.add("slow", 0.05, down_s=0.12)
        sim.make(0.0)
        sim.run(100)
        assert sim.finished, f"seed {seed}"
        assert slow.arrived <= 1.02 * 300, f"seed {seed}: {slow.arrived} chunks sent for 300"


def test_a_distributor_that_trickles_costs_seconds_and_not_its_whole_backlog() -> None:
    """Each of three others gets a chunk from it every 0.25 s; to pass on its share of 200 would take 48 s."""
    for seed in range(3):
        sim = swarm(seed, 3, 800, slowest=0.004)
        trickle = sim.add("trickle", 0.08)
        sim.make(0.0)
        sim.run(200)
        assert sim.finished, f"seed {seed}"
        assert 10 <= trickle.got_from[SOURCE] < 100, "it is given as much as it passes on, not an equal share"
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


def hand(session: Session, peer: str, now: float) -> tuple[int, bool] | None:
    """What is handed out when only `peer` has room."""
    found = session.next([peer], now)
    return None if found is None else found[1:]


def drain(session: Session, peer: str, now: float) -> list[int]:
    """Everything that can be handed to `peer` now."""
    return [chunk for chunk, _ in iter(lambda: hand(session, peer, now), None)]


def receiver(chunks: int = 40, **kwargs) -> Session:
    session = Session(me="me", source=SOURCE, now=0.0, **kwargs)
    session.join(SOURCE, (), 0.0)
    session.learn(range(chunks), 0.0)
    session.close(chunks)
    return session


def test_at_most_max_inflight_chunks_are_unacknowledged(monkeypatch) -> None:
    # The source helps from the start: the rule itself is looked at.
    monkeypatch.setattr("p2p.broadcast.policies.seeding.HELP_AFTER_S", 0.0)
    session = Session(me=SOURCE, source=None, now=0.0)
    session.join("a", (), 0.0)
    for chunk in range(2 * MAX_INFLIGHT):
        session.hold(chunk, None, duty=False, now=0.0)
    assert drain(session, "a", 0.0) == list(range(MAX_INFLIGHT))
    session.peer_has("a", [0, 1], 1.0)
    assert drain(session, "a", 1.0) == [MAX_INFLIGHT, MAX_INFLIGHT + 1]


def test_a_missing_chunk_is_asked_of_its_holder_and_then_of_another() -> None:
    """Nothing comes at all, so every lease is twice as long as the one before."""
    session = receiver(1)
    session.join("a", [0], 0.0)
    session.join("b", [0], 0.1)
    t = REPAIR_AFTER_S
    assert session.wants(t / 2) == {}
    assert session.wants(t) == {"a": [0]}
    assert session.wants(t + LEASE_S / 2) == {}
    assert session.wants(t + LEASE_S) == {"b": [0]}
    assert session.wants(t + 2 * LEASE_S) == {}
    assert session.wants(t + 3 * LEASE_S) == {SOURCE: [0]}
    session.wants(t + 7 * LEASE_S)  # all broke it: from the start again
    assert session.wants(t + 0.1 + 7 * LEASE_S) == {"a": [0]}
    assert session.hold(0, "a", duty=False, now=19.0) and session.complete
    assert session.wants(30.0) == {}


def test_the_source_is_asked_last_and_after_a_pause() -> None:
    session = receiver(1)
    assert session.wants(SOURCE_AFTER_S - 0.1) == {}
    asked = [t for t in range(1, 100) if session.wants(0.1 * t) == {SOURCE: [0]}]
    assert asked and 0.1 * asked[0] <= REPAIR_AFTER_S + LEASE_S + 0.1


def test_a_peer_that_breaks_its_leases_is_not_asked_for_a_while() -> None:
    session = receiver(100)
    session.join("liar", range(100), 0.0)
    now, held = 1.0, 0
    asked: list[int] = []
    while len(asked) < UNRELIABLE_AFTER:  # the source answers at once, the liar never
        wants = session.wants(now)
        asked += wants.pop("liar", [])
        for chunk in wants.get(SOURCE, []):
            session.hold(chunk, SOURCE, duty=False, now=now)
            held += 1
        now += 0.5
    assert now < 1 + 4 * LEASE_S and held > 0
    now += 2 * LEASE_S
    for second in range(5):
        asked_now = session.wants(now + second)
        assert set(asked_now) == {SOURCE} and second + 2 * LEASE_S < DISTRUST_S
        deliver(session, asked_now, now + second)
    session.hold(99, "liar", duty=False, now=now + 5)  # it was only slow
    for step in range(8):
        asked_now = session.wants(now + 5 + 0.5 * step)
        if "liar" in asked_now:
            break
        deliver(session, asked_now, now + 5 + 0.5 * step)
    else:
        pytest.fail("a peer that sends again is not asked again")


def deliver(session: Session, asked: dict[str, list[int]], now: float) -> None:
    for name, chunks in asked.items():
        for chunk in chunks:
            session.hold(chunk, name, duty=False, now=now)


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
            session.hold(chunk, name, duty=False, now=now)
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
    session._peers["b"].has.discard(0)  # an announcement cannot be taken back
    assert session.wants(0.0) == {"a": [0, 1]}
    session.hold(1, "a", duty=False, now=LEASE_S - 0.1)
    session.peer_has("b", [0], LEASE_S)
    assert 0 not in session.wants(LEASE_S + 0.1).get("b", []), "the one in front of it came just now"
    now = LEASE_S
    for chunk in range(10, 40):  # and then always others
        now += LEASE_S - 0.1
        session.hold(chunk, "a", duty=False, now=now)
        if 0 in session.wants(now).get("b", []):
            break
    else:
        pytest.fail("a peer may sit on a chunk for ever")
    assert chunk - 10 >= MAX_AHEAD / 2


def test_a_chunk_sent_over_and_over_keeps_no_lease_alive() -> None:
    session = receiver(10, catching=True)
    session.join("a", range(10), 0.0)
    session.join("b", (), 0.0)
    session.hold(9, "a", duty=False, now=0.0)
    assert session.wants(0.0) == {"a": [0, 1]}
    session.peer_has("b", [0, 1], 0.1)
    for step in range(1, 21):
        session.hold(9, "a", duty=False, now=step * LEASE_S / 20)
    assert session.wants(LEASE_S) == {"b": [0, 1]}
    assert session.duplicates == 20


def test_a_chunk_on_a_slow_way_is_not_handed_over_again() -> None:
    """It was handed over longer than LEASE_S ago, but answers take that long there."""
    session = Session(me=SOURCE, source=None, now=0.0)
    session.join("a", (), 0.0)
    for chunk in range(4):
        session.hold(chunk, None, duty=False, now=0.0)
    assert drain(session, "a", 0.0) == [0, 1, 2, 3]
    session.peer_has("a", [0], 4.0)
    session.peer_has("a", [1], 8.0)
    session.peer_wants("a", [2], 8.0 + LEASE_S)
    assert hand(session, "a", 8.0 + LEASE_S) is None
    session.peer_wants("a", [2], 16.0 + LEASE_S)
    assert hand(session, "a", 16.0 + LEASE_S) == (2, False)


def test_a_chunk_that_is_pulled_from_the_source_is_not_seeded_again() -> None:
    session = Session(me=SOURCE, source=None, now=0.0)
    for name in ("a", "b"):
        session.join(name, (), 0.0)
    for chunk in range(6):
        session.hold(chunk, None, duty=False, now=0.0)
    session.peer_wants("a", [0, 1, 2], 0.0)
    assert [hand(session, "a", 0.0) for _ in range(3)] == [(0, True), (1, True), (2, True)]
    handed = [h for h in (hand(session, "b", 0.0) for _ in range(10)) if h]
    assert [c for c, seed in handed if seed] == [3, 4, 5][: len([c for c, seed in handed if seed])] != []
    assert len({c for c, _ in handed}) == len(handed)


def test_what_a_complete_peer_holds_takes_no_memory() -> None:
    session = Session(me=SOURCE, source=None, now=0.0)
    session.join("a", range(99_999), 0.0)
    session.close(100_000)
    assert session.holds_of("a").bit_count() == 99_999 and session._peers["a"].has._bits.bit_length() == 99_999  # memory
    session.peer_has("a", [99_999], 0.0)
    assert session.holds_of("a").bit_count() == 100_000 and session._peers["a"].has._bits == 0  # memory


def test_chunks_that_were_dropped_over_there_do_not_fill_the_window_for_good(monkeypatch) -> None:
    # The source helps from the start: the rule itself is looked at.
    monkeypatch.setattr("p2p.broadcast.policies.seeding.HELP_AFTER_S", 0.0)
    session = Session(me=SOURCE, source=None, now=0.0)
    session.join("a", (), 0.0)
    last = 2 * MAX_INFLIGHT
    for chunk in range(last + 1):
        session.hold(chunk, None, duty=False, now=0.0)
    assert drain(session, "a", 0.0) == list(range(MAX_INFLIGHT))
    session.peer_wants("a", [last], LEASE_S / 2)
    assert hand(session, "a", LEASE_S / 2) is None
    session.peer_wants("a", [last], LEASE_S)
    # There is room again, for a whole window. What was asked for is at a distributor, and not late there: its turn comes.
    assert drain(session, "a", LEASE_S) == list(range(MAX_INFLIGHT, last))


def test_a_flood_of_wants_is_bounded() -> None:
    session = Session(me="me", source=SOURCE, now=0.0)
    session.learn(range(1000), 0.0)
    for chunk in range(1000):
        session.hold(chunk, SOURCE, duty=False, now=0.0)
    session.join("a", (), 0.0)
    session.peer_wants("a", list(range(1000)) * 5, 1.0)
    assert len(session._peers["a"].wanted) == MAX_QUEUED_WANTS  # a bound on what a peer can make us remember
    session.leave("a", 1.0)
    session.join("a", (), 0.0)
    sent = 0
    for second in range(1000):
        session.peer_wants("a", [7] * 50, float(second))
        while hand(session, "a", float(second)) is not None:
            sent += 1
        session.peer_has("a", [7], float(second))
    often = 1000 / RESEND_MAX_S
    assert often - 2 <= sent <= often + 2 + math.log2(RESEND_MAX_S / RESEND_AFTER_S)


def test_a_chunk_that_the_disk_lost_comes_from_a_peer_when_the_source_is_gone() -> None:
    session = receiver(2)
    session.join("a", (), 0.0)
    session.hold(0, "a", duty=False, now=0.0)
    session.hold(1, SOURCE, duty=True, now=0.0)
    session.leave(SOURCE, 0.0)
    assert session.complete
    session.lose(0, 5.0)
    assert not session.complete and hand(session, "a", 5.0) == (1, False)
    assert session.wants(6.0) == {"a": [0]}
    assert session.hold(0, "a", duty=False, now=6.5) and session.complete


def test_a_duplicate_is_counted_and_changes_nothing() -> None:
    session = receiver(2)
    assert session.hold(0, SOURCE, duty=False, now=0.0)
    assert not session.hold(0, SOURCE, duty=False, now=0.0)
    assert session.duplicates == 1 and session.held == {0} and session.news() == [0] and session.news() == []


@pytest.mark.parametrize("call", ["peer_has", "peer_wants"])
def test_a_stranger_changes_nothing(call) -> None:
    session = receiver(4)
    getattr(session, call)("stranger", [0, 1], 0.0)
    assert session.peers() == [SOURCE] and hand(session, "stranger", 0.0) is None


def test_a_peer_that_asks_for_everything_does_not_have_the_uplink_alone() -> None:
    """It has room always and acknowledges at once, as a joiner with a fast downlink does: the neighbours take turns."""
    session = Session(me=SOURCE, source=None, now=0.0)
    order = ["greedy", "a", "b"]
    for name in order:
        session.join(name, (), 0.0)
    for chunk in range(400):
        session.hold(chunk, None, duty=False, now=0.0)
    served: dict[str, int] = dict.fromkeys(order, 0)
    for step in range(300):
        now = 0.01 * step
        session.peer_wants("greedy", range(400), now)
        found = session.next(order, now)
        if found is None:
            # Their windows are full, and nobody passes anything on here: the source waits for that, before it helps.
            assert now < HELP_AFTER_S, now
            continue
        peer, chunk, _ = found
        order.remove(peer)
        order.append(peer)
        served[peer] += 1
        session.peer_has(peer, [chunk], now + 0.005)
    assert min(served["a"], served["b"]) >= 300 / 6, served


def test_a_peer_that_never_acknowledges_is_handed_no_more_than_the_window_and_others_go_on() -> None:
    session = Session(me=SOURCE, source=None, now=0.0)
    for name in ("deaf", "a"):
        session.join(name, (), 0.0)
    for chunk in range(200):
        session.hold(chunk, None, duty=False, now=0.0)
    got: dict[str, set[int]] = {"deaf": set(), "a": set()}
    order = ["deaf", "a"]
    for step in range(3000):
        now = 0.01 * step
        session.tick(now)
        found = session.next(order, now)
        if found is not None:
            peer, chunk, _ = found
            order.remove(peer)
            order.append(peer)
            assert chunk not in got[peer]
            got[peer].add(chunk)
            if peer == "a":
                session.peer_has("a", [chunk], now + 0.005)
    assert len(got["deaf"]) == MAX_INFLIGHT and got["a"] == set(range(200))
    now = 100.0
    for _ in range(1000):  # it was there all the time, and asks in the end
        session.peer_wants("deaf", sorted(set(range(200)) - got["deaf"])[:8], now)
        got["deaf"].update(drain(session, "deaf", now))
        now += 1.0
    assert got["deaf"] == set(range(200))


def test_who_is_not_entrusted_with_chunks_gets_them_and_passes_none_on() -> None:
    """As one that lags: after the others, and without a duty; also when it asks for a chunk first."""
    session = Session(me="head", source=None, now=0.0, entrusts=lambda peer: peer != "stranger")
    for peer in ("stranger", "a", "b"):
        session.join(peer, (), 0.0)
    session.learn(range(4), 0.0)
    for chunk in range(4):
        session.hold(chunk, None, duty=0, now=0.0)
    session.close(4)
    session.peer_wants("stranger", (3,), 0.0)
    duties: dict[str, list[int]] = {"stranger": [], "a": [], "b": []}
    now = 0.0
    for _ in range(400):
        now += 0.05
        session.tick(now)
        while (push := session.next(("stranger", "a", "b"), now)) is not None:
            duties[push.peer].append(push.duty)
            session.peer_has(push.peer, (push.chunk,), now)
    assert duties["stranger"] and not any(duties["stranger"])
    assert any(duties["a"]) and any(duties["b"])
    assert session.lagging == {"stranger"}
