"""A thousand nodes in one process, for `shoal bench head`: real hosts, links and messages, no engines.

Run as `python -m netem.bench.head.simulated_nodes BENCH(JSON) TICKET BOARD ORIGIN` by `netem.bench.head.bench`, so that the
head's process is measured alone. A node here joins with the ticket, says its status, takes requests and streams tokens as an
agent does; its sequences decode in lockstep, and each draws its length when it begins. A token's id is the time at which it was
made (`stamp`), so that the head's side can tell how old a token is without another message.

Must not know the head's inside.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import trio

from netem.bench.head.board import TICKS_PER_S, Board, HeadBench, digest_path, stamp
from p2p.channel.libp2p import open_libp2p_network
from p2p.channel.port import BULK, CONTROL, Channel
from p2p.errors import ChannelClosed, ShoalError
from p2p.identity import Identity
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import Ticket, read_ticket
from p2p.membership.reachability import REDIAL_S
from p2p.protocol.generation import Abort, Assign, Interrupt, NodeStatus, Tokens
from p2p.protocol.join import Hello, Welcome
from p2p.protocol.messages import decode
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.versions import Installed
from p2p.protocol.wire import encode
from p2p.version import Version

STOP = 0
"""The id of the stop token."""

NO_VERSION = Version(0, 0)
"""The version of a node that has installed none."""

JOINING = 16
"""Nodes that shake hands at once."""

INSTALL_S = 2.0
"""A published version is in place on every node within so long."""

SPREAD = 0.75
"""Completions are between (1 - SPREAD) and (1 + SPREAD) times the mean, evenly."""

FLUSH_TOKENS = 16
"""With so many tokens of one sequence a node waits no longer for company, as an agent."""

HEARD = ("assign", "abort", "interrupt")
"""Tags of what the head says that a node here acts on."""

SLACK_S = 0.0005
"""What is due so soon is done now: a sleep for each of a thousand nodes would cost more than the nodes."""


@dataclass(slots=True)
class Sequence_:
    """One that a node decodes: `made` tokens, of which `sent` were sent; it ends at `length`."""

    request_id: str
    made: int
    sent: int
    length: int
    budget: int


@dataclass(eq=False)
class SimulatedNode:
    """One node's sequences. Steps are `period` apart; all running sequences make one token a step."""

    index: int
    capacity: int
    control: Channel
    phase: float
    running: dict[str, Sequence_] = field(default_factory=dict)
    waiting: deque[Sequence_] = field(default_factory=deque)
    unsent: deque[bytes] = field(default_factory=deque)
    """messages that the link did not take yet: the head is behind"""
    stepped: float = 0.0
    """time of the last step"""
    flush_at: float = math.inf
    scheduled: float = math.inf
    version: Version = NO_VERSION
    tokens: int = 0
    taken: int = 0
    """requests so far"""
    closed: str = ""

    def steps_left(self) -> int:
        return min(s.length - s.made for s in self.running.values())


class SimulatedNodes:
    """All nodes, and one task that does what is due for any of them."""

    def __init__(self, bench: HeadBench, ticket: str, board: str, origin: float) -> None:
        self.bench, self.ticket, self.board, self.origin = bench, ticket, Board(Path(board)), origin
        self._digest = digest_path(board)
        self._rng = random.Random(0)
        self._logprobs = -np.abs(np.random.default_rng(0).normal(0.5, 0.5, 1 << 16)).astype("<f4")
        self.nodes: list[SimulatedNode] = []
        self._due: list[tuple[float, int]] = []
        self._made = self._sent = self._messages = 0

    # --- decoding ----------------------------------------------------------------------------------------------------

    @property
    def period(self) -> float:
        return self.bench.sequences / self.bench.rate

    def take(self, node: SimulatedNode, message: Assign) -> None:
        """Begin what the head assigns to `node`, or let it wait for a free sequence."""
        for request in message.requests:
            prefix = len(request.prefix_ids) // 4
            share = self._rng.uniform(1 - SPREAD, 1 + SPREAD)
            if node.taken < node.capacity:
                share *= self._rng.random()
            node.taken += 1
            more = 1 + int(share * self.bench.length)
            length = min(prefix + more, request.max_new_tokens)
            node.waiting.append(Sequence_(request.request_id, prefix, prefix, length, request.max_new_tokens))
        if not node.running:
            node.stepped = time.monotonic()
        self._fill(node)
        self._schedule(node)

    def _fill(self, node: SimulatedNode) -> None:
        while node.waiting and len(node.running) < node.capacity:
            s = node.waiting.popleft()
            node.running[s.request_id] = s

    def _schedule(self, node: SimulatedNode) -> None:
        """When this node next has something to send: its flush, or its next end."""
        if not node.running:
            return
        now = node.stepped
        left = node.steps_left() if self.bench.flush_s else 1
        ends_at = now + left * self.period
        if node.flush_at == math.inf:
            node.flush_at = now + max(self.bench.flush_s, self.period)
        at = min(ends_at, node.flush_at)
        if at < node.scheduled - SLACK_S:
            node.scheduled = at
            heapq.heappush(self._due, (at, node.index))

    def _advance(self, node: SimulatedNode, now: float) -> None:
        """Every step up to `now`, and the message that is due."""
        period = self.period
        while node.running and now - node.stepped >= period - SLACK_S:
            steps = min(int((now - node.stepped + SLACK_S) / period), node.steps_left())
            node.stepped += steps * period
            ended = False
            for s in node.running.values():
                s.made += steps
                ended = ended or s.made >= s.length
            self._made += steps * len(node.running)
            if ended:
                self._flush(node, period)
                self._fill(node)
        longest = max((s.made - s.sent for s in node.running.values()), default=0)
        if now >= node.flush_at - SLACK_S or longest >= FLUSH_TOKENS:
            self._flush(node, period)

    def _flush(self, node: SimulatedNode, period: float) -> None:
        """Everything that was made and not sent, in one message."""
        runs = []
        for s in list(node.running.values()):
            if s.made == s.sent:
                continue
            finish = ""
            if s.made >= s.length:
                finish = "length" if s.length >= s.budget else "stop"
                del node.running[s.request_id]
            runs.append(self._event(node, s, period, finish))
        node.flush_at = math.inf
        if runs:
            self._post(node, Tokens(tuple(runs)))

    def _event(self, node: SimulatedNode, s: Sequence_, period: float, finish: str) -> TokenEvent:
        """What was made of a sequence and not sent."""
        count, last, step = s.made - s.sent, stamp(node.stepped, self.origin), period * TICKS_PER_S
        ids = [max(1, int(last - (count - 1 - i) * step)) for i in range(count)]
        if finish == "stop":
            ids[-1] = STOP
        at = self._rng.randrange(len(self._logprobs) - count)
        logprobs = self._logprobs[at : at + count].tobytes()
        packed = np.asarray(ids, "<u4").tobytes()
        event = TokenEvent(s.request_id, s.sent, packed, logprobs, node.version, finish=finish, message="")
        s.sent = s.made
        node.tokens += count
        self._sent += count
        return event

    def _post(self, node: SimulatedNode, message: object) -> None:
        self._messages += 1
        data = encode(message)
        if node.closed:
            return
        try:
            if node.unsent or not node.control.try_send(data):
                node.unsent.append(data)
        except ChannelClosed as closed:
            node.closed = str(closed)

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def decode(self) -> None:
        """For ever: what is due."""
        board, late, told = self.board, 0.0, 0.0
        for node in self.nodes:  # what came while others were still joining begins now
            node.stepped = time.monotonic()
        while True:
            now = time.monotonic()
            if board["phase"] == Board.STOP:
                return
            while self._due and self._due[0][0] <= now + SLACK_S:
                at, index = heapq.heappop(self._due)
                node = self.nodes[index]
                if at != node.scheduled:
                    continue
                node.scheduled = math.inf
                late = max(late, now - at)
                self._advance(node, now)
                self._schedule(node)
            board["made"], board["sent"], board["messages"] = self._made, self._sent, self._messages
            if now - told > 0.1:
                told = now
                board["busy"] = sum(len(n.running) for n in self.nodes)
                board["late_us"], board["cpu_us"] = int(late * 1e6), int(time.process_time() * 1e6)
                if gone := next((n for n in self.nodes if n.closed), None):
                    raise ShoalError(f"the link of node {gone.index} closed: {gone.closed}")
                late = 0.0
            await trio.sleep(min(0.02, max(0.002, self._due[0][0] - now)) if self._due else 0.02)

    async def resend(self) -> None:
        """What links did not take at once, in order."""
        while True:
            await trio.sleep(0.02)
            for node in self.nodes:
                try:
                    while node.unsent and node.control.try_send(node.unsent[0]):
                        node.unsent.popleft()
                except ChannelClosed as closed:
                    node.closed = str(closed)

    async def hear(self, node: SimulatedNode) -> None:
        """Requests. Whatever else the head says is not for this twin, and is not even decoded."""
        try:
            while True:
                data = await node.control.receive()
                tag = msgpack.Unpacker()
                tag.feed(data[:32])
                if tag.read_array_header() and (kind := tag.unpack()) in HEARD:
                    message = decode(data)
                    if isinstance(message, Assign):
                        self.take(node, message)
                    elif isinstance(message, Abort):
                        self._forget(node, message.request_ids)
                    elif isinstance(message, Interrupt):
                        self._give_back(node, message.request_ids)
                elif kind == "bye":
                    return
        except ChannelClosed as closed:
            node.closed = str(closed)

    def _give_back(self, node: SimulatedNode, request_ids: Sequence[str]) -> None:
        """As an agent does: what was made of these, and an end that says so."""
        asked = [s for s in (*node.running.values(), *node.waiting) if s.request_id in request_ids]
        if asked:
            self._post(node, Tokens(tuple(self._event(node, s, self.period, "interrupt") for s in asked)))
            self._forget(node, request_ids)

    def _forget(self, node: SimulatedNode, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            node.running.pop(request_id, None)
        node.waiting = deque(s for s in node.waiting if s.request_id not in request_ids)
        self._fill(node)

    async def report(self, node: SimulatedNode) -> None:
        """Status once a second, ready when all have joined; a published version is in place soon after it is on the board."""
        await trio.sleep(node.phase)
        board, wanted, at = self.board, NO_VERSION, 0.0
        while True:
            current = Version(board["epoch"], board["step"])
            if current != wanted:
                wanted, at = current, time.monotonic() + self._rng.uniform(0.2, INSTALL_S)
            if node.version != wanted and time.monotonic() >= at:
                node.version = wanted
                digest = self._digest.read_bytes()
                times = {"pause_s": 0.01, "apply_s": 0.01, "transfer_s": 0.1}
                self._post(node, Installed(wanted, digest, **times, bytes_from_head=1000, bytes_from_peers=9000))
            running, waiting = len(node.running), len(node.waiting)
            rate = self.bench.rate * running / node.capacity
            ready = node.version.epoch > 0 and board["joined"] == self.bench.nodes
            self._post(node, NodeStatus(
                ready, node.version, running, waiting, capacity=node.capacity, tokens=node.tokens, tokens_per_s=rate, pid=1,
                rss_bytes=1 << 30,
            ))  # fmt: skip
            await trio.sleep(1.0)

    async def join(self, index: int, ticket: Ticket, gate: trio.CapacityLimiter) -> None:
        """One host for the length of the run."""
        identity = Identity.from_seed(b"node" + index.to_bytes(28, "little"))
        async with open_libp2p_network(identity, []) as network:
            async with gate:
                control, bulk = await self._link(network, ticket, index)
            node = SimulatedNode(index, self.bench.sequences, control, self._rng.uniform(0.0, 1.0))
            self.nodes[index] = node
            self.board["joined"] = self.board["joined"] + 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.hear, node)
                nursery.start_soon(self.report, node)
                await trio.sleep_forever()
            del bulk

    async def _link(self, network: Any, ticket: Ticket, index: int) -> list[Channel]:
        """Both channels; as an agent does, again after a while where the head was too busy."""
        for pause in REDIAL_S:
            try:
                return [await self._greet(network, kind, ticket, index) for kind in (CONTROL, BULK)]
            except ChannelClosed as closed:
                why = str(closed)
            await trio.sleep(pause)
        raise ShoalError(f"node {index} cannot reach the head: {why}")

    async def _greet(self, network: Any, kind: str, ticket: Ticket, index: int) -> Channel:
        channel: Channel = await network.open(ticket.head, list(ticket.addresses), kind)
        hello = Hello(
            PROTOCOL_VERSION, ticket.run, self.ticket, membership=b"", addresses=(), name=f"node-{index}", agent="bench",
            site="",
        )  # fmt: skip
        await channel.send(encode(hello))
        answer = decode(await channel.receive())
        if not isinstance(answer, Welcome):
            raise ShoalError(f"node {index} was refused: {answer}")
        return channel

    async def run(self) -> None:
        """Have all nodes join, and decode until the board says stop. ShoalError when a node cannot join or loses its link."""
        ticket = read_ticket(self.ticket)
        gate = trio.CapacityLimiter(JOINING)
        self.nodes = [None] * self.bench.nodes  # type: ignore[list-item]
        async with trio.open_nursery() as nursery:
            for index in range(self.bench.nodes):
                nursery.start_soon(self.join, index, ticket, gate)
            while self.board["joined"] < self.bench.nodes:  # noqa: ASYNC110
                await trio.sleep(0.05)
            nursery.start_soon(self.resend)
            await self.decode()
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()


def main(argv: list[str]) -> int:
    """Run all nodes; `argv` is [bench as JSON, the ticket's file, the board's file, the time from which stamps count]."""
    bench, ticket, board, origin = argv
    trio.run(SimulatedNodes(HeadBench(**json.loads(bench)), Path(ticket).read_text(), board, float(origin)).run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
