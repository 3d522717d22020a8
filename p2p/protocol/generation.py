"""Messages of generation: the head asks for sequences, a node answers with tokens and says how it is.

Must not know engines, groups or rewards. The values inside are those of `protocol.rollout`, packed.
"""

from __future__ import annotations

from msgspec.structs import asdict

from p2p.protocol.rollout import Generate, TokenEvent, pack_ids, unpack_ids
from p2p.protocol.wire import Blob, Count, Few, Line, Many, Message, Name, Real, Record
from p2p.version import Version

PACKED = ("prompt_ids", "prefix_ids", "stop_ids")
"""Fields of a request that hold token ids."""


class GenerateRequest(Record, frozen=True):
    """`Generate` on the wire, field by field: token ids packed as little-endian uint32."""

    request_id: Name
    prompt_ids: Blob
    prefix_ids: Blob
    stop_ids: Blob
    max_new_tokens: Count
    seed: Count
    min_version: Version
    temperature: Real
    top_p: Real
    exact_version: Version | None

    @classmethod
    def of(cls, g: Generate) -> GenerateRequest:
        """struct.error for a token id that is not in [0, 2**32)."""
        values = {name: getattr(g, name) for name in cls.__struct_fields__}
        return cls(**values | {name: pack_ids(values[name]) for name in PACKED})

    def generate(self) -> Generate:
        """ValueError when ids are not whole."""
        values = asdict(self)
        return Generate(**values | {name: unpack_ids(values[name]) for name in PACKED})


class Assign(Message, frozen=True, tag="assign"):
    """Head to node: generate these. `finish_s` is for how many seconds the node may hold a newer version back so that they end
    under the weights that they began with; 0: they go on under the newer ones."""

    requests: Few[GenerateRequest]
    finish_s: Real = 0.0


class Abort(Message, frozen=True, tag="abort"):
    """Forget these requests (all of them when empty); no answer comes."""

    request_ids: Many[Name]


class Interrupt(Message, frozen=True, tag="interrupt"):
    """Head to node: hand these back with what was made of them. Each ends with an event whose `finish` is "interrupt". One that
    is not here any more has ended already."""

    request_ids: Many[Name]


class Tokens(Message, frozen=True, tag="tokens"):
    """Node to head: what it made since it last said so. The head checks each run against the request that it answers (see
    `learner.rollouts.event_checks`): who holds it, where it stands, its version, its log probabilities, its ids, its end."""

    runs: Many[TokenEvent]

    def __post_init__(self) -> None:
        """ValueError, which refuses the message while it is read, unless each run has a log probability for each of its ids."""
        for run in self.runs:
            if len(run.packed_ids) != len(run.packed_logprobs) or len(run.packed_ids) % 4:
                what = f"{len(run.packed_ids)} bytes of token ids with {len(run.packed_logprobs)} of logprobs"
                raise ValueError(f"request {run.request_id!r:.80}: {what}")


class Rejected(Message, frozen=True, tag="rejected"):
    """Node to head: this request is not taken; `version` is what the node serves. Retryable when the request is not to blame:
    it goes to others, or here again later, unless `cause` says that it is never served here."""

    request_id: Name
    version: Version
    reason: Line
    retryable: bool
    cause: Name = ""
    """of `rollout.CAUSES`, "" for any other"""


class ComputesWith(Record, frozen=True):
    """How a node's engine computes, as the node says."""

    arithmetic: Name
    """engine/dtype/device; "" while no engine serves"""
    keeps: bool
    """sequences go on over an install with the keys and values of older weights"""


class OwnerWord(Record, frozen=True):
    """What the owner of a node's machine has to say, in words."""

    rests: Line
    """why the node takes no work for now although it is there; "" while it does"""
    limits: Line
    """what it is allowed; "" for anything"""


class NodeStatus(Message, frozen=True, tag="status"):
    """Node to head, about once a second and after each install. `ready` is False until an engine serves a version, `updating`
    True while it finishes what it runs before it commits a newer one, and takes nothing new."""

    ready: bool
    version: Version
    running: Count
    waiting: Count
    capacity: Count
    tokens: Count
    tokens_per_s: Real
    pid: Count
    rss_bytes: Count
    updating: bool = False
    sent_bytes: Count = 0
    """payload of the chunks that it has sent since it started"""
    kv_tokens: Count = 0
    """tokens whose keys and values its engine can hold at once; 0 where memory sets no bound that it knows"""
    computes: ComputesWith = ComputesWith("", False)
    owner: OwnerWord = OwnerWord("", "")
