"""Whether a newly announced manifest is one to remember. Pure: what is known and the time are passed in.

Must not know who announced it, or whether this peer will take part.
"""

from __future__ import annotations

from collections.abc import Collection

from p2p.errors import Refusal
from p2p.version import Version
from p2p.weights.manifest import Manifest, open_header, open_part

MAX_SESSIONS = 256
"""Manifests a peer keeps track of at once. A chain being followed is far shorter."""


def accept_header(
    part: bytes,
    mid: bytes,
    known: Collection[Manifest],
    *,
    head_key: bytes,
    run: str,
    min_epoch: int,
    floor: Version | None,
    now: float,
) -> Manifest | None:
    """The manifest whose header `part` is; None for a signed part of another kind, whose header did not come. Refusal when
    it is not the head's, of another run or an older epoch, at or below `floor` (what is installed) as a delta, a second one
    for the same version, or one too many."""
    if open_part(part, head_key).kind != "header":
        return None
    manifest = open_header(part, head_key=head_key, run=run, min_epoch=min_epoch, now=now)
    version = manifest.version
    if manifest.mid != mid:
        raise Refusal("manifest id does not fit its header", version=version, fatal=True)
    if manifest.header.kind == "delta" and floor is not None and version <= floor:
        raise Refusal(f"version {version} is not newer than {floor}, which is installed", version=version)
    for other in known:
        h = other.header
        if (h.version, h.kind, h.base) == (version, manifest.header.kind, manifest.header.base):
            raise Refusal("two signed manifests for one version: the head equivocates", version=version)
    if len(known) >= MAX_SESSIONS:
        raise Refusal(f"more than {MAX_SESSIONS} manifests at once", version=version)
    return manifest
