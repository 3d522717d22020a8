"""Messages through a profile's network, without packets: when each arrives if all connections share the links max-min
fairly. Pure: times are passed in, nothing is random. The network of the simulator.

Must not know what is in a message, or who decides to send it.

A connection (source, target) sends its messages one after another. A message is sent at the connection's rate, which
changes as others start and stop, and arrives as a whole the connection's one-way delay after its last bit was sent. Uplink
and downlink are used at the same time (a fluid without queues in the core); a profile's jitter, loss and queues do not
exist here unless they are asked for, nor does a TCP that would need time to find its rate. Hosts of one site use their LAN
links between them.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import ceil, hypot, inf
from random import Random
from typing import NamedTuple

from netem.networks.profile import Access, Host, Profile
from netem.simulator.fair_share import FairLink, Flow, Sharing
from netem.simulator.wire import PACKET_HEAD


class Arrival(NamedTuple):
    """A message that reached its target. A NamedTuple, since there are millions."""

    at: float
    source: str
    target: str
    tag: object
    size: int
    """bytes"""


class _Host:
    __slots__ = ("connections", "down", "gone", "lan_down", "lan_up", "spec", "up")

    def __init__(self, spec: Host, lan: Access) -> None:
        self.spec = spec
        self.up, self.down = FairLink(spec.access.up, sends=True), FairLink(spec.access.down, sends=False)
        self.lan_up, self.lan_down = FairLink(lan.up, sends=True), FairLink(lan.down, sends=False)
        """to and from hosts of its site; of no use to a host without one"""
        self.connections: dict[Connection, None] = {}
        """from here and to here"""
        self.gone = False


class Connection(Flow):
    """Messages from one host to another, in order."""

    __slots__ = ("delay", "in_order_at", "jitter", "loss", "queue", "queued", "small_at", "source", "target")

    def __init__(self, source: str, target: str, up: FairLink, down: FairLink, delay: float) -> None:
        super().__init__(up, down)
        self.source, self.target, self.delay = source, target, delay
        self.loss = self.jitter = 0.0
        self.in_order_at = self.small_at = 0.0
        """when the last of its messages arrives, and the last of its small ones"""
        self.queue: deque[tuple[int, object]] | tuple[()] = ()
        """(bytes, tag) of what is not sent whole; no deque before something waits, for an empty one takes 600 bytes"""
        self.queued = 0
        """bytes in `queue`"""


class FlowNetwork:
    """Times (seconds, from 0) may not fall from one call to the next. A simulator calls `advance` at every `next_at`, so that
    its hosts can answer in time; other calls let time pass as well, and what arrives meanwhile is kept for `advance`.

    With `packets`, the profile's jitter and loss count as far as they can without packets: what is lost takes its share of both
    links again, a message with a lost packet arrives a round trip later, and what comes after it on its connection waits for
    it, as for one that jitter delays. TCP itself does not slow down for a loss: so are BBR and a loss of a few percent.

    Whatever happens at one instant costs one recomputation of rates. The same profile and calls give the same results, bit
    for bit; of messages that arrive together, the one that was sent whole first comes first. KeyError for an unknown host,
    ValueError for a time that falls.
    """

    def __init__(self, profile: Profile, packets: Random | None = None) -> None:
        self.profile = profile
        self._packets = packets
        self.now = 0.0
        self.sharing = Sharing()
        self._hosts = {host.name: _Host(host, profile.sites.get(host.site, host.access)) for host in profile.hosts}
        self._connections: dict[tuple[str, str], Connection] = {}
        self._dues: list[tuple[float, int, FairLink]] = []
        """heap; stale where the time is not the link's `due`"""
        self._arrivals: list[tuple[float, int, Connection, object, int]] = []
        self._steps = deque(
            sorted(((s.at, h.name, s.up, s.down) for h in profile.hosts for s in h.trace), key=lambda step: step[0])
        )
        self._count = 0
        self._sent: dict[Connection, None] = {}
        self._take_steps()

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def next_at(self) -> float | None:
        """When `advance` has something to do again: something arrives, was sent whole, or a rate changes by a trace.
        Not before the last call; None when nothing of it ever will."""
        if not self.sharing.settled:
            self._settle()
        at = self._next_change()
        if self._arrivals and self._arrivals[0][0] < at:
            at = self._arrivals[0][0]
        return None if at == inf else max(at, self.now)

    def advance(self, now: float) -> list[Arrival]:
        """Let time pass; returns what arrived by `now`, in order."""
        self._pass(now)
        out: list[Arrival] = []
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] <= now:
            at, _, connection, tag, size = heappop(arrivals)
            out.append(Arrival(at, connection.source, connection.target, tag, size))
        return out

    def drain_sent(self) -> list[tuple[str, str]]:
        """Connections of which a message was sent whole since the last call, each once, in the order of the first: their
        senders may have the next one ready."""
        sent, self._sent = self._sent, {}
        return [(c.source, c.target) for c in sent]

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, now: float, source: str, target: str, size: int, tag: object = None) -> bool:
        """Queue a message of `size` bytes. False when either host was removed: the message is lost. ValueError for a size below 1
        and for a host that sends to itself."""
        connection = self._begin(now, source, target, size)
        if connection is None:
            return False
        if connection.loss:  # what is lost is sent once more, over both links
            size = ceil(size / (1 - connection.loss))
        queue = connection.queue = connection.queue or deque()
        queue.append((size, tag))
        connection.queued += size
        if len(queue) == 1:
            self.sharing.join(connection, 8.0 * size)
        return True

    def send_small(self, now: float, source: str, target: str, size: int, tag: object = None) -> None:
        """A control message: takes its connection's delay and no part in the sharing of links, and waits for nothing. It
        overtakes what was queued before, but no other small one. Lost without a word when either host was removed."""
        connection = self._begin(now, source, target, size)
        if connection is not None:
            self._arrive(now + connection.delay, connection, tag, size)

    def backlog(self, now: float, source: str, target: str) -> int:
        """Bytes queued from `source` to `target` and not sent yet, rounded up: 0 when everything was sent."""
        if now != self.now:
            self._pass(now)
        connection = self._connections.get((source, target))
        return 0 if connection is None else self._backlog(connection)

    def uplink_backlog(self, now: float, host: str) -> int:
        """`backlog` of all connections from `host`, those over its LAN as well. O(connections with a backlog)."""
        if now != self.now:
            self._pass(now)
        entry, total = self._hosts[host], 0
        for link in (entry.up, entry.lan_up):
            for flow in link.flows:
                total += self._backlog(flow)  # type: ignore[arg-type]  # flows are connections here
        return total

    def uplink_queue(self, now: float, host: str) -> int:
        """`uplink_backlog` of those connections only that the uplink itself holds up. What waits for a slow receiver waits in its
        connection, where nothing else waits behind it."""
        if now != self.now:
            self._pass(now)
        if not self.sharing.settled:
            self._settle()
        link, total = self._hosts[host].up, 0
        for flow in link.flows if link.level < inf else ():
            if flow.by is link:
                total += self._backlog(flow)  # type: ignore[arg-type]  # flows are connections here
        return total

    def rate(self, now: float, source: str, target: str) -> float:
        """Bit/s that the connection sends at from `now` on; 0 when it is idle."""
        self._pass(now)
        if not self.sharing.settled:
            self._settle()
        connection = self._connections.get((source, target))
        return 0.0 if connection is None else connection.rate

    # --- changes -----------------------------------------------------------------------------------------------------

    def set_rates(self, now: float, host: str, up: float, down: float) -> None:
        """The host's access link has these rates (bit/s) until they are set again, by a call or its trace. 0 is an outage.
        Its LAN links stay as they are."""
        self._pass(now)
        if not (0 <= up < inf and 0 <= down < inf):
            raise ValueError(f"rates {up}, {down}")
        self.sharing.change(self._hosts[host].up, up)
        self.sharing.change(self._hosts[host].down, down)

    def remove_host(self, now: float, host: str) -> None:
        """The host is gone with all its connections. What it had sent whole still arrives; what was on its way to it, or
        queued at either end, is lost, and so is what is sent from or to it from now on. O(messages under way)."""
        self._pass(now)
        entry = self._hosts[host]
        entry.gone = True
        for connection in entry.connections:
            if connection.queue:
                self.sharing.leave(connection)
            del self._connections[connection.source, connection.target]
            self._sent.pop(connection, None)
            other = connection.target if connection.source == host else connection.source
            del self._hosts[other].connections[connection]
        entry.connections = {}
        self._arrivals = [a for a in self._arrivals if a[2].target != host or a[0] < now]
        heapify(self._arrivals)

    def restore_host(self, now: float, host: str) -> None:
        """A removed host is back, with new connections. Nothing that was sent to it before arrives."""
        self._pass(now)
        self._hosts[host].gone = False

    # --- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, now: float, source: str, target: str, size: int) -> Connection | None:
        if now != self.now:
            self._pass(now)
        if size < 1:
            raise ValueError(f"a message of {size} bytes")
        connection = self._connections.get((source, target))
        if connection is not None:
            return connection
        a, b = self._hosts[source], self._hosts[target]
        if source == target:
            raise ValueError(f"{source} to itself")
        if a.gone or b.gone:
            return None
        lan = a.spec.site and a.spec.site == b.spec.site
        up, down = (a.lan_up, b.lan_down) if lan else (a.up, b.down)
        connection = self._connections[source, target] = Connection(source, target, up, down, self.profile.delay(a.spec, b.spec))
        if self._packets is not None and not lan:
            one, other = a.spec.access, b.spec.access
            connection.loss = 1 - (1 - one.loss) * (1 - other.loss)
            connection.jitter = hypot(one.jitter, other.jitter)
        a.connections[connection] = b.connections[connection] = None
        return connection

    def _backlog(self, connection: Connection) -> int:
        if not connection.queue:
            return 0
        return ceil(connection.queued - connection.queue[0][0] + connection.left(self.now) / 8)

    def _pass(self, now: float) -> None:
        """Everything up to `now`, `now` included. Rates that changed at `now` itself are worked out when time goes on."""
        if now < self.now:
            raise ValueError(f"time falls from {self.now} to {now}")
        while True:
            if now > self.now and not self.sharing.settled:
                self._settle()
            at = self._next_change()
            if at > now:
                break
            self.now = max(self.now, at)
            while self._next_change() <= self.now:
                if self._steps and self._steps[0][0] <= self.now:
                    self._take_steps()
                else:
                    self._reach(heappop(self._dues)[2])
        self.now = now

    def _next_change(self) -> float:
        dues = self._dues
        while dues and dues[0][0] != dues[0][2].due:
            heappop(dues)
        at = dues[0][0] if dues else inf
        return min(at, self._steps[0][0]) if self._steps else at

    def _take_steps(self) -> None:
        while self._steps and self._steps[0][0] <= self.now:
            _, name, up, down = self._steps.popleft()
            self.sharing.change(self._hosts[name].up, up)
            self.sharing.change(self._hosts[name].down, down)

    def _reach(self, link: FairLink) -> None:
        """The first flows bound by `link` are done now."""
        link.due = inf
        flow = link.first()
        if flow is None:
            return
        link.clock, link.since = flow.done, self.now
        while flow is not None and flow.done <= link.clock:
            self._finish(flow)
            flow = link.first()

    def _finish(self, connection: Flow) -> None:
        assert isinstance(connection, Connection) and connection.queue
        size, tag = connection.queue.popleft()
        connection.queued -= size
        self._arrive(self.now + connection.delay, connection, tag, size, in_order=True)
        self._sent[connection] = None
        if connection.queue:
            self.sharing.more(connection, 8.0 * connection.queue[0][0])
        else:
            connection.queue = ()
            self.sharing.leave(connection)

    def _arrive(self, at: float, connection: Connection, tag: object, size: int, *, in_order: bool = False) -> None:
        if self._packets is not None:
            at += self._late(connection, size)
            if in_order:
                connection.in_order_at = at = max(at, connection.in_order_at)
            else:
                connection.small_at = at = max(at, connection.small_at)
        self._count += 1
        heappush(self._arrivals, (at, self._count, connection, tag, size))

    def _late(self, connection: Connection, size: int) -> float:
        """Seconds by which jitter, and a packet that has to be sent again, delay a message."""
        assert self._packets is not None
        late = abs(self._packets.gauss(0.0, connection.jitter)) if connection.jitter else 0.0
        if connection.loss:
            packets = ceil(size / (self.profile.mtu - PACKET_HEAD))
            if self._packets.random() > (1 - connection.loss) ** packets:
                late += 2 * connection.delay
        return late

    def _settle(self) -> None:
        for link in self.sharing.settle(self.now):
            flow = link.first()
            due = inf if flow is None or link.level == 0 else link.since + max(0.0, flow.done - link.clock) / link.level
            if due != link.due:
                link.due = due
                if due < inf:
                    self._count += 1
                    heappush(self._dues, (due, self._count, link))
