"""Every message between two peers of the swarm. Must not know channels, sessions or what anybody does with them.

Three families: joining (Hello ... Roster), versions (Announce ... Chunk), rollouts (Assign ... NodeStatus).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from p2p.limits import MAX_FRAME, MAX_PEERS
from p2p.protocol.rollout import FINISH_REASONS, Generate, TokenEvent
from p2p.protocol.wire import message
from p2p.version import Version

log = logging.getLogger("shoal.messages")

MAX_PRICE = 1e6
"""US dollars"""

STATES = ("active", "warm", "asleep")

# --- joining ---------------------------------------------------------------------------------------------------------


@message("hello")
@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every channel, from the peer that opened it. A node shows the head its ticket the first time;
    after that, and to other nodes, its membership. `addresses` are where it can be dialled (empty behind NAT)."""

    protocol: int
    run: str
    ticket: str
    membership: bytes
    addresses: tuple[str, ...]
    name: str
    agent: str
    site: str
    """those of one site share a fast LAN; empty for none"""


@message("welcome")
@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor's answer. `membership` is the head's to the joiner, or a node's own proof to the node that dialled."""

    protocol: int
    membership: bytes
    name: str


@message("refused")
@dataclass(frozen=True, slots=True)
class Rejection:
    """The acceptor's other answer, then it closes. A retryable one may be tried again later, as it is."""

    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class RosterEntry:
    peer: str
    addresses: tuple[str, ...]
    name: str


@message("roster")
@dataclass(frozen=True, slots=True)
class Roster:
    """Head to node: whom to link with, of those admitted and alive, the receiver included: everybody, or in groups (see
    Grouping) its neighbours. Replaces the roster before."""

    epoch: int
    members: tuple[RosterEntry, ...]


def make_roster(epoch: int, members: Sequence[RosterEntry]) -> Roster:
    """The roster of `members`, in a frame. When they are too many for all their addresses, each is listed with fewer;
    when they are too many even so, the last ones are left out (a mesh of so many is not to be had anyway)."""
    for addresses in (16, 8, 4, 2, 1):
        listed = tuple(replace(m, addresses=m.addresses[:addresses]) for m in members[:MAX_PEERS])
        texts = ((m.peer, m.name, *m.addresses) for m in listed)
        ends = list(accumulate(16 + sum(5 + len(text.encode()) for text in of_one) for of_one in texts))
        fits = bisect_right(ends, MAX_FRAME - 1024)
        if fits == len(members):
            break
    if fits < len(members):
        log.warning("%d peers are too many for a roster: the last %d are left out", len(members), len(members) - fits)
    return Roster(epoch, listed[:fits])


@dataclass(frozen=True, slots=True)
class Placed:
    peer: str
    group: int


@message("grouping")
@dataclass(frozen=True, slots=True)
class Grouping:
    """Head to node: the groups that the swarm is in (see `broadcast.groups`), as far as the node is concerned. `group` is its
    own, `sites` the number of each group's site, `witness` whether it tells the source of every chunk at once, `peers` the
    groups of its neighbours and its own, `stand_ins` the groups without its lane, `apart` those whom it was told to link with
    before and who are not its neighbours any more. Without `sites`: all are one group."""

    group: int
    sites: tuple[int, ...]
    witness: bool
    peers: tuple[Placed, ...]
    stand_ins: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()


@message("renewal")
@dataclass(frozen=True, slots=True)
class Renewal:
    """Head to node, long before the membership that it holds expires: the next one."""

    membership: bytes


@message("bye")
@dataclass(frozen=True, slots=True)
class Bye:
    """Orderly end of a membership or of the run. `done` says that the run is over. `draining` is a node's first word of the two:
    it takes nothing new, and the tokens of what it holds follow; after its last one (neither flag) it closes as soon as the
    head has answered with the same."""

    reason: str
    done: bool
    draining: bool = False


# --- versions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A retained manifest that a node may fetch. `size` is payload bytes (0 while it is being made)."""

    mid: bytes
    kind: str
    version: Version
    base: Version | None
    base_digest: bytes
    state_digest: bytes
    size: int


@message("catalog")
@dataclass(frozen=True, slots=True)
class Catalog:
    """Head to a joiner: what can be fetched, and which version is current."""

    current: Version
    entries: tuple[CatalogEntry, ...]


@message("get_catalog")
@dataclass(frozen=True, slots=True)
class GetCatalog:
    """Node to head: send me the catalog again."""


@message("parts")
@dataclass(frozen=True, slots=True)
class Parts:
    """Signed manifest parts (header, segment records, seal), each verifiable by itself against the head's key."""

    mid: bytes
    parts: tuple[bytes, ...]


@message("get_parts")
@dataclass(frozen=True, slots=True)
class GetParts:
    """Send me the manifest parts you have of `mid`."""

    mid: bytes


@message("follow")
@dataclass(frozen=True, slots=True)
class Follow:
    """Sender wants every new delta pushed as it is made (True), or no longer (False)."""

    on: bool


@message("subscribe")
@dataclass(frozen=True, slots=True)
class Subscribe:
    """Sender takes part in the spreading of `mid` and holds these chunks already (bitmap, bit i of byte i//8)."""

    mid: bytes
    have: bytes


@message("have")
@dataclass(frozen=True, slots=True)
class Have:
    """Sender verified and holds these chunks of `mid`."""

    mid: bytes
    chunks: tuple[int, ...]


@message("want")
@dataclass(frozen=True, slots=True)
class Want:
    """Sender asks for these chunks, under a lease that it keeps itself."""

    mid: bytes
    chunks: tuple[int, ...]


@message("relieve")
@dataclass(frozen=True, slots=True)
class Relieve:
    """Source to whoever relays these chunks: they go to the others from here, do not relay them. Where peers are in groups, to
    those of the receiver's own group: what it is to bring to other groups stays with it."""

    mid: bytes
    chunks: tuple[int, ...]


@message("chunk")
@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk. `seed` is what the receiver is to do with it: 0 nothing; 1, from the source only, it is the chunk's distributor:
    relay it to everyone who lacks it; else bring it to these groups of peers (see `broadcast.groups`)."""

    mid: bytes
    index: int
    seed: int
    data: bytes


@message("report")
@dataclass(frozen=True, slots=True)
class Report:
    """Node to head: what a peer sent was refused and the peer dropped. The head weighs it and never evicts on one."""

    peer: str
    version: Version
    chunk: int
    reason: str


@message("installed")
@dataclass(frozen=True, slots=True)
class Installed:
    """Node to head: this version is in place and its state digest was checked. Times in seconds."""

    version: Version
    state_digest: bytes
    pause_s: float
    apply_s: float
    transfer_s: float
    bytes_from_head: int
    bytes_from_peers: int


# --- rollouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`Generate` on the wire: token ids packed as little-endian uint32."""

    request_id: str
    prompt_ids: bytes
    prefix_ids: bytes
    stop_ids: bytes
    max_new_tokens: int
    seed: int
    min_version: Version
    temperature: float
    top_p: float
    exact_version: Version | None = None

    @classmethod
    def of(cls, g: Generate) -> GenerateRequest:
        return cls(
            g.request_id, pack_ids(g.prompt_ids), pack_ids(g.prefix_ids), pack_ids(g.stop_ids), g.max_new_tokens, g.seed,
            g.min_version, g.temperature, g.top_p, g.exact_version,
        )  # fmt: skip

    def generate(self) -> Generate:
        return Generate(
            request_id=self.request_id, prompt_ids=unpack_ids(self.prompt_ids), max_new_tokens=self.max_new_tokens,
            stop_ids=unpack_ids(self.stop_ids), seed=self.seed, min_version=self.min_version,
            temperature=self.temperature, top_p=self.top_p, prefix_ids=unpack_ids(self.prefix_ids),
            exact_version=self.exact_version,
        )  # fmt: skip


@message("assign")
@dataclass(frozen=True, slots=True)
class Assign:
    """Head to node: generate these. `finish_s` is for how many seconds the node may hold a newer version back so that they end
    under the weights that they began with; 0: they go on under the newer ones."""

    requests: tuple[GenerateRequest, ...]
    finish_s: float = 0.0


@message("abort")
@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests (all of them when empty); no answer comes."""

    request_ids: tuple[str, ...]


@message("interrupt")
@dataclass(frozen=True, slots=True)
class Interrupt:
    """Head to node: hand these back with what was made of them. Each ends with a run whose `finish` is "interrupt"; one that is
    not here any more has ended already."""

    request_ids: tuple[str, ...]


@message("terms")
@dataclass(frozen=True, slots=True)
class Terms:
    """Node to head, once a link is up: what this node costs, in US dollars. `idle_usd_per_hour` is what it costs while it is not
    asked to generate, `usd_per_gb` what 10^9 bytes cost that leave it."""

    usd_per_hour: float
    idle_usd_per_hour: float = 0.0
    usd_per_gb: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether these are prices at all: waiting costs no more than working."""
        return 0 <= self.idle_usd_per_hour <= self.usd_per_hour <= MAX_PRICE and 0 <= self.usd_per_gb <= MAX_PRICE


@message("activate")
@dataclass(frozen=True, slots=True)
class Activate:
    """Head to node: what it is wanted for from here on, and why. "active": it generates; "warm": it takes every version and
    generates nothing; "asleep": it takes no versions either."""

    state: str
    """one of STATES"""
    why: str


@dataclass(frozen=True, slots=True)
class TokenRun:
    """`TokenEvent` on the wire: ids as uint32, logprobs as float32, little-endian."""

    request_id: str
    start: int
    ids: bytes
    logprobs: bytes
    version: Version
    finish: str
    message: str
    start_version: Version | None = None
    end_version: Version | None = None

    @classmethod
    def of(cls, e: TokenEvent) -> TokenRun:
        logprobs = np.asarray(e.logprobs, dtype="<f4").tobytes()
        return cls(
            e.request_id, e.start, pack_ids(e.ids), logprobs, e.version, e.finish, e.message, e.start_version, e.end_version
        )

    def event(self) -> TokenEvent:
        """ValueError when lengths do not match or the finish reason is unknown."""
        ids = unpack_ids(self.ids)
        if len(self.logprobs) != 4 * len(ids):
            raise ValueError(f"{len(ids)} tokens with {len(self.logprobs)} bytes of logprobs")
        if self.finish not in FINISH_REASONS:
            raise ValueError(f"unknown finish reason {self.finish[:20]!r}")
        logprobs = np.frombuffer(self.logprobs, dtype="<f4")
        return TokenEvent(
            self.request_id, self.start, ids, logprobs, self.version, self.finish, self.message, self.start_version,
            self.end_version,
        )  # fmt: skip


@message("tokens")
@dataclass(frozen=True, slots=True)
class Tokens:
    runs: tuple[TokenRun, ...]


@message("rejected")
@dataclass(frozen=True, slots=True)
class Rejected:
    """Node to head: this request is not taken; `version` is what the node serves. Retryable when the request is not to blame:
    it goes to others, or here again later, unless `cause` (of `rollout.CAUSES`, "" for any other) says that it is never
    served here."""

    request_id: str
    version: Version
    reason: str
    retryable: bool
    cause: str = ""


@message("status")
@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Node to head, about once a second and after each install. `ready` is False until an engine serves a version, `updating`
    True while it finishes what it runs before it commits a newer one, and takes nothing new."""

    ready: bool
    version: Version
    running: int
    waiting: int
    capacity: int
    tokens: int
    tokens_per_s: float
    pid: int
    rss_bytes: int
    updating: bool = False
    sent_bytes: int = 0
    """payload of the chunks that it has sent since it started"""
    kv_tokens: int = 0
    """tokens whose keys and values its engine can hold at once; 0 where memory sets no bound that it knows"""


def pack_ids(ids: tuple[int, ...]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise ValueError("token ids are not whole uint32 values")
    return tuple(np.frombuffer(data, dtype="<u4").tolist())
