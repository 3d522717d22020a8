"""The largest legal message of each kind that a stranger may send, and what it costs the loop of whoever reads it: 50 ms of a
core at the most. Processor seconds are counted, the least of a few tries; twice the bound is allowed for slow machines where a
message takes most of it. `test_each_message.py` has every kind; here are those that need a large version or many requests."""

from __future__ import annotations

import typing
from collections.abc import Callable
from time import process_time

import pytest
import trio

from p2p.broadcast.session import Session
from p2p.broadcast.transfer import bitmap
from p2p.errors import Refusal
from p2p.limits import MAX_FRAME
from p2p.protocol.generation import NodeStatus, Tokens
from p2p.protocol.messages import decode
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.versions import Have, Parts, Subscribe
from p2p.protocol.wire import FEW, MANY, encode
from p2p.version import Version
from tests.swarm.test_head import open_head, silent

BOUND_S = 0.05
SLOW = 2.0
"""How much slower than a machine of today this one may be, for messages that take more than half of the bound there: the most
runs of tokens take 39 ms, and 3 to be read."""

FROM_THE_HEAD = {"Assign", "Abort", "Interrupt", "Catalog", "Roster", "Grouping", "Relieve", "Renewal", "Activate", "Welcome"}
"""Messages that are refused, as a whole, from anyone else."""


def cost(what: Callable[[], object], tries: int = 3) -> float:
    """Processor seconds."""
    took = []
    for _ in range(tries):
        began = process_time()
        what()
        took.append(process_time() - began)
    return min(took)


def test_every_list_that_a_stranger_may_send_is_bounded_by_what_an_entry_costs() -> None:
    """A new message with a list needs a bound of its own: MANY, FEW, or a reason to stand here."""
    for kind in decode.kinds.values():
        for field, hint in typing.get_type_hints(kind, include_extras=True).items():
            inner = typing.get_args(hint)
            if inner and typing.get_origin(inner[0]) is tuple and kind.__name__ not in FROM_THE_HEAD:
                longest = next(m.max_length for m in hint.__metadata__)
                # A hello is read within GREETING_WINDOW, and the gate counts its addresses before it looks at one.
                assert longest <= MANY or (kind.__name__, field) == ("Hello", "addresses"), (kind.__name__, field)


def test_reading_the_longest_lists() -> None:
    runs = tuple(TokenEvent.of(f"{i}.0.0", 0, (1,), [-1.0], Version(1, 1)) for i in range(MANY))
    for message in (Tokens(runs), Have(b"m" * 16, tuple(range(MANY))), Parts(b"m" * 16, (bytes(4000),) * FEW)):
        data = encode(message)
        assert len(data) <= MAX_FRAME and cost(lambda data=data: decode(data)) < BOUND_S


async def test_the_most_runs_of_tokens(tmp_path, autojump_clock) -> None:
    """As many one-token runs as a message holds, every one of them good."""
    async with open_head(tmp_path / "run", max_new_tokens=100_000) as bench:
        node = await bench.join(silent, capacity=4)
        await trio.sleep(5)
        rollouts, each = bench.head.rollouts, MANY // len(node.requests)
        messages = []
        for start in range(0, 3 * each, each):
            messages.append(Tokens(tuple(
                TokenEvent.of(r.request_id, start + i, (1,), [-1.0], bench.version) for r in node.requests for i in range(each)
            )))  # fmt: skip
        taken = []
        assert cost(lambda: taken.append(rollouts.on_tokens(node.peer, messages.pop(0)))) < SLOW * BOUND_S
        assert taken == [each * len(node.requests)] * 3 and taken[0] > 0.9 * MANY


async def test_the_most_runs_that_bring_nothing(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(silent, capacity=4)
        await trio.sleep(5)
        empty = Tokens(tuple(TokenEvent.of(node.requests[0].request_id, 0, (), [], bench.version) for _ in range(MANY)))

        def refused() -> None:
            with pytest.raises(Refusal, match=r"bring nothing|never made|not with this node"):
                bench.head.rollouts.on_tokens(node.peer, empty)

        assert cost(refused, 1) < BOUND_S
        assert bench.head.rollouts.load(node.peer) == 0  # what it held goes to others


@pytest.mark.parametrize("source", [True, False])
def test_the_longest_announcement(source: bool) -> None:
    """8,192 chunks of 400,000, spread over all of them; some peers in the session."""
    total, now = 400_000, 0.0
    session = Session(me="me", source=None if source else "head", now=now)
    for peer in ("head", "a", "b", "c", "d"):
        session.join(peer, (), now)
    if source:
        for chunk in range(total):
            session.hold(chunk, None, duty=0, now=now)
    else:
        session.learn(range(total), now)
    batches = [tuple(range(first, total, total // MANY))[:MANY] for first in range(3)]
    assert cost(lambda: session.peer_has("a", batches.pop(0), now)) < BOUND_S


async def test_the_longest_bitmap_lets_others_in_between(tmp_path, autojump_clock) -> None:
    """A bitmap of all chunks of a large version is heard in pieces."""
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(silent)
        exchange = bench.head.swarm.exchange
        transfer = next(iter(exchange.transfers.values()))

        calls = []

        class Wide:
            """The same manifest, of a version with a million chunks."""

            max_chunks = 1 << 20

            def __getattr__(self, name: str) -> object:
                return getattr(manifest, name)

        manifest, transfer.manifest = transfer.manifest, Wide()  # type: ignore[assignment]
        transfer.session.peer_has = lambda peer, chunks, now: calls.append(len(chunks))  # type: ignore[assignment,method-assign]
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        message = Subscribe(manifest.mid, bitmap(set(range(1 << 17))))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            await exchange.handle(node.peer, message)
            nursery.cancel_scope.cancel()
        assert calls == [MANY] * 16 and turns >= 15
        transfer.manifest = manifest


async def test_a_status_of_the_largest_numbers(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(silent)
        most = (1 << 64) - 1
        await node.say(NodeStatus(True, bench.version, most, most, most, most, 1e308, most, most, False, most, most))
        await trio.sleep(1)
        assert not node.closed and bench.head.status()["nodes"]
