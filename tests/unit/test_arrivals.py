"""Which announced manifests a peer remembers."""

from __future__ import annotations

from typing import Any

import pytest

from p2p.broadcast.arrivals import MAX_SESSIONS, accept_header
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import KIB
from p2p.version import Version
from p2p.weights.manifest import CODEC, Header, Manifest, ManifestSigner

HEAD = Identity.from_seed(b"h" * 32)
LAYOUT = Layout.build([("w", "float32", (64, 64))])
NOW = 1_800_000_000


def signed(step: int, kind: str = "anchor", created: int = NOW) -> ManifestSigner:
    base = (Version(2, step - 1), b"d" * 32) if kind == "delta" else (None, b"")
    header = Header("r", Version(2, step), kind, *base, CODEC, 64 * KIB, 8 * KIB, created, created + 1000, LAYOUT)
    return ManifestSigner(HEAD, header)


def accept(made: ManifestSigner, known: list[Manifest] | None = None, **changes: Any) -> Manifest | None:
    policy: dict[str, Any] = {"head_key": HEAD.public_key, "run": "r", "min_epoch": 1, "floor": None, "now": NOW}
    return accept_header(made.header_part, changes.pop("mid", made.mid), known or [], **(policy | changes))


def accepted(step: int, kind: str = "anchor") -> Manifest:
    manifest = accept(signed(step, kind))
    assert manifest is not None
    return manifest


def test_a_header_of_the_head() -> None:
    assert accepted(5).version == Version(2, 5)
    # an anchor and a delta of one version are two manifests; an anchor below the floor may still serve a neighbour
    assert accept(signed(5, "delta"), [accepted(5)]) is not None
    assert accept(signed(5), floor=Version(2, 9)) is not None


def test_what_is_not_a_header_yet() -> None:
    made = signed(5)
    assert accept_header(
        made.record(0, 10, (b"c" * 32,)), made.mid, [], head_key=HEAD.public_key, run="r", min_epoch=1, floor=None, now=NOW
    ) is None  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mid": b"m" * 32}, "manifest id does not fit its header"),
        ({"run": "another"}, "run"),
        ({"min_epoch": 3}, "older epoch 2"),
        ({"head_key": Identity.from_seed(b"x" * 32).public_key}, "not signed by the head"),
        ({"floor": Version(2, 5)}, "version 2.5 is not newer than 2.5, which is installed"),
        ({"now": NOW + 2000}, "expired"),
    ],
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        accept(signed(5, "delta"), **changes)


def test_a_head_that_says_two_things_and_one_that_says_too_much() -> None:
    with pytest.raises(Refusal, match="equivocates"):
        accept(signed(5, created=NOW - 1), [accepted(5)])
    known = [accepted(step) for step in range(MAX_SESSIONS)]
    assert accept(signed(MAX_SESSIONS), known[1:]) is not None
    with pytest.raises(Refusal, match=f"more than {MAX_SESSIONS} manifests"):
        accept(signed(MAX_SESSIONS), known)
