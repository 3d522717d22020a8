"""What was right in an epoch that is over, said again to a head that was started anew: memberships, tokens, statuses. And readers
who never read: what a head keeps for them."""

from __future__ import annotations

import pytest
import trio

from p2p.membership.admission import Membership, sign_membership
from p2p.protocol.generation import NodeStatus, Rejected, Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.versions import GetCatalog, GetParts, Subscribe, Want
from p2p.version import Version
from tests.attacks.strangers import Stranger, frame, steps_made
from tests.attacks.test_doors import alone_and_under
from tests.support.harness import RUN, WALL, wall
from tests.support.nightly import HOW_MANY
from tests.swarm.test_head import HEAD, Node, check_books, installed, open_head

MANY_STRANGERS = pytest.mark.parametrize("count", HOW_MANY)


def proof_of(epoch: int, who: Stranger) -> bytes:
    """As a head of that epoch signed it."""
    return sign_membership(HEAD, Membership(RUN, epoch, who.who.peer_id, int(WALL + 1e6)))


@MANY_STRANGERS
async def test_an_epoch_that_is_over_said_again(tmp_path, autojump_clock, count: int) -> None:
    """All that a node of epoch 1 said and was given, from peers that were members then, while epoch 3 runs."""
    said: list[bytes] = []

    async def recorded(node: Node, request) -> None:
        start = len(request.prefix_ids) // 4
        tokens = Tokens((TokenEvent.of(request.request_id, start, (1, 0), [-1.0, -1.0], node.version, "stop"),))
        said.append(frame(tokens))
        await trio.sleep(0.05)
        await node.say(tokens)

    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        assert bench.head.epoch == 1
        await bench.join(recorded)
        await bench.batch(0, 60)
        old = [*said, frame(installed(Version(1, 0))), frame(Rejected("0.0.0", Version(1, 0), "no", False))]
        status = frame(NodeStatus(True, Version(1, 0), 0, 0, 64, 0, 0.0, 1, 1))
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        alone = await steps_made(bench, 10, bench.version.step)
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        assert bench.head.epoch == 3
        first = bench.version.step
        there = [Stranger(bench, 3000 + i) for i in range(count)]  # let in by the head of today
        gone = [Stranger(bench, 4000 + i) for i in range(count)]  # with a membership of two epochs ago
        for one in gone:
            one.proof = proof_of(1, one)
        for one in there + gone:
            bench.nursery.start_soon(one.attack, [*old, status], 0.05 * count)
        await trio.sleep(1)
        under = await steps_made(bench, 10, first)
        await trio.sleep(30)
        assert under <= alone / 0.7, f"{under:.2f} s, {alone:.2f} alone"
        assert sum(s.said for s in there) > 0  # the head knows its own signature; nodes take that of the last two epochs alone
        made = bench.head.rollouts.collector.tokens_by_node
        assert not any(made.get(s.who.peer_id) for s in there + gone)
        assert not any(bench.head.trust.standing.of(s.who.peer_id).delivered for s in there + gone)
        check_books(bench.head)


@MANY_STRANGERS
async def test_readers_who_never_read(tmp_path, autojump_clock, count: int) -> None:
    """They ask for all that there is, and take nothing of it: what waits for them is bounded, and nobody waits with them."""
    async with open_head(tmp_path / "look", standing={}, wall=wall) as bench:
        mids = list(bench.head.swarm.transfers)
    asks = [frame(GetCatalog()), frame(GetParts(b"unknown")), *(frame(Subscribe(m, b"")) for m in mids)]
    asks += [frame(Want(m, (0, 1, 2))) for m in mids] + [frame(GetParts(m)) for m in mids] * 8

    class Deaf(Stranger):
        async def _link(self, *link) -> None:
            way = HEAD.peer_id, self.who.peer_id
            self.bench.switch.stall(*way)
            try:
                await super()._link(*link)  # of the tests' own class
            finally:
                self.bench.switch.resume(*way)

    queued: list[int] = []

    async def look(bench) -> None:
        while True:
            queued.append(sum(link.queued for link in bench.head.swarm.links.values()))
            await trio.sleep(0.1)

    async with open_head(tmp_path / "alone", standing={}, wall=wall) as bench:
        alone = await steps_made(bench, 10)
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        there = [Deaf(bench, 5000 + i) for i in range(count)]
        for one in there:
            bench.nursery.start_soon(one.attack, asks, 0.01 * min(count, 8))  # less often nothing would wait
        bench.nursery.start_soon(look, bench)
        await trio.sleep(5)
        under = await steps_made(bench, 10)
        await trio.sleep(30)
        assert sum(s.said for s in there) > 1000 and under <= alone / 0.7
        assert max(queued) > 0
        assert max(queued) <= 5 * (1 << 20) * count + (1 << 20), max(queued)
        print(f"{count} readers who never read: {max(queued)} bytes waited for them at most")
        check_books(bench.head)


@pytest.mark.parametrize("count", HOW_MANY)
async def test_floods_of_old_statuses(tmp_path, autojump_clock, count: int) -> None:
    """A status of an epoch that is over, as fast as it is read: no node is made ready by it."""
    status = frame(NodeStatus(True, Version(0, 7), 0, 0, 64, 0, 0.0, 1, 1))
    attacked = await alone_and_under(tmp_path, count, lambda i: [status], 0.005)
    assert attacked.under <= attacked.alone / 0.7
    assert not any(attacked.head.rollouts.load(s.who.peer_id) for s in attacked.there)


