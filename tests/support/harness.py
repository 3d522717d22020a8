"""A whole swarm in one process on a mock clock: a head that publishes, and real agents over the memory switch.

The head is a Swarm and a Publisher, as the learner's head has them, without trainer and rollouts; the agents
are the real ones, over the scripted engine. Files are real, time is not.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import trio

from learner.client.messages import Begin, SealVersion, SegmentDone
from learner.publish.publisher import Published, Publisher
from node.agent import Agent, NodeSettings
from node.engine.fake import ScriptedCore, ScriptedSettings
from node.install.base_model import BaseModel
from node.lives import Lives
from p2p.allowance.hours import LocalTime
from p2p.allowance.keeper import AllowanceKeeper, OthersLook, local_time
from p2p.allowance.limits import NO_LIMITS, HostLimits
from p2p.allowance.meter import HostMeter
from p2p.broadcast.peer_groups import MESH
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import KIB, MIB
from p2p.membership.admission import make_ticket
from p2p.membership.links import Link
from p2p.protocol.generation import Assign, GenerateRequest, NodeStatus, Rejected, Tokens
from p2p.protocol.join import Bye
from p2p.protocol.rollout import Completion, Generate
from p2p.protocol.versions import Catalog, Installed, Report
from p2p.swarm import SourceRole, Swarm, SwarmOwner
from p2p.version import Version
from p2p.weights.encode import encode_version
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkStore
from tests.support.inline_engine import InlineEngine, open_inline_engine
from tests.support.memory_network import MemoryNetwork, MemorySwitch
from tests.support.nightly import NIGHTLY

RUN = "run-under-test"
WALL = 1_800_000_000.0
SEGMENT, CHUNK = 64 * KIB, 8 * KIB
LAYOUT = Layout.build([("embed", "float32", (64, 512)), ("head", "bfloat16", (64, 1024)), ("norm", "float32", (96,))])


def identity(number: int) -> Identity:
    """The same keys in every test run, so that who dials whom is too."""
    return Identity.from_seed(bytes([number]) * 32)


async def inline(fn: Callable, *args: object) -> object:
    await trio.lowlevel.checkpoint()
    return fn(*args)


def make_state(seed: int) -> FlatState:
    """A whole state of LAYOUT with random bits."""
    rng = np.random.default_rng(seed)
    state = FlatState.in_memory(LAYOUT)
    for spec in LAYOUT.tensors:
        words = state.tensor(spec.name)
        words[...] = rng.integers(0, np.iinfo(words.dtype).max, size=words.shape, dtype=words.dtype, endpoint=True)
    return state


def changed_state(old: FlatState, seed: int, share: float = 0.3) -> FlatState:
    """`old` with a share of its words changed."""
    rng = np.random.default_rng(seed)
    state = FlatState.in_memory(LAYOUT)
    for spec in LAYOUT.tensors:
        words = state.tensor(spec.name)
        words[...] = old.tensor(spec.name)
        hit = rng.random(words.shape) < share
        words[hit] = rng.integers(0, np.iinfo(words.dtype).max, size=words.shape, dtype=words.dtype)[hit]
    return state


class HeadUnderTest(SwarmOwner):
    """One epoch of a head: everybody who connects is told the roster and the catalog."""

    def __init__(self, network: MemoryNetwork, who: Identity, directory: Path, epoch: int, mesh: int = MESH) -> None:
        self.identity, self.epoch, self.directory, self.network = who, epoch, directory, network
        directory.mkdir(parents=True, exist_ok=True)
        self.store = ChunkStore(directory / "chunks")
        self.swarm = Swarm(network, who, self.store, SourceRole(RUN, epoch, mesh), self, name="learner", wall=wall)
        self.links = self.swarm.links
        self.publisher = Publisher(
            who, RUN, directory, self.swarm, epoch=epoch, segment_bytes=SEGMENT, chunk_bytes=CHUNK,
            now=trio.current_time, wall=wall,
        )  # fmt: skip
        (directory / "layout").write_bytes(msgpack.packb(LAYOUT.to_wire()))
        self.status: dict[str, NodeStatus] = {}
        self.installed: dict[str, dict[Version, Installed]] = {}
        self.reports: list[tuple[str, Report]] = []
        self.refusals: list[Refusal] = []
        self.rejected: list[Rejected] = []
        self.byes: list[tuple[str, Bye]] = []
        self.completions: dict[str, Completion] = {}
        self.changed = trio.Event()

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        await self.swarm.run(task_status=task_status)

    async def on_up(self, link: Link) -> None:
        self._wake()

    async def on_down(self, link: Link, reason: str) -> None:
        self._wake()

    def on_refusal(self, peer: str, refusal: Refusal) -> None:
        self.refusals.append(refusal.at(peer=peer))

    def catalog(self) -> Catalog | None:
        return self.publisher.catalog()

    async def on_message(self, link: Link, message: object) -> None:
        match message:
            case NodeStatus():
                self.status[link.peer] = message
            case Installed():
                self.installed.setdefault(link.peer, {})[message.version] = message
            case Report():
                self.reports.append((link.peer, message))
            case Rejected():
                self.rejected.append(message)
            case Bye():
                self.byes.append((link.peer, message))
                if not message.draining:
                    link.post(Bye("everything of yours is here", done=False))
            case Tokens():
                for run in message.runs:
                    self.completions.setdefault(run.request_id, Completion()).add(run)
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    # --- publishing ---

    def publish(
        self, step: int, new: FlatState, *, base: int | None = None, old: FlatState | None = None, cumulative: bool = False
    ) -> Published:
        """A whole version at once: an anchor, or with `base` and `old` a delta, or a cumulative one."""
        begin = Begin(step, "anchor" if base is None else "delta", base, "layout")
        if cumulative:
            assert old is not None
            begin = msgspec.structs.replace(begin, kind="cumulative", base_epoch=self.epoch, base_digest=old.digest())
        begun = self.publisher.begin(begin)
        mid, chunk_bytes = begun.mid, begun.chunk_bytes
        for done in encode_version(new, old, self.store, segment_bytes=SEGMENT, chunk_bytes=chunk_bytes):
            joined = b"".join(done.digests)
            self.publisher.segment(SegmentDone(mid, done.index, done.size, joined, done.changed, done.words))
        published = self.publisher.seal(SealVersion(mid, b"".join(new.tensor_digests()), new.digest(), 0.0))
        if base is None:
            for link in self.links.values():
                self.swarm.send_catalog(link)
        return published

    def sent(self, published: Published) -> int:
        return self.swarm.transfers[published.mid].traffic.sent

    def ask(
        self, peer: str, name: str, tokens: int = 20, min_version: Version = Version(0, 0), exact: Version | None = None,
        prefix: tuple[int, ...] = (), finish_s: float = 0.0,
    ) -> None:  # fmt: skip
        request = Generate(name, (1, 2, 3), tokens, (), 7, min_version, prefix_ids=prefix, exact_version=exact)
        self.links[peer].post(Assign((GenerateRequest.of(request),), finish_s))

    async def until(self, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait, in virtual time, for what the messages bring."""
        with trio.fail_after(seconds):
            while not ready():
                with trio.move_on_after(0.5):
                    await self.changed.wait()

    async def until_installed(self, peers: Iterable[str], version: Version, seconds: float = 60.0) -> None:
        wanted = list(peers)
        await self.until(lambda: all(version in self.installed.get(p, {}) for p in wanted), seconds)


class _WallClock:
    """Seconds since 1970, as all hosts of a swarm under test have them."""

    ahead_s = 0.0
    """seconds that passed at once: an hour of a whole swarm on the mock clock takes half a minute"""

    def __call__(self) -> float:
        return WALL + trio.current_time() + self.ahead_s


wall = _WallClock()


async def hours_pass(seconds: float, waited: float) -> None:
    """For what goes by the date alone: of so many seconds the swarm lives through the last few, and nightly through all."""
    if not NIGHTLY:
        wall.ahead_s += seconds - waited
    await trio.sleep(seconds if NIGHTLY else waited)


@dataclass
class NodeUnderTest:
    agent: Agent
    identity: Identity
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    engine: InlineEngine | None = None
    lives: Lives | None = None
    keeper: AllowanceKeeper | None = None

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    def traffic(self, published: Published):
        return self.agent.swarm.transfers[published.mid].traffic


class SwarmUnderTest:
    """The switch, the head and the nodes of one test."""

    def __init__(self, switch: MemorySwitch, directory: Path, nursery: trio.Nursery) -> None:
        self.switch, self.directory, self._nursery = switch, directory, nursery
        self.head_identity = identity(200)
        self.ticket = make_ticket(self.head_identity, RUN, (f"/memory/{self.head_identity.peer_id}",))
        self.nodes: list[NodeUnderTest] = []
        self._head_scope = trio.CancelScope()
        self.head: HeadUnderTest

    async def start_head(self, epoch: int = 1, *, descriptor: bool = True, mesh: int = MESH) -> HeadUnderTest:
        """A new head process: what the one before held is gone."""
        await trio.sleep(1)  # a mock clock starts at 0, which the publisher takes for "not yet"
        started = trio.Event()
        self._head_scope = scope = trio.CancelScope()

        async def live() -> None:
            with scope:
                async with self.switch.network(self.head_identity.peer_id) as network:
                    head = HeadUnderTest(network, self.head_identity, self.directory / f"head-{epoch}", epoch, mesh)
                    self.head = head
                    async with trio.open_nursery() as nursery:
                        await nursery.start(head.run)
                        if descriptor:
                            head.publisher.offer_descriptor(msgpack.packb({"config.json": b"{}" + b" " * 5000}))
                        started.set()

        self._nursery.start_soon(live)
        await started.wait()
        return self.head

    async def kill_head(self) -> None:
        self.switch.kill(self.head_identity.peer_id)
        self._head_scope.cancel()
        while self.switch.host(self.head_identity.peer_id) is not None:
            await trio.sleep(0.1)

    async def start_node(
        self, number: int, *, dialable: bool = True, store_limit: int = 64 * MIB, core: ScriptedCore | None = None,
        site: str = "", base_model: BaseModel | None = None, limits: HostLimits = NO_LIMITS,
        clock: Callable[[float], LocalTime] = local_time, sampler: Callable[[HostMeter], OthersLook] | None = None,
    ) -> NodeUnderTest:  # fmt: skip
        """`limits`: what its owner allows; `clock` and `sampler` as of `AllowanceKeeper`."""
        who = identity(number)
        made = trio.Event()
        out: list[NodeUnderTest] = []

        async def live() -> None:
            scope = trio.CancelScope()
            directory = self.directory / f"node-{number}"
            directory.mkdir(parents=True, exist_ok=True)
            keeper = AllowanceKeeper(limits, directory, wall=wall, clock=clock, sampler=sampler)
            lives = Lives(keeper)

            @asynccontextmanager
            async def new_agent() -> AsyncIterator[Agent]:
                async with self.switch.network(who.peer_id, reachable=dialable, meter=keeper.meter) as network:
                    settings = NodeSettings(
                        ticket=self.ticket, directory=self.directory / f"node-{number}", name=f"n{number}", capacity=4,
                        store_limit=store_limit, dialable=dialable, site=site, base_model=base_model,
                    )  # fmt: skip
                    scripted = core or ScriptedCore(ScriptedSettings())

                    @asynccontextmanager
                    async def engine() -> AsyncIterator[InlineEngine]:
                        async with open_inline_engine(scripted, step_s=0.05) as made_engine:
                            out[0].engine = made_engine
                            yield made_engine

                    agent = Agent(settings, who, network, engine, allowance=keeper, wall=wall, in_thread=inline)
                    if out:
                        out[0].agent = agent
                    else:
                        out.append(NodeUnderTest(agent, who, scope, lives=lives, keeper=keeper))
                        made.set()
                    yield agent

            with scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(keeper.run)
                    await lives.run(new_agent)
                    nursery.cancel_scope.cancel()

        self._nursery.start_soon(live)
        await made.wait()
        self.nodes.append(out[0])
        return out[0]

    async def start_nodes(self, count: int, **settings) -> list[NodeUnderTest]:
        """`count` nodes, all of them linked to the head and to each other."""
        nodes = [await self.start_node(i + 1, **settings) for i in range(count)]
        await self.meshed(nodes)
        return nodes

    async def meshed(self, nodes: Sequence[NodeUnderTest]) -> None:
        names = {n.peer for n in nodes} | {self.head_identity.peer_id}
        await self.head.until(lambda: all(set(n.agent.swarm.links) >= names - {n.peer} for n in nodes))

    async def kill(self, node: NodeUnderTest) -> None:
        """As SIGKILL: no goodbye."""
        self.switch.kill(node.peer)
        node.scope.cancel()
        while self.switch.host(node.peer) is not None:
            await trio.sleep(0.1)

    async def peer(self, number: int, *, reachable: bool = True) -> MemoryNetwork:
        """A bare host, for peers that do not behave."""
        out: list[MemoryNetwork] = []
        made = trio.Event()

        async def live() -> None:
            async with self.switch.network(identity(number).peer_id, reachable=reachable) as network:
                out.append(network)
                made.set()
                await trio.sleep_forever()

        self._nursery.start_soon(live)
        await made.wait()
        return out[0]


@asynccontextmanager
async def open_swarm(directory: Path, *, latency: float = 0.01, rate: float = 10 * MIB) -> AsyncIterator[SwarmUnderTest]:
    logging.getLogger("shoal").setLevel(logging.INFO)
    wall.ahead_s = 0.0
    async with trio.open_nursery() as nursery:
        try:
            yield SwarmUnderTest(MemorySwitch(latency=latency, rate=rate), directory, nursery)
        finally:
            nursery.cancel_scope.cancel()
