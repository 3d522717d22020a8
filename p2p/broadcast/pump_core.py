"""Which chunk leaves next, to whom, and when: the rule that nodes, the head, the simulator and the tests share. Pure.

A chunk is chosen when one can leave, never before: what waits in a queue was chosen on older news. Older versions come first,
since later deltas build on them. Must not know clocks, channels or stores: times are passed in, and a shell carries out what is
chosen (`pump`, or the simulator's).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf

from p2p.broadcast.transfer import MEASURED_S, Job, Neighbour, Transfer, batches
from p2p.broadcast.uplink import Uplink
from p2p.protocol.versions import Have, Parts, Relieve

LONGEST_PAUSE_S = 0.05
"""Seconds after which the pace is looked at again at the latest: it may have risen meanwhile."""

OUTSIDE = 8
"""Of so many chunks that leave, one is for strangers if they lack any, and as many as nobody else can take."""

SHORTEST_PAUSE_S = 0.001
"""Seconds. A shorter wait is not worth a timer; the uplink's account carries it over to the next chunk."""


class PumpCore:
    """`transfers`: the transfers here, by manifest id; they change under the pump."""

    def __init__(self, transfers: Mapping[bytes, Transfer]) -> None:
        self._transfers = transfers
        self.uplink = Uplink()
        self._sent_inside = 0
        """chunks that left since the last that left for a stranger"""
        self._expected: Callable[[], Uplink] = Uplink
        self.sent = 0
        """payload bytes of chunks that left, over all manifests"""
        self.closed = False
        """no chunk leaves, whoever asks"""
        self.order: OrderedDict[str, Neighbour] = OrderedDict()
        """neighbours, the one served longest ago first"""

    def enter(self, peer: Neighbour) -> None:
        """Hand chunks to `peer` from now on."""
        self.order[peer.name] = peer
        self.wake()

    def drop(self, peer: Neighbour) -> None:
        """`peer` is gone: no further chunk goes to it."""
        peer.gone = True
        if self.order.get(peer.name) is peer:
            del self.order[peer.name]

    def bound(self, rate: float | None) -> None:
        """Chunks leave at `rate` bytes/s at most from now on; None: as fast as the uplink carries them, 0: not at all."""
        self.closed, cap = rate == 0, rate or inf
        if cap > 2 * self.uplink.cap:  # what was delivered under the old bound says little about the uplink
            self.uplink = self._expected()
        self.uplink.cap = cap
        self.wake()

    def expect(self, rate: float, *, told: bool) -> None:
        """What the uplink carries, in bytes/s, as far as is known before anything left: told, or remembered of an earlier run."""
        cap = self.uplink.cap
        self._expected = partial(Uplink, rate) if told else partial(Uplink, remembered=rate)
        self.uplink = self._expected()
        self.uplink.cap = cap

    def pause(self, now: float) -> float:
        """Seconds to wait before a chunk may leave and `next` is worth asking; 0 for none."""
        if self.closed:
            return LONGEST_PAUSE_S
        pause = self.uplink.wait(now)
        return min(pause, LONGEST_PAUSE_S) if pause > SHORTEST_PAUSE_S else 0.0

    def next(self, now: float) -> Neighbour | None:
        """The neighbour that gets the next chunk, which is its `job` now; None when there is nothing to hand out."""
        free = [name for name, peer in self.order.items() if peer.job is None]
        ready = [name for name in free if self.order[name].may_take(now)]
        transfers = list(self._transfers.values()) if ready else []
        if len(transfers) > 1:
            transfers.sort(key=lambda t: t.manifest.version)
        for transfer, able in self._in_turn(transfers, ready, now):
            found = transfer.session.next(able, now)
            if found is None:
                continue
            self._sent_inside = 0 if found.peer in transfer.session.outside else self._sent_inside + 1
            transfer.draws.handed(found.peer, transfer.manifest.chunk_size(found.chunk), transfer.manifest.size, now)
            peer = self.order[found.peer]
            peer.job = Job(transfer, found.chunk, found.duty)
            peer.served_at, peer.measured_until = now, now + MEASURED_S
            self.order.move_to_end(found.peer)
            peer.takes.charge(now, transfer.manifest.chunk_size(found.chunk))
            self.uplink.spent(now, transfer.manifest.chunk_size(found.chunk))
            for relieved in transfer.session.relieved():
                if relieved.peer in self.order:
                    self.order[relieved.peer].post(Relieve(transfer.manifest.mid, (relieved.chunk,)))
            return peer
        # When more than half of the channels have no room our uplink is full; a few may be slow at their other end.
        if 2 * len(free) >= len(self.order):
            self.uplink.idle(now)
        return None

    def _in_turn(
        self, transfers: Sequence[Transfer], ready: list[str], now: float
    ) -> Iterable[tuple[Transfer, list[str]]]:
        """Whom to serve of which version, in order. Of all versions those first who are no strangers."""
        strangers_turn = self._sent_inside >= OUTSIDE - 1
        later = []
        for transfer in transfers:
            able, outside = transfer.draws.able(ready, now), transfer.session.outside
            if not outside:
                inside, strange = able, []
            else:
                inside, strange = [p for p in able if p not in outside], [p for p in able if p in outside]
            now_served, then_served = (strange, inside) if strangers_turn else (inside, strange)
            if then_served:
                later.append((transfer, then_served))
            if now_served:
                yield transfer, now_served
        yield from later

    def ahead(self, peer: Neighbour, job: Job) -> list[Parts | Have]:
        """What leaves ahead of this chunk on the same channel: the manifest's parts by which `peer` can prove what it gets (its
        segment's record, and the header before the first record), and what is new here. It counts as sent."""
        manifest = job.transfer.manifest
        mid, segment = manifest.mid, manifest.segment_of(job.chunk)
        out: list[Parts | Have] = []
        if (mid, segment) not in peer.parts_sent and segment is not None:
            parts = [manifest.part(of) for of in (-1, segment) if (mid, of) not in peer.parts_sent]
            peer.parts_sent |= {(mid, -1), (mid, segment)}
            out += [Parts(mid, batch) for batch in batches(parts)]
        if news := job.transfer.news.beside_chunk(peer.name, job.transfer.session):
            out.append(Have(mid, tuple(news)))
        return out

    def count_sent(self, job: Job) -> None:
        """The job's chunk is in its channel."""
        nbytes = job.transfer.manifest.chunk_size(job.chunk)
        job.transfer.traffic.sent += nbytes
        self.sent += nbytes

    # --- the shell's part --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something may have become possible: a chunk, a want, room at a neighbour."""
        raise NotImplementedError

    def measure(self) -> None:
        """Look at what the channels delivered, and tell the uplink; called some 20 times a second."""
        raise NotImplementedError

    def keep(self, digest: bytes, data: bytes) -> None:
        """`data` was verified just now and may be relayed soon."""

