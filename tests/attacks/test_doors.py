"""What strangers send to a live head, with 1, 8 and 60 of them: the run goes on, links of honest nodes stay, and what is kept,
written and answered is bounded. The findings were F2, F5, F6, M2 and M3 of the review of commit 1832404."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

import pytest
import trio

from learner.head.head import Head
from p2p.channel.port import BULK, CONTROL
from p2p.channel.visits import HELLO_EACH_S, HELLOS, LINK_EACH_S, SHORT_LINKS
from p2p.complaints import ALL_PER_S, FIRST_OF_ALL
from p2p.errors import ChannelClosed, Refusal, Unreachable
from p2p.identity import Identity
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import Membership, make_ticket, sign_membership
from p2p.membership.banlist import BAN_S
from p2p.membership.gate import VISITOR
from p2p.membership.matchmaking import MAX_PAIRS
from p2p.membership.pairs import LinkBook
from p2p.membership.texts import MAX_WHY
from p2p.protocol.generation import NodeStatus, Tokens
from p2p.protocol.join import Hello, Rejection, Welcome
from p2p.protocol.reach import Linked, LinkKinds, Whereabouts
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.versions import GetCatalog, GetParts, Have, Report, Subscribe, Want
from p2p.protocol.wire import MANY, MAX_LINE, encode_struct
from p2p.version import Version
from tests.attacks.strangers import Stranger, frame, steps_made
from tests.support.harness import RUN, WALL, wall
from tests.support.memory_network import MemoryNetwork
from tests.support.nightly import HOW_MANY
from tests.support.rogue import greet, hello
from tests.swarm.test_head import HEAD, Bench, open_head

MANY_STRANGERS = pytest.mark.parametrize("count", HOW_MANY)
V1 = Version(1, 0)


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger="shoal")


def strangers(bench: Bench, count: int, frames, pause_s: float = 0.0, **more) -> list[Stranger]:
    """So many of them, at work from now on. Tests have to end, so sixty are not sixty times one: each waits `count` times
    `pause_s` between two messages, so that all together say as many a second as one alone would; and unless said, 0.15 s between
    two links with 1 and 8, 1.05 s with 60, so that all together come as often as eight do. Where a test divides what is in a
    message by `count` as well, one of sixty sends a 3,600th of the bytes that one alone does (bench/attacks.md)."""
    more.setdefault("again_s", 0.15 * max(1, count // 8))
    pause_s *= count
    found = [Stranger(bench, 1000 + i) for i in range(count)]
    for i, one in enumerate(found):
        bench.nursery.start_soon(lambda one=one, i=i: one.attack(frames(i), pause_s, **more))
    return found


def runs(first: int, count: int, request: str = "9{i}.0.0") -> Tokens:
    return Tokens(tuple(TokenEvent.of(request.format(i=i), 0, (1,), [-1.0], V1) for i in range(first, first + count)))


class Attacked(NamedTuple):
    """Seconds for ten steps without and with strangers at the door, and what became of both."""

    alone: float
    under: float
    head: Head
    there: list[Stranger]
    status: str


async def alone_and_under(path, count: int, frames, pause_s: float = 0.0, **more) -> Attacked:
    """Ten steps of each."""
    async with open_head(path / "alone", standing={}, wall=wall) as bench:
        alone = await steps_made(bench, 10)
    async with open_head(path / "run", standing={}, wall=wall) as bench:
        there = strangers(bench, count, frames, pause_s, **more)
        await trio.sleep(1)
        under = await steps_made(bench, 10)
        return Attacked(alone, under, bench.head, there, json.dumps(bench.head.status()))


@MANY_STRANGERS
async def test_messages_of_refused_runs(tmp_path, autojump_clock, caplog, count: int) -> None:
    """F2: the first run that is refused ends its message, and such messages end the link and keep the peer away."""
    attacked = await alone_and_under(tmp_path, count, lambda i: [frame(runs(10_000 * i, MANY // count))], 0.02)
    alone, under, head, there, _ = attacked
    assert under <= alone / 0.7
    assert head.refusals <= 70 * sum(s.admitted for s in there)
    assert all(s.admitted <= 3 and s.said <= 3 * 100 for s in there)
    assert sum(len(r.getMessage()) for r in caplog.records) < 1_000_000


@MANY_STRANGERS
@pytest.mark.parametrize("what", ["lengths", "runs", "have", "want", "junk"])
async def test_what_no_honest_node_says_costs_the_link_at_once(tmp_path, autojump_clock, count: int, what: str) -> None:
    """F2 and F6: it took 38 links in 6 s."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        mid = next(iter(bench.head.swarm.transfers))
        illegal = {
            "lengths": encode_struct(["tokens", [["r", 0, b"1234", b"", [1, 1], "", ""]] * (8000 // count)]),
            "runs": encode_struct(["tokens", [["r", 0, b"", b"", [1, 1], "", ""]] * (MANY + 1)]),
            "have": frame(Have(mid, (0,) * (MANY // count))),
            "want": frame(Want(mid, (0,) * 256)),
            "junk": b"\x93\xa4have",
        }[what]
        there = strangers(bench, count, lambda i: [illegal], 0.05)
        took = await steps_made(bench, 10)
        seconds, most = (100, 3) if what == "junk" and count == 1 else (20, 1)
        await trio.sleep(max(0.0, seconds - took))
        # At 0, 30 and 90 s, as the terms double: each time one message.
        assert all(1 <= s.admitted <= most for s in there) and bench.head.refusals <= most * count
        assert BAN_S[0] == 30.0 and took < 25


@MANY_STRANGERS
async def test_runs_that_bring_nothing_end_a_message(tmp_path, autojump_clock, count: int) -> None:
    """An honest node sends such runs when it loses a race: some are passed over without a word, thousands are not."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        await steps_made(bench, 2)
        few, many = runs(0, 200, "0.0.0"), runs(0, max(300, MANY // count), "0.0.0")
        before = bench.head.refusals
        honest = await bench.join()
        for _ in range(20):
            await honest.say(few)
        await trio.sleep(1)
        assert bench.head.refusals == before and not honest.closed
        there = strangers(bench, count, lambda i: [frame(many)], 0.05)
        await trio.sleep(20)
        assert bench.head.refusals > before and all(s.admitted <= 2 for s in there)


@MANY_STRANGERS
async def test_reports_and_names_do_not_fill_disk_or_status(tmp_path, autojump_clock, caplog, count: int) -> None:
    """F5: 151 MB of log in 7 s, and a status of 1.2 MB."""
    text = "x" * (MAX_LINE - 1)
    alone, under, head, there, status = await alone_and_under(
        tmp_path, count, lambda i: [frame(Report(f"{i}", V1, 0, text))], 0.005, stay_s=2.0
    )
    assert under <= alone / 0.7
    assert sum(s.said for s in there) > 500
    written = sum(len(r.getMessage()) for r in caplog.records if r.levelno >= logging.WARNING)
    assert written <= 800 * (FIRST_OF_ALL + 120 * ALL_PER_S)  # the limiter counts real seconds; it took fewer
    assert len(head.reports) <= 100 and all(len(r) <= 720 for r in head.reports)
    assert len(status) < 12_000 + 1_500 * (count + 3)


async def test_rows_of_a_thousand_identities_are_bounded(tmp_path, autojump_clock) -> None:
    """F5: 300 identities took the status from 6 to 218 kB."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        status = frame(NodeStatus(True, V1, 0, 0, 4, 0, 0.0, 1, 1))
        for i in range(20):  # fifty at once, one after the other
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    for j in range(50):
                        nursery.start_soon(Stranger(bench, 10_000 + 50 * i + j).attack, [status], 1.0)
                    await trio.sleep(1.0)
                    scope.cancel()
            await trio.sleep(0.5)
        await trio.sleep(5)
        assert len(bench.head.gone) == 256
        assert len(json.dumps(bench.head.status())) < 600_000


@MANY_STRANGERS
async def test_questions_are_answered_in_a_trickle(tmp_path, autojump_clock, count: int) -> None:
    """M2: 0.26 MB asked, 32.7 MB of answers."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        ask = [frame(GetCatalog()), frame(GetParts(b"unknown manifest"))]
        there = strangers(bench, count, lambda i: ask, 0.002)
        await trio.sleep(30)
        assert sum(s.said for s in there) > 5000
        assert all(s.heard_bytes < 1_500_000 for s in there)
        assert max(link.queued for link in bench.head.swarm.links.values()) < 1_000_000
        await steps_made(bench, 3)


@MANY_STRANGERS
async def test_words_about_links_cost_no_more_than_there_are_members(tmp_path, autojump_clock, monkeypatch, count: int) -> None:
    """8,192 rows a member were kept, duplicates with them, and walked through every half second and for each status."""
    heard: list[int] = []
    put = LinkBook.put

    def counted(book: LinkBook, peer: str, rows, known) -> bool:
        new = put(book, peer, rows, known)
        heard.append(len(book._said.get(peer, ())))  # what is kept has no other face
        return new

    monkeypatch.setattr(LinkBook, "put", counted)

    def frames(i: int) -> list[bytes]:
        def rows(kind: str) -> tuple[Linked, ...]:
            return tuple(Linked(peers[j % len(peers)], kind, "\x1b[2J" * 500 if j < 200 else "") for j in range(MANY // 8))

        peers = [Identity.from_seed(n.to_bytes(4, "big") * 8).peer_id for n in (1, 2, *range(1000, 1000 + count))]
        where = [frame(Whereabouts((f"/memory/x{j}",), (), "none")) for j in range(2)]
        return [frame(LinkKinds(rows("relayed"))), where[0], frame(LinkKinds(rows("met"))), where[1]]

    alone, under, _, _, status = await alone_and_under(tmp_path, count, frames, 0.05)
    assert under <= alone / 0.7
    assert len(heard) > 20 and max(heard) <= count + 2
    assert "\x1b" not in status and len(json.loads(status)["pairs"]) <= MAX_PAIRS
    assert all(len(pair["why"]) <= MAX_WHY for pair in json.loads(status)["pairs"])


@pytest.mark.parametrize("count", sorted({1, *HOW_MANY}))
async def test_who_comes_back_and_back_draws_a_few_states(tmp_path, autojump_clock, monkeypatch, count: int) -> None:
    """M3: one identity drew 12 whole states in 25 s, with 18 links. So many links are not to be had any more either."""
    monkeypatch.setattr("p2p.broadcast.draws.PASS_LEAST", 1024)  # the state here is a quarter of a MiB
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        transfer = next(t for t in bench.head.swarm.transfers.values() if t.manifest.header.kind == "anchor")
        mid, chunks, size = transfer.manifest.mid, transfer.manifest.max_chunks, transfer.manifest.size
        asks = [frame(Subscribe(mid, b"")), *(frame(Want(mid, (c,))) for c in range(chunks))]
        # As many as sixty stand in groups, are served after others and together, and wait longer for a state.
        there = strangers(bench, count, lambda i: asks, 0.01, stay_s=1.2 if count < 60 else 5.0)
        await trio.sleep(40)
        assert all(SHORT_LINKS <= s.admitted <= SHORT_LINKS + 40 / LINK_EACH_S + 1 for s in there)
        assert all(s.heard_bytes >= size for s in there), "a state that is asked for comes"
        allowed = 3.2 * size + (64 << 10) * max(s.admitted for s in there)
        assert all(s.heard_bytes <= allowed for s in there)
        await steps_made(bench, 3)


@pytest.mark.parametrize("kind_of_it", ["in memory", "mapped port", "met"])
async def test_a_link_that_takes_the_place_of_an_older_one_counts(
    tmp_path, autojump_clock, monkeypatch, kind_of_it: str
) -> None:
    """One identity had 1,034 links a minute, each of which tells all others of it."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        monkeypatch.setattr(bench.head.swarm.peering.dialler, "kind_of_arrival", lambda peer: kind_of_it)
        who, links = Stranger(bench, 1).who, 0
        proof = sign_membership(HEAD, Membership(RUN, bench.head.epoch, who.peer_id, int(WALL + 1e6)))
        async with bench.switch.network(who.peer_id) as network:
            with trio.move_on_after(60):
                while True:
                    try:
                        for kind in (CONTROL, BULK):
                            _, answer = await greet(network, HEAD.peer_id, hello(proof), kind)
                            links += kind == BULK and isinstance(answer, Welcome)
                    except (ChannelClosed, Unreachable):
                        pass
                    await trio.sleep(0.05)
        assert SHORT_LINKS <= links <= SHORT_LINKS + 60 / LINK_EACH_S + 1, links
        await steps_made(bench, 3)


@pytest.mark.parametrize("way", ["refused", "replaced", "no control"])
async def test_hellos_that_come_to_no_link_are_bounded(tmp_path, autojump_clock, monkeypatch, way: str) -> None:
    """However few connections they come over. Each costs the head the check of a signature."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        gate, checked = bench.head.swarm.peering.gate, 0
        admit = gate.admit

        def counted(peer, hello, now):
            nonlocal checked
            checked += peer == who.who.peer_id
            if way == "refused" and peer == who.who.peer_id:
                raise Refusal("come later", peer=peer)
            return admit(peer, hello, now)

        who, kind = Stranger(bench, 1), BULK if way == "no control" else CONTROL
        monkeypatch.setattr(gate, "admit", counted)
        proof = sign_membership(HEAD, Membership(RUN, bench.head.epoch, who.who.peer_id, int(WALL + 1e6)))

        async def insist() -> None:
            async with bench.switch.network(who.who.peer_id) as network:
                while True:
                    try:
                        channel, _ = await greet(network, HEAD.peer_id, hello(proof), kind)
                        if way != "replaced":
                            await channel.aclose("again")
                    except (ChannelClosed, Unreachable):
                        pass
                    await trio.sleep(0.01)

        bench.nursery.start_soon(insist)
        await trio.sleep(60)
        assert HELLOS <= checked <= HELLOS + 60 / HELLO_EACH_S + 1, checked
        await steps_made(bench, 3)


@pytest.mark.parametrize("way", ["link", "visit", "no bulk", "refused"])
async def test_only_a_link_makes_a_connection_one_of_a_peer(tmp_path, autojump_clock, monkeypatch, way: str) -> None:
    """Visits of the doctor kept an address's room for handshakes whole: one address could take all that the head does."""
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        admitted: list[str] = []
        monkeypatch.setattr(MemoryNetwork, "admitted", lambda _, channel: admitted.append(channel.peer))
        who = Stranger(bench, 1).who
        proof = sign_membership(HEAD, Membership(RUN, bench.head.epoch, who.peer_id, int(WALL + 1e6)))
        ticket = make_ticket(HEAD, RUN, ()).encode() if way == "visit" else ""
        agent = VISITOR if way == "visit" else "test"
        words = Hello(PROTOCOL_VERSION, RUN, ticket, b"" if way == "refused" else proof, (), "x", agent, "")
        async with bench.switch.network(who.peer_id) as network:
            for kind in (CONTROL, BULK) if way == "link" else (CONTROL,):
                _, answer = await greet(network, HEAD.peer_id, words, kind)
                assert isinstance(answer, Rejection if way == "refused" else Welcome)
            await trio.sleep(1.0)
        assert admitted == ([who.peer_id] if way == "link" else [])
