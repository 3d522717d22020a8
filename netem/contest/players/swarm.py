"""Shoal itself in a contest: real links, exchange and chunk store over libp2p, without learner, trainer and engine.

The source makes one random state after another and publishes each as a delta; a node decodes the segments as they come and
checks every tensor's digest and the state's against the seal. What a learner and a node do beyond that (signing rollouts,
an engine's commit) is not a broadcast's.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import psutil
import trio

from netem.contest.players import events
from netem.contest.players.payload import payload_blocks
from netem.contest.players.rogue import Conduct, RogueChannel
from p2p.broadcast.peer_groups import MESH, PeerPlaces
from p2p.broadcast.policies.registry import DEFAULT
from p2p.channel.libp2p import open_libp2p_network
from p2p.channel.listening import anywhere
from p2p.channel.port import Network
from p2p.codec import decode_segment, warm
from p2p.errors import Refusal, ShoalError
from p2p.identity import Identity
from p2p.ip import tcp_multiaddr
from p2p.layout import Layout, Segment
from p2p.limits import KIB, MIB
from p2p.membership.admission import make_ticket
from p2p.membership.links import Link
from p2p.protocol.versions import Catalog, CatalogEntry, Chunk, Report
from p2p.swarm import ROSTERS_S, FollowerRole, SourceRole, Swarm, SwarmOwner
from p2p.version import Version
from p2p.weights.encode import chunk_bytes_for, encode_version
from p2p.weights.manifest import CODEC, Header, Manifest, ManifestSigner
from p2p.weights.state import FlatState, state_digest
from p2p.weights.store import ChunkStore

RUN, PORT = "contest", 4001
SEGMENT = MIB - 8 * KIB
"""A mebibyte and its payload's first byte would be one chunk more, of one byte."""

TENSOR_WORDS = 2 * MIB
"""Of two bytes each: tensors of 4 MiB, about what a small model's are."""

IN_MEMORY = 256 * MIB
"""A larger state is mapped from a file, as a node's shadow is; a smaller one is spared the page faults."""

log = logging.getLogger("shoal.contest")


def key_of(name: str) -> Identity:
    """The same key for a host in every contest, so that who dials whom is too."""
    return Identity.from_seed(blake3.blake3(f"shoal contest {name}".encode()).digest())


def contest_layout(nbytes: int) -> Layout:
    """Tensors for a payload of `nbytes` bytes, TENSOR_WORDS each but the last."""
    words, tensors = nbytes // 2, []
    for i, start in enumerate(range(0, words, TENSOR_WORDS)):
        tensors.append((f"block.{i}.weight", "bfloat16", (min(TENSOR_WORDS, words - start),)))
    return Layout.build(tensors)


class CountingSwarm(Swarm):
    """Also counts which peer the payload came from."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.whence: dict[bytes, Counter[str]] = {}
        """manifest -> peer -> bytes of payload that came from it"""

    async def on_message(self, link: Link, message: object) -> None:
        """Also counts from whom each version's bytes came."""
        self._count(link, message)
        await super().on_message(link, message)

    def hear(self, link: Link, message: object) -> bool:
        """Also counts."""
        handled = super().hear(link, message)
        if handled:
            self._count(link, message)
        return handled

    def _count(self, link: Link, message: object) -> None:
        if isinstance(message, Chunk):
            self.whence.setdefault(message.mid, Counter())[link.peer] += len(message.data)


class ShoalPlayer(SwarmOwner):
    """One host's part."""

    def __init__(self, role: events.Role, network: Network) -> None:
        self.hosts, self.is_source, options = role.hosts, role.role == "source", role.options
        self.late = {*role.late} - {role.name}
        self.segment_bytes: int = options.get("segment_bytes", SEGMENT)
        self.head = key_of(role.source)
        address = f"{tcp_multiaddr(self.hosts[role.source], PORT)}/p2p/{self.head.peer_id}"
        self.directory = Path(role.directory)
        self.store = ChunkStore(self.directory / "chunks")
        part = SourceRole(RUN, epoch=1, mesh=options.get("mesh", MESH)) if self.is_source else FollowerRole(
            make_ticket(self.head, RUN, (address,)), site=role.site
        )  # fmt: skip
        policy = options.get("policy", DEFAULT)
        self.swarm = CountingSwarm(network, key_of(role.name), self.store, part, self, name=role.name, policy=policy)
        self.exchange = self.swarm.exchange
        self.exchange.on_header = lambda manifest: True
        self.places: PeerPlaces | None = None
        self.placed_at = 0.0
        self.states: dict[int, FlatState] = {}
        self.mids: dict[int, bytes] = {}
        self.cpu: dict[int, float] = {}
        self.reports: list[tuple[str, str]] = []
        """host that was refused something, and why: here, or (at the source) at a node that told it"""
        self.names = {key_of(name).peer_id: name for name in self.hosts}
        self.conduct = Conduct()
        self.nursery: trio.Nursery | None = None

    def say(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), flush=True)

    async def run(self) -> None:
        """Take part until cancelled, and obey the commands that come on stdin."""
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            await nursery.start(self.swarm.run)
            if not self.is_source:
                self.swarm.exchange.follow(True)
            nursery.start_soon(self._obey)

    async def _obey(self) -> None:
        self.say("ready")
        stdin = trio.lowlevel.FdStream(os.dup(0))
        rest = b""
        async for data in stdin:
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                await self._do(events.parse_command(line))
        os._exit(0)

    async def _do(self, command: events.Command) -> None:
        assert self.nursery is not None
        match command:
            case events.Links():
                while not self._linked():
                    await trio.sleep(0.02)  # a contest's start, not its course
                self.say("linked", links=len(self.swarm.links))
            case events.Prepare():
                self._prepare(command.round, command.bytes, command.seed)
            case events.Expect():
                self._begin(command.round)
                self.nursery.start_soon(self._receive, command.round, command.bytes)
                self.say("expecting", round=command.round)
            case events.Publish():
                self.nursery.start_soon(self._publish, command.round)
            case events.AskAccount():
                self._account(command.round)
            case events.TurnRogue():
                self.conduct.now = command.to
                self.say("turned", to=command.to)
            case events.EndPlayer():
                os._exit(0)

    def _linked(self) -> bool:
        """Whether the links are up that there are to be, but for those to the late: all, or a place's in the grid."""
        if self.places is not self.swarm.places:
            self.places, self.placed_at = self.swarm.places, trio.current_time()
        if self.places is None:
            dialler, others = self.swarm.peering.dialler, len(self.hosts) - 1 - len(self.late)
            if self.is_source or len(dialler.members) < others - 1:
                return len(self.swarm.links) >= others
            # Behind NAT some cannot be linked with: then all was tried.
            pursuits = dialler.pursuits
            return all(p in self.swarm.links or (p in pursuits and pursuits[p].settled) for p in dialler.members)
        wanted = self.places.groups.keys() - {self.swarm.me}
        return wanted <= self.swarm.links.keys() and trio.current_time() - self.placed_at > 2 * ROSTERS_S

    # --- one round ---------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        self.cpu[number] = sum(psutil.Process().cpu_times()[:2])
        for old in [n for n in self.mids if n < number]:
            self.swarm.whence.pop(self.mids[old], None)
            self.store.drop(self.swarm.forget(self.mids.pop(old)))

    def _state(self, number: int, layout: Layout) -> FlatState:
        """All zero; a file goes with the last view of it."""
        if layout.nbytes <= IN_MEMORY:
            return FlatState.in_memory(layout)
        path = self.directory / f"{number}.state"
        state = FlatState.create(path, layout)
        path.unlink()
        return state

    def _prepare(self, number: int, nbytes: int, seed: int) -> None:
        self._begin(number)
        state, digest, start = self._state(number, contest_layout(nbytes)), blake3.blake3(), 0
        for block in payload_blocks(nbytes, seed):
            state.bytes[start : start + len(block)] = np.frombuffer(block, np.uint8)
            digest.update(block)
            start += len(block)
        self.states[number] = state
        self.say("prepared", round=number, digest=digest.hexdigest())

    async def _publish(self, number: int) -> None:
        at = time.monotonic()
        state = self.states.pop(number)
        base = FlatState.in_memory(state.layout)  # never written, so it takes no memory
        chunk = chunk_bytes_for(state.layout.nbytes, nodes=len(self.swarm.links))
        now = int(time.time())
        header = Header(
            run=RUN, version=Version(1, number), kind="delta", base=Version(1, number - 1), base_digest=base.digest(),
            codec=CODEC, segment_bytes=self.segment_bytes, chunk_bytes=chunk, created=now, expires=now + 3600,
            layout=state.layout,
        )  # fmt: skip
        signer = ManifestSigner(self.head, header)
        self.mids[number] = signer.mid
        self.swarm.offer(signer.header_part, announce=True)
        size = 0
        encoded = encode_version(state, base, self.store, segment_bytes=self.segment_bytes, chunk_bytes=chunk)
        while (done := await trio.to_thread.run_sync(next, encoded, None)) is not None:
            for digest in done.digests:  # another thread wrote them past the store's own account
                self.store.has(digest)
            self.swarm.extend(signer.mid, signer.record(done.index, done.size, done.digests), announce=True)
            size += done.size
        digests = state.tensor_digests()
        self.swarm.extend(signer.mid, signer.seal(digests, state_digest(state.layout, digests)), announce=True)
        self.say("published", round=number, at=at, size=size, chunk_bytes=chunk, encoded=time.monotonic() - at)

    async def _receive(self, number: int, nbytes: int) -> None:
        try:
            manifest = await self._wait_for(number)
            layout = manifest.header.layout
            new, base = self._state(number, layout), FlatState.in_memory(layout)
            digests: list[bytes] = []

            def install(segment: Segment, payload: bytes) -> None:
                decode_segment(payload, base.words(segment), new.words(segment))
                while len(digests) < len(layout.tensors) and layout.tensors[len(digests)].stop <= segment.stop:
                    digests.append(new.tensor_digest(len(digests)))

            for segment in manifest.segments:
                payload = await self.exchange.segment(manifest.mid, segment.index)
                await trio.to_thread.run_sync(install, segment, payload)
            sealed = await self.exchange.sealed(manifest.mid)
            assert sealed.seal is not None
            if tuple(digests) != sealed.seal.tensor_digests or state_digest(layout, digests) != sealed.seal.state_digest:
                self.say("failed", why=f"round {number}: the state does not hash to its seal")
                return
            at = time.monotonic()
            digest = blake3.blake3(new.bytes[:nbytes].data).hexdigest()
            self.say("verified", round=number, at=at, digest=digest, **self._traffic(number))
        except ShoalError as error:
            self.say("failed", why=f"round {number}: {error}")

    async def _wait_for(self, number: int) -> Manifest:
        while True:
            for mid, transfer in self.swarm.transfers.items():
                if transfer.manifest.version == Version(1, number):
                    self.mids[number] = mid
                    return transfer.manifest
            await trio.sleep(0.005)

    def _traffic(self, number: int) -> dict[str, int]:
        transfer = self.swarm.transfers.get(self.mids.get(number, b""))
        if transfer is None:
            return {"sent": 0, "received": 0, "duplicates": 0, "from_source": 0}
        t = transfer.traffic
        return {
            "sent": t.sent, "received": t.from_head + t.from_peers + t.duplicates, "duplicates": t.duplicates,
            "from_source": t.from_head,
        }  # fmt: skip

    def _account(self, number: int) -> None:
        cpu = sum(psutil.Process().cpu_times()[:2]) - self.cpu.get(number, 0.0)
        banned = [n for peer, n in self.names.items() if self.swarm.peering.is_banned(peer) and peer not in self.swarm.links]
        came = self.swarm.whence.get(self.mids.get(number, b""), Counter())
        whence = {self.names.get(peer, peer): size for peer, size in came.items()}
        linked = {self.names.get(one.peer, one.peer): one.kind for one in self.swarm.peering.dialler.kinds()}
        why = {self.names.get(one.peer, one.peer): one.why for one in self.swarm.peering.dialler.kinds() if one.why}
        self.say(
            "account", round=number, cpu_s=cpu, reports=self.reports, banned=banned, whence=whence, linked=linked, why=why,
            **self._traffic(number),
        )  # fmt: skip

    # --- links -------------------------------------------------------------------------------------------------------

    async def on_up(self, link: Link) -> None:
        link.bulk = RogueChannel(link.bulk, self.conduct)

    def catalog(self) -> Catalog | None:
        """The latest round, for a late host or one that lost its link."""
        if not self.mids:
            return None
        number = max(self.mids)
        manifest = self.swarm.transfers[self.mids[number]].manifest
        header = manifest.header
        size = manifest.seal.size if manifest.seal is not None else 0
        entry = CatalogEntry(
            manifest.mid, "delta", header.version, base=header.base, base_digest=header.base_digest, state_digest=b"", size=size
        )
        return Catalog(Version(1, number - 1), (entry,))

    async def _catch_up(self, entry: CatalogEntry) -> None:
        """Take part in a manifest that was announced before this host was there."""
        if entry.mid not in self.swarm.transfers:
            self.exchange.ask_manifest(entry.mid, self.head.peer_id)
            await self.exchange.manifest(entry.mid)
            self.exchange.take(entry.mid, catching=entry.size > 0)

    async def on_down(self, link: Link, reason: str) -> None:
        log.info("link to %s is down: %s", link.name, reason)

    def on_refusal(self, peer: str, refusal: Refusal) -> None:
        self.reports.append((self.names.get(peer, peer), refusal.reason))

    async def on_message(self, link: Link, message: object) -> None:
        """What the swarm leaves to its owner: catalogs, and at the source reports of refusals."""
        match message:
            case Catalog():
                assert self.nursery is not None
                for entry in message.entries:
                    self.nursery.start_soon(self._catch_up, entry)
            case Report():
                self.on_refusal(message.peer, Refusal(message.reason))


async def play(role: events.Role) -> None:
    """Take part, until told to end."""
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    emulated = not ip_address(role.address).is_loopback
    behind = role.address not in own and emulated  # its router has it
    listen = [tcp_multiaddr(role.address, PORT)] if ":" in role.address or not emulated else anywhere(PORT)
    async with open_libp2p_network(
        key_of(role.name), listen, congestion=role.options.get("congestion", ""), map_port=behind and role.role == "node"
    ) as network:
        await ShoalPlayer(role, network).run()


if __name__ == "__main__":
    level = os.environ.get("SHOAL_LOG", "WARNING").upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%M:%S")
    warm()
    trio.run(play, events.Role.parse(sys.argv[1]))
