"""Which sequences are checked. Pure: a share of them by a keyed hash, so that no node can tell beforehand.

Must not know what a check is, or where a share comes from (`learner.standing`).
"""

from __future__ import annotations

import hashlib


def chosen(secret: bytes, group_id: int, member: int, share: float) -> bool:
    """Whether member `member` of a group is checked, where `share` of all are. The same for the same `secret` (16 bytes or more,
    known to the head alone)."""
    if share >= 1.0:
        return True
    digest = hashlib.blake2b(f"{group_id}.{member}".encode(), key=secret[:64], digest_size=8).digest()
    return int.from_bytes(digest) < share * 2.0**64
