"""What `shoal doctor` finds out over real connections: which address answers, what the learner sees, whose clock is off."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from node.doctor.reach import dial_all, examine_reach
from p2p.channel.libp2p import open_libp2p_network
from p2p.findings import DoctorFinding
from p2p.identity import Identity
from p2p.membership.admission import Ticket, make_ticket
from p2p.swarm import SourceRole, Swarm, SwarmOwner
from p2p.weights.store import ChunkStore
from tests.support.watchdog import patience

pytestmark = pytest.mark.e2e

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NOBODY = "/ip4/127.0.0.1/tcp/1"


@asynccontextmanager
async def open_head(folder: Path, *, run: str = "00aa", ahead_s: float = 0.0, expires: int = 0) -> AsyncIterator[Ticket]:
    """A head of run 00aa, whose clock is `ahead_s` seconds ahead; a ticket of `run`, with an address where nobody
    is before its own."""
    me = Identity.generate()
    with patience():
        async with open_libp2p_network(me, LOOPBACK) as network, trio.open_nursery() as nursery:
            swarm = Swarm(network, me, ChunkStore(folder / "chunks"), SourceRole("00aa", epoch=1), SwarmOwner(), name="head",
                          wall=lambda: time.time() + ahead_s)  # fmt: skip
            await nursery.start(swarm.run)
            nobody = f"{NOBODY}/p2p/{me.peer_id}"
            yield make_ticket(me, run, (nobody, *network.addresses), expires)
            assert not swarm.links, "the doctor joins nothing"
            nursery.cancel_scope.cancel()


def by_name(findings: list[DoctorFinding]) -> dict[str, DoctorFinding]:
    return {finding.what: finding for finding in findings}


async def test_each_address_is_told_by_itself(tmp_path: Path) -> None:
    async with open_head(tmp_path) as ticket:
        nobody, head = await dial_all(ticket)
        assert not nobody.reached and nobody.why == "Connection refused"
        assert head.reached and head.why == "" and head.seen.startswith("/ip4/127.0.0.1/tcp/")
        found = by_name(await examine_reach(LOOPBACK, ticket))
    assert found["learner"].state == "ok" and "127.0.0.1:1 does not: Connection refused" in found["learner"].said
    assert " answers in " in found["learner"].said
    assert found["learner's clock"].state == "ok"
    assert found["seen as"].state == "ok" and "on this machine" in found["seen as"].said
    assert found["port"].state == "warning" and "from this machine only" in found["port"].said


async def test_a_clock_that_is_off(tmp_path: Path) -> None:
    async with open_head(tmp_path, ahead_s=3600.0) as ticket:
        hour = by_name(await examine_reach((), ticket))["learner's clock"]
    assert hour.state == "warning" and "behind it" in hour.said
    async with open_head(tmp_path, ahead_s=-3 * 86400.0) as ticket:
        days = by_name(await examine_reach((), ticket))["learner's clock"]
    assert days.state == "wrong" and "ahead of it" in days.said


async def test_a_learner_that_refuses(tmp_path: Path) -> None:
    async with open_head(tmp_path, run="00bb") as ticket:
        found = by_name(await examine_reach((), ticket))
    assert found["learner"].state == "wrong" and "it wants run 00bb, this is run 00aa" in found["learner"].said
    async with open_head(tmp_path, expires=1) as ticket:
        found = by_name(await examine_reach((), ticket))
    assert found["ticket"].state == "wrong" and found["learner"].state == "wrong" and "fresh" in found["learner"].todo


async def test_nobody_there_and_a_port_in_use(tmp_path: Path) -> None:
    head = Identity.generate()
    with patience():
        async with open_libp2p_network(Identity.generate(), LOOPBACK) as taken:
            listen = [taken.addresses[0].split("/p2p/")[0]]
            found = by_name(await examine_reach(listen, make_ticket(head, "00aa", (f"{NOBODY}/p2p/{head.peer_id}",))))
    assert found["learner"].state == "wrong" and "own machine only" in found["learner"].todo
    assert found["port"].state == "wrong" and "in use" in found["port"].said
