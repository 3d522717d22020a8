"""The decoders of bytes that peers send, each with valid inputs. What the head signs is signed anew after the damage: a hostile
head is a peer as well, and behind a bad signature nothing would be reached."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from p2p.broadcast.transfer import members
from p2p.codec import decode_segment
from p2p.codec.registry import CODINGS
from p2p.errors import Refusal, UsageError
from p2p.identity import Identity
from p2p.layout import WORD, Layout
from p2p.membership.admission import Membership, check_membership, make_ticket, read_ticket, sign_membership
from p2p.protocol.descriptor import unpack_descriptor
from p2p.protocol.generation import Abort, Assign, GenerateRequest, Interrupt, NodeStatus, Rejected, Tokens
from p2p.protocol.join import Bye, Grouping, Hello, Placed, Rejection, Renewal, Roster, RosterEntry, Welcome
from p2p.protocol.messages import decode
from p2p.protocol.prices import Activate, Terms
from p2p.protocol.reach import Introduce, Linked, LinkKinds, Meeting, NoMeeting, PassingOn, PassOn, Whereabouts
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.protocol.versions import (
    Allowance,
    Catalog,
    CatalogEntry,
    Chunk,
    Follow,
    GetCatalog,
    GetParts,
    Have,
    Installed,
    Parts,
    Relieve,
    Report,
    Subscribe,
    Want,
)
from p2p.protocol.wire import encode, encode_struct, unpack
from p2p.version import Version
from p2p.weights.manifest import CODEC, DOMAIN, Header, ManifestSigner, SignedPart, open_header

REFUSALS = (Refusal, UsageError)
"""What a decoder may raise."""

HEAD, RUN, NOW = Identity.from_seed(b"h" * 32), "run", 1_800_000_000
V = Version(1, 2)
LAYOUT = Layout.build([("a", "float32", (64, 64)), ("b", "bfloat16", (32, 128)), ("c", "uint8", (100,))])
SEGMENT, CHUNK, DIGEST = 8192, 2048, bytes(range(32))


class Target(NamedTuple):
    """A decoder."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]


def _messages() -> list[bytes]:
    request = GenerateRequest.of(Generate("1.2.3", (1, 2, 3), 9, (0,), 7, V, prefix_ids=(4, 5), exact_version=V))
    run = TokenEvent.of("1.2.3", 2, (1, 2, 3), [-0.5, -1.0, -2.0], V, "stop", "x")
    entry = CatalogEntry(DIGEST[:16], "delta", V, V, DIGEST, DIGEST, 99)
    member = RosterEntry("12D3Koo", ("/ip4/1.2.3.4/tcp/1",), "n")
    links = Linked("12D3Koo", "relayed", "no answer"), Linked("12D3Kop", "met", "")
    return [encode(m) for m in (
        Assign((request,) * 3, 1.5), Abort(("1.2.3",)), Tokens((run,) * 5), NodeStatus(True, V, 1, 2, 3, 4, 5.0, 6, 7),
        Rejected("1.2.3", V, "why", True, "behind"), Hello(9, RUN, "ticket", b"m", ("/ip4/1.2.3.4/tcp/1",), "n", "a", "s"),
        Welcome(9, b"m", "n", "seen"), Rejection("why", True), Roster(1, (member,) * 4), Renewal(b"m"), Bye("why", False),
        Grouping(1, (0, 1), True, (Placed("p", 1),), (2,), (0,), ("q",)), Terms(1.0, 0.5, 0.1), Activate("warm", "why"),
        Catalog(V, (entry,) * 3), GetCatalog(), Parts(DIGEST, (b"part", b"other")), GetParts(DIGEST), Follow(True),
        Allowance(1e6, None),
        Subscribe(DIGEST, b"\xff\x01"), Have(DIGEST, (1, 2, 300)), Want(DIGEST, (5, 70_000)), Relieve(DIGEST, (1,)),
        Chunk(DIGEST, 3, 1, b"data" * 9), Report("p", V, 3, "why"), Installed(V, DIGEST, 0.1, 0.2, 0.3, 4, 5),
        Interrupt(("1.2.3", "1.2.4")), Whereabouts(("/ip4/1.2.3.4/tcp/1",), ("/ip4/1.2.3.4/tcp/2",), "steady"),
        Introduce("12D3Koo", "why"), Meeting("12D3Koo", ("/ip4/1.2.3.4/tcp/2",), True, 0.5), NoMeeting("12D3Koo", "why"),
        LinkKinds(links), PassingOn((PassOn("12D3Koo", "12D3Kop", 1, 2),) * 3),
    )]  # fmt: skip


def _header(kind: str, layout: Layout = LAYOUT) -> Header:
    base = V if kind == "delta" else None
    return Header(RUN, Version(1, 3), kind, base, DIGEST, CODEC, SEGMENT, CHUNK, created=NOW, expires=NOW + 9999, layout=layout)


def _open(part: bytes) -> object:
    return open_header(part, head_key=HEAD.public_key, run=RUN, min_epoch=0, now=NOW)


def _signed(kind: str, body: bytes) -> bytes:
    return encode_struct(SignedPart(kind, body, HEAD.sign(DOMAIN[kind], body)))  # type: ignore[arg-type]


def _manifests() -> dict[str, Target]:
    signers = [ManifestSigner(HEAD, _header(kind)) for kind in ("anchor", "delta")]
    headers = [signer.header_part for signer in signers]
    whole, sealed = signers[0], LAYOUT.segments(SEGMENT)
    records = [whole.record(i, s.nbytes, (DIGEST,) * -(-s.nbytes // CHUNK)) for i, s in enumerate(sealed)]
    seal = whole.seal([DIGEST[:16]] * len(LAYOUT.tensors), DIGEST)

    def bodies(parts: list[bytes]) -> list[bytes]:
        return [unpack(part, SignedPart).body for part in parts]

    def add(kind: str, body: bytes) -> None:
        manifest = open_header(headers[0], head_key=HEAD.public_key, run=RUN, min_epoch=0, now=NOW)
        for record in records[:1] if kind == "record" else records:
            manifest.add(record, HEAD.public_key)
        manifest.add(_signed(kind, body), HEAD.public_key)

    def table(packed: bytes) -> None:
        fields = unpack(bodies(headers[:1])[0], list)
        fields[-1] = zstandard.ZstdCompressor(level=1).compress(packed)
        _open(_signed("header", encode_struct(fields)))

    return {
        "part": Target([*headers, *records, seal], _open),
        "header": Target(bodies(headers), lambda body: _open(_signed("header", body))),
        "table": Target([encode_struct(LAYOUT.to_wire())], table),
        "record": Target(bodies(records[1:]), lambda body: add("record", body)),
        "seal": Target(bodies([seal]), lambda body: add("seal", body)),
    }


def _codings() -> dict[str, Target]:
    """Each coding, with words of each size, with a base and without."""
    chance, found = np.random.default_rng(7), {}
    for size in WORD:
        base = chance.integers(0, 1 << 8 * size, 4096, dtype=WORD[size])
        new = base.copy()
        hit = chance.random(4096) < 0.05
        new[hit] += chance.integers(0, 9, int(hit.sum()), dtype=WORD[size])
        for coding in CODINGS.values():
            for old in (base, None):
                try:
                    made = coding.encode(new, old)
                except (ValueError, TypeError, AttributeError, AssertionError):  # it needs a base
                    continue
                if made is None:
                    continue
                payload, out = bytes([coding.id]) + made.body, np.empty_like(new)

                def read(data: bytes, old: np.ndarray | None = old, out: np.ndarray = out) -> None:
                    decode_segment(data, old, out)

                name = f"{type(coding).__name__}-{size}-{'delta' if old is not None else 'anchor'}"
                found[name] = Target([payload], read)
    return found


def targets() -> dict[str, Target]:
    """All of them, by name."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    membership = encode_struct(Membership(RUN, 1, HEAD.peer_id, NOW + 999))
    proof = sign_membership(HEAD, Membership(RUN, 1, HEAD.peer_id, NOW + 999))

    def check(data: bytes) -> None:
        check_membership(data, head_key=HEAD.public_key, run=RUN, peer=HEAD.peer_id, now=NOW)

    files = encode_struct({"config.json": b"{}", "tokenizer.json": b"{}" * 9})
    ticket = make_ticket(HEAD, RUN, ("/ip4/1.2.3.4/tcp/4001", "/dns4/a.example/tcp/1"), NOW).encode().encode()
    return {
        "messages": Target(_messages(), decode),
        "membership": Target([proof, membership], check),
        "ticket": Target([ticket], lambda data: read_ticket(data.decode("utf-8", "replace"))),
        "descriptor": Target([files], lambda data: unpack_descriptor(data, folder)),
        "bitmap": Target([bytes(16), b"\xff" * 64], lambda data: sum(members(data))),
        **_manifests(),
        **_codings(),
    }
