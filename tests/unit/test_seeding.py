"""What the source hands to whom: windows, seeds, take-over, and what becomes of chunks whose distributor fails."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p.broadcast.laggards import LAG_S
from p2p.broadcast.peer_groups import EVERYWHERE
from p2p.broadcast.policies.distributor import LEAST_COPIES, SLOWER, Distributor, Out, slow_receivers
from p2p.broadcast.policies.port import Push, Remembered
from p2p.broadcast.policies.queues import Queues
from p2p.broadcast.policies.seeding import OVERDUE_S, OWN_WAITING, Seeding
from p2p.broadcast.session import Session
from tests.support.swarm_sim import SOURCE, Sim


def source(peers: str, chunks: int, memory: dict[str, Remembered] | None = None) -> Session:
    session = Session(me=SOURCE, source=None, now=0.0, memory=memory)
    for peer in peers:
        session.join(peer, (), 0.0)
    for chunk in range(chunks):
        session.hold(chunk, None, duty=False, now=0.0)
    session.close(chunks)
    return session


def seeds(session: Session, peers: str, now: float) -> dict[str, list[int]]:
    """All seeds that can be handed out now, until the source starts to send copies itself."""
    out: dict[str, list[int]] = {peer: [] for peer in peers}
    order = list(peers)
    while (found := session.next(order, now)) is not None and found[2]:
        out[found[0]].append(found[1])
        order.remove(found[0])
        order.append(found[0])
    return out


def everything(session: Session, peers: str, now: float) -> dict[str, set[int]]:
    """Every chunk that can be handed out now, by peer."""
    out: dict[str, set[int]] = {peer: set() for peer in peers}
    while (found := session.next(list(peers), now)) is not None:
        out[found[0]].add(found[1])
    return out


def strong_and_weak(chunks: int, weak_s: float) -> Sim:
    sim = Sim(0, chunks)
    sim.add(SOURCE, 0.012)
    for name, chunk_s in (("strong", 0.005), ("weak", weak_s), ("other", 0.02)):
        sim.add(name, chunk_s)
    sim.make(0.0)
    return sim


def test_a_strong_peer_is_given_more_in_proportion_to_what_it_delivers() -> None:
    sim = strong_and_weak(1000, 0.05)
    sim.run(120)
    assert sim.finished
    strong, weak = (sim.peers[name].got_from[SOURCE] for name in ("strong", "weak"))
    relayed = {name: sum(sim.peers[name].sent.values()) for name in ("strong", "weak", "other")}
    assert relayed["strong"] > 3 * relayed["weak"] > 0
    assert strong > weak
    memory = sim.peers[SOURCE].session.memory
    assert memory["strong"].window > 2 * memory["weak"].window
    assert memory["strong"].pace > 2 * memory["weak"].pace > 0


def test_every_peer_is_tried_before_one_is_given_its_second_window() -> None:
    first = seeds(source("abcd", 40), "abcd", 0.0)
    assert all(first.values()) and max(map(len, first.values())) - min(map(len, first.values())) <= 1
    chunks = [chunk for got in first.values() for chunk in got]
    assert sorted(chunks) == list(range(len(chunks))), "lowest first, none twice"


def test_a_peer_that_withholds_is_given_no_more_than_it_never_passed_on() -> None:
    session = source("abw", 300)
    given: Counter[str] = Counter()
    holds: dict[str, set[int]] = {peer: set() for peer in "abw"}
    now = 0.0
    for _ in range(200):  # a and b pass on what they are given within the tick; w keeps it
        now += 0.05
        session.tick(now)
        for peer, chunks in seeds(session, "abw", now).items():
            given[peer] += len(chunks)
            reached = "w" if peer == "w" else "abw"
            for other in reached:
                new = set(chunks) - holds[other]
                holds[other] |= new
                session.peer_has(other, sorted(new), now)
    assert given["a"] + given["b"] > 100
    assert given["w"] <= 4, given
    relieved = session.relieved()
    assert {peer for peer, _ in relieved} <= {"w", "a", "b"}


def test_an_overdue_chunk_is_sent_by_the_source_and_its_distributor_told() -> None:
    session = source("abc", 3)
    handed = seeds(session, "abc", 0.0)
    everything(session, "abc", 0.0)  # what else it can spare now
    session.relieved()
    silent = next(peer for peer, chunks in handed.items() if chunks)
    (chunk, *_) = handed[silent]
    now = 0.0
    while not session.relieved():
        now += 0.05
        session.tick(now)
        assert now < 5 * OVERDUE_S
        assert now >= OVERDUE_S or not session.relieved()
    sent = everything(session, "abc", now)
    assert any(sent.values())
    for peer in "abc":
        if peer != silent:
            assert not session.lacks(peer, chunk), "it is there or on its way from the source"


def test_a_peer_that_lags_is_given_no_seeds_and_still_gets_everything_from_who_has_time(monkeypatch) -> None:
    # The source helps from the start: the rule itself is looked at.
    monkeypatch.setattr("p2p.broadcast.policies.seeding.HELP_AFTER_S", 0.0)
    session = source("abz", 400)
    now = 0.0
    session.peer_has("z", range(2), now)
    for chunk in range(60):
        now += 0.05
        session.peer_has("a", [chunk], now)
        session.peer_has("b", [chunk], now)
        session.tick(now)
    assert now > LAG_S and session.lagging == {"z"}
    handed = seeds(session, "abz", now)
    assert handed["z"] == [] and handed["a"] and handed["b"]
    assert seeds(session, "z", now)["z"] == []
    found = session.next(["z"], now)
    assert found is not None and found[0] == "z" and not found[2], "no seed, but a copy when nobody else has room"


@pytest.mark.parametrize("reached", [False, True])
def test_what_a_dead_distributor_held_is_handed_out_again(reached) -> None:
    session = source("abc", 4)
    handed = seeds(session, "abc", 0.0)
    victim = next(peer for peer, chunks in handed.items() if chunks)
    session.peer_has(victim, handed[victim], 0.1)
    rest = "abc".replace(victim, "")
    if reached:  # one other has it: the source brings it to the last one itself, as that one's repair would ask for it
        session.peer_has(rest[0], handed[victim], 0.2)
    session.leave(victim, 0.3)
    later = everything(session, rest, 0.3)
    for chunk in handed[victim]:
        got = [peer for peer in rest if chunk in later[peer]]
        assert got, f"chunk {chunk} died with its distributor"
        assert not reached or got == [rest[1]]


def test_what_is_taken_over_is_the_last_chunk_of_who_would_be_through_last_and_it_is_told_once(monkeypatch) -> None:
    """a is known for a large window and b for a small one; then nothing moves."""
    # The source helps from the start: the rule itself is looked at.
    monkeypatch.setattr("p2p.broadcast.policies.seeding.HELP_AFTER_S", 0.0)
    unit = Session(me=SOURCE, source=None, now=0.0).chunk_bytes
    session = source("ab", 12, {"a": Remembered(10.0 * unit), "b": Remembered(2.0 * unit)})
    handed = seeds(session, "ab", 0.0)
    assert len(handed["a"]) + len(handed["b"]) >= 11
    while session.relieved():
        pass
    policy = session._policy  # its windows are not in the view that it has of the session
    assert isinstance(policy, Seeding)
    told: list[tuple[str, int]] = []
    for _ in range(30):
        backlog = {peer: list(d.out) for peer, d in policy._peers.items()}  # the same
        session.next(["a", "b"], 0.0)
        for peer, chunk in session.relieved():
            assert chunk == backlog[peer][-1], "the last one it was given"
            told.append((peer, chunk))
    assert told and len(set(told)) == len(told)
    assert told[0][0] == "b", "a has more to do, and is five times as fast"
    assert {peer for peer, _ in told} == {"a", "b"}


def test_a_relieved_distributor_does_not_push_the_chunk_whether_it_hears_before_or_after_it_comes() -> None:
    for before in (True, False):
        relay = Session(me="a", source=SOURCE, now=0.0)
        for peer in (SOURCE, "b"):
            relay.join(peer, (), 0.0)
        if before:
            relay.relieve([0])
        relay.hold(0, SOURCE, duty=True, now=0.1)
        relay.hold(1, SOURCE, duty=True, now=0.1)
        if not before:
            relay.relieve([0])
        assert relay.next(["b"], 0.2) == ("b", 1, False)
        assert relay.next(["b"], 0.2) is None
        relay.peer_wants("b", [0], 3.0)
        assert relay.next(["b"], 3.0) == ("b", 0, False), "who asks for it is served all the same"


def test_memory_carries_from_one_version_to_the_next() -> None:
    sim = strong_and_weak(600, 0.06)
    sim.run(60)
    assert sim.finished
    memory = sim.peers[SOURCE].session.memory
    names = ["strong", "weak", "other"]
    cold, warm = Session(me=SOURCE, source=None, now=0.0), Session(me=SOURCE, source=None, now=0.0, memory=dict(memory))
    took = {}
    for kind, session in (("cold", cold), ("warm", warm)):
        for name in names:
            session.join(name, (), 0.0)
        for chunk in range(400):
            session.hold(chunk, None, duty=False, now=0.0)
        got: Counter[str] = Counter()
        while (found := session.next(names, 0.0)) is not None and found[2] and got[found[0]] < 30:
            got[found[0]] += 1
        took[kind] = got
    assert took["warm"]["strong"] > 2 * took["cold"]["strong"]
    assert took["warm"]["strong"] > took["warm"]["weak"]


def test_memory_is_in_bytes_so_that_larger_chunks_are_fewer() -> None:
    memory = {"a": Remembered(64 * 8192.0), "b": Remembered(64 * 8192.0)}
    counts = []
    for size in (8192, 65536):
        session = Session(me=SOURCE, source=None, now=0.0, chunk_bytes=size, memory=dict(memory))
        for name in "ab":
            session.join(name, (), 0.0)
        for chunk in range(500):
            session.hold(chunk, None, duty=False, now=0.0)
        counts.append(sum(map(len, seeds(session, "ab", 0.0).values())))
    assert counts[0] >= 4 * counts[1] > 0


def handed_out(session: Session, peers: str) -> tuple[Counter[str], Counter[int]]:
    """Chunks that leave at once with a duty, by peer, and copies of each that leave without one."""
    seeded: Counter[str] = Counter()
    copies: Counter[int] = Counter()
    order = list(peers)
    while (found := session.next(order, 0.0)) is not None:
        peer, chunk, duty = found
        if duty:
            seeded[peer] += 1
        else:
            copies[chunk] += 1
        order.remove(peer)
        order.append(peer)
    return seeded, copies


def with_uplink(uplink: float, chunks: int, *, known: str = "abcd", peers: str = "abcd", pace: float = 64 * 8192.0) -> Session:
    """Peers of whom each brings `pace` bytes/s to the others, and a source of whose uplink so much is known."""
    memory = {peer: Remembered(1.2 * pace, pace) for peer in known}
    session = Session(me=SOURCE, source=None, now=0.0, chunk_bytes=8192, memory=memory)
    session.uplink = uplink
    for peer in peers:
        session.join(peer, (), 0.0)
    session.close(chunks)
    for chunk in range(chunks):
        session.hold(chunk, None, duty=False, now=0.0)
    return session


def test_of_a_version_that_is_soon_everywhere_the_source_brings_its_own_share_from_the_start() -> None:
    """60 chunks to 4 peers are 240 copies; the source sends 576 a second and the peers 64 each: 0.29 s. Of 3 copies for each
    chunk a peer does 6 chunks in that time, and the rest is the source's. As much as one peer's channel takes leaves at once."""
    seeded, copies = handed_out(with_uplink(576 * 8192.0, 60), "abcd")
    assert set(seeded) == set("abcd") and all(5 <= n <= 7 for n in seeded.values())
    assert sum(copies.values()) == 4 * len(copies) == 4 * (60 - sum(seeded.values())), "each chunk is handed out in one way"


@pytest.mark.parametrize(
    "session",
    [
        with_uplink(0.0, 60),
        with_uplink(576 * 8192.0, 60, known="abc"),
        with_uplink(64 * 8192.0, 60),
    ],
    ids=["an uplink that is not known", "a peer that is not known", "an uplink that is the bound"],
)
def test_otherwise_every_chunk_is_handed_out_once(session) -> None:
    seeded, copies = handed_out(session, "abcd")
    assert sum(seeded.values()) >= 4 * 4 and not copies


def test_many_idle_peers_are_given_a_chunk_each_of_a_very_small_version() -> None:
    """14 chunks to 32 peers are 448 copies, of which the source sends 305 a second: 1.5 s. A peer brings one to all in 0.2 s."""
    names = [f"p{i}" for i in range(32)]
    memory = {peer: Remembered(1.2 * 153 * 8192, 153 * 8192.0) for peer in names}
    session = Session(me=SOURCE, source=None, now=0.0, chunk_bytes=8192, memory=memory)
    session.uplink = 305 * 8192.0
    for peer in names:
        session.join(peer, (), 0.0)
    session.close(14)
    for chunk in range(14):
        session.hold(chunk, None, duty=False, now=0.0)
    seeded: Counter[str] = Counter()
    while (found := session.next(names, 0.0)) is not None and found[2]:
        seeded[found[0]] += 1
    assert 11 <= len(seeded) == sum(seeded.values()), "the source is as fast for the last of them"


def test_a_peer_that_relays_nothing_need_not_be_known_and_a_bound_counts_more_than_a_pace() -> None:
    session = with_uplink(576 * 8192.0, 60, known="abc")
    session._bounds = {"d": 0.0, "a": 8 * 8192.0}  # private: as its owner says over the wire
    seeded, copies = handed_out(session, "abcd")
    assert copies and "d" not in seeded and seeded["a"] <= 1 < 4 <= seeded["b"]


def test_who_takes_nothing_any_more_does_not_hold_up_what_the_others_get() -> None:
    """d is not ready: four of the source's own copies wait for it, and then the others get the rest to distribute."""
    session = with_uplink(576 * 8192.0, 60)
    seeded, copies = handed_out(session, "abc")
    assert OWN_WAITING <= len(copies) <= OWN_WAITING + 1 and sum(seeded.values()) + len(copies) == 60


def test_a_source_whose_uplink_is_the_bound_sends_no_copy_however_short_the_version() -> None:
    seeded, copies = handed_out(with_uplink(64 * 8192.0, 3, pace=640 * 8192.0), "abcd")
    assert sum(seeded.values()) == 3 and not copies


def test_a_pace_is_what_comes_after_the_first_copy_and_remembers_the_best() -> None:
    d = Distributor(8192, 0.0)
    for n in range(11):
        assert not d.copied(5.0 + n / 40)
    d.out.clear()
    assert d.measure_pace() and d.pace == pytest.approx(40)
    for n in range(11):
        d.copied(9.0 + n / 20)
    assert d.pace == pytest.approx(40 - 20 / SLOWER), "slower once may be for want of work"
    for n in range(LEAST_COPIES):
        d.copied(20.0 + n / 1000)
    assert not d.measure_pace(), "too few to tell"
    assert Distributor(4096, 0.0, Remembered(1.0, 8192.0)).pace == 2.0, "kept in bytes"


@pytest.mark.parametrize("lies", [True, False])
def test_a_peer_that_has_everything_does_not_end_seeding(lies) -> None:
    sim = Sim(1, 200)
    sim.add(SOURCE, 0.01)
    for i in range(4):
        sim.add(f"p{i}", 0.005)
    sim.add("whole", 0.005, withholds=lies, holds=range(200))
    sim.at(0.06, lambda: sim.make(0.0) if not sim.sealed else None)
    sim.run(60)
    assert sim.finished
    assert sum(sim.peers[SOURCE].sent.values()) <= 1.3 * 200


def test_nothing_that_a_lying_receiver_says_keeps_others_from_finishing() -> None:
    """It announces what it lacks, takes it back by asking for it, announces again: counts of copies go wrong, no more."""
    for seed in range(6):
        sim = Sim(seed, 120)
        sim.add(SOURCE, 0.01)
        for i in range(3):
            sim.add(f"p{i}", 0.008)
        liar = sim.add("liar", 0.01, withholds=True)

        def lie(sim: Sim = sim, liar=liar, step: int = 0) -> None:
            for other in sim.others("liar"):
                chunks = [sim.random.randrange(120) for _ in range(20)]
                if sim.random.random() < 0.5:
                    sim.message("liar", other.name, lambda to, c=tuple(chunks): to.session.peer_has("liar", c, sim.now))
                else:
                    sim.message("liar", other.name, lambda to, c=tuple(chunks): to.session.peer_wants("liar", c, sim.now))
            sim.at(sim.now + 0.05, lie)

        sim.make(0.005)
        sim.at(0.01, lie)
        honest = [p for p in sim.peers.values() if p is not liar]
        for until in range(1, 60):
            sim.run(float(until))
            if all(p.session.complete for p in honest):
                break
        assert all(p.session.complete for p in honest), f"seed {seed}"
        assert sim.now < 20, f"seed {seed}: {sim.now:.1f} s"


def test_a_version_that_is_over_soon_leaves_the_source_once() -> None:
    """The learner's egress costs money: what its distributors pass on within a moment is not sent twice to save some of it."""
    session = Session(me="source", source=None, now=0.0)
    for peer in ("a", "b", "c"):
        session.join(peer, (), 0.0)
    for chunk in range(3):
        session.hold(chunk, None, duty=False, now=0.0)
    session.close(3)
    handed = [session.next(["a", "b", "c"], 0.01 * i) for i in range(20)]
    assert sorted(h[1] for h in handed if h is not None) == [0, 1, 2]
    session.tick(5.0)
    assert session.next(["a", "b", "c"], 5.0) is not None  # but nobody waits for ever


def test_a_neighbour_that_takes_no_part_yet_uses_nothing_up() -> None:
    """An anchor is offered before anybody takes part: what the source would hand out itself must still be there then."""
    session = Session(me=SOURCE, source=None, now=0.0)
    session.learn(range(4), 0.0)
    for chunk in range(4):
        session.hold(chunk, None, duty=False, now=0.0)
    session.close(4)
    for now in (0.0, 1.0, 2.0):
        session.tick(now)
        assert session.next(["a", "b"], now) is None
    session.join("a", (), 2.0)
    assert [session.next(["a", "b"], 2.0) for _ in range(4)] == [("a", chunk, True) for chunk in range(4)]


def test_what_a_peer_has_by_now_does_not_count_as_waiting_for_it() -> None:
    session = source("ab", 6)
    queues = Queues(session)
    for chunk in range(6):
        queues.add("a", chunk)
    queues.add("b", 0)
    for chunk in (4, 1):
        session.peer_has("a", [chunk], 0.0)
        queues.settle("a", chunk)
        queues.settle("a", chunk)
    assert queues.longest() == 4
    assert [queues.next("a") for _ in range(5)] == [*(Push("a", chunk, 0) for chunk in (0, 2, 3, 5)), None]
    queues.settle("b", 0)
    assert queues.longest() == 0 and queues.next("b") is None


@pytest.mark.parametrize(("pace", "taken"), [(1000.0, ["a"]), (2.0, []), (0.0, [])])
def test_what_a_slow_distributor_is_at_is_taken_over_by_a_source_that_is_through_with_it_much_sooner(
    monkeypatch, pace: float, taken: list[str]
) -> None:
    """One chunk is out at a, which is known to bring one copy a second to somebody; nothing else is to do. `pace`: of the
    source, in chunks a second; 0 for unknown."""
    # The source helps from the start: the rule itself is looked at.
    monkeypatch.setattr("p2p.broadcast.policies.seeding.HELP_AFTER_S", 0.0)
    session = source("abc", 1)
    unit = session.chunk_bytes
    session.pace = pace * unit
    assert seeds(session, "a", 0.0) == {"a": [0]}
    policy = session._policy  # its windows are not in the view that it has of the session
    assert isinstance(policy, Seeding)
    policy._peers["a"].rate = 1.0  # the same
    session.peer_has("a", [0], 0.1)
    found = session.next(["a", "b", "c"], 0.2)
    assert [peer for peer, _ in session.relieved()] == taken
    assert (found is not None and found[0] in "bc") == bool(taken)


@pytest.mark.parametrize("withheld", [False, True])
def test_what_only_a_slow_receiver_lacks_is_not_taken_over(monkeypatch, withheld: bool) -> None:
    """It lacks what several distributors have everywhere else, in their channels to it. Sent by the source as well it came there
    twice, over the link that all wait for. Who lacks what one of them has is `withheld` from, and helped as ever."""
    # The source helps from the start: the rule itself is looked at.
    monkeypatch.setattr("p2p.broadcast.policies.seeding.HELP_AFTER_S", 0.0)
    peers = "abcdefgh"
    session = source(peers, 2)
    handed = [session.next([peer], 0.0) for peer in "ab"]
    assert handed == [Push("a", 0, EVERYWHERE), Push("b", 1, EVERYWHERE)]
    session.pace = 1000.0 * session.chunk_bytes
    policy = session._policy  # its windows are not in the view that it has of the session
    assert isinstance(policy, Seeding)
    for peer in peers:
        session.peer_has(peer, [0] * (peer not in "gh") + [1] * (peer not in "gh" or withheld), 0.1)
    session.tick(0.15)
    for name in "ab":
        policy._peers[name].rate = 0.1  # the same
    found = session.next([*peers], 0.2)
    if withheld:
        assert session.relieved() == [("a", 0)] and found is not None and found[0] in "gh"
        return
    assert found is None and not session.relieved(), "g and h wait for a and b"
    session.leave("f", 0.25)
    session.leave("h", 0.25)
    assert session.next([*"abcdeg"], 0.25) is None and not session.relieved(), "g waits, and h is gone before the next look"
    session.join("h", [], 0.3)
    session.tick(OVERDUE_S + 10.0)
    assert sorted(session.relieved()) == [("a", 0), ("b", 1)], "not for ever"
    assert sorted(session.next([*peers], OVERDUE_S + 10.0)[0] for _ in range(4)) == ["g", "g", "h", "h"]


def test_a_chunk_is_nearly_everywhere_among_those_that_count() -> None:
    """With many strangers in the session it was at its first copy: then every peer lacks what distributors "brought nearly
    everywhere", all count as slow, and nothing is taken over."""
    session = Session(me=SOURCE, source=None, now=0.0, entrusts=lambda peer: peer.isalpha())
    for peer in "abcd12345678":
        session.join(peer, (), 0.0)
    for chunk in range(2):
        session.hold(chunk, None, duty=False, now=0.0)
    session.close(2)
    session.tick(0.0)
    assert session.next(["a"], 0.0) == Push("a", 0, EVERYWHERE)
    policy = session._policy  # what counts as spread is not in the view that it has of the session
    assert isinstance(policy, Seeding)
    for peer, spread in ("a", False), ("b", False), ("c", True):
        session.peer_has(peer, [0], 0.1)
        assert policy._out[0].spread == spread  # the same
    session.join("e", (), 0.2)
    session.leave("b", 0.2)
    session.leave("1", 0.2)
    assert policy._counting == 4 and policy._out[0].lacking == 2  # the same


def test_who_lacks_what_some_of_the_distributors_brought_is_not_slow() -> None:
    """What the others brought may be everywhere by now: two that withhold from one peer were all that was left to go by."""
    brought = Distributor(1000, 0.0, took_s=0.5)
    out = {chunk: Out(to, 0.0, 1, 1, spread=True) for chunk, to in enumerate("ab")}
    peers = {name: brought for name in "abcd"} | {"victim": Distributor(1000, 0.0)}

    def lacks(peer: str, chunk: int) -> bool:
        return peer == "victim"

    assert not slow_receivers(out, peers, lacks)
    assert slow_receivers(out, {name: peers[name] for name in ("a", "b", "c", "victim")}, lacks) == {"victim"}
    assert not slow_receivers({0: out[0]}, peers, lacks), "of one alone nothing is known"
