"""What one peer may draw from here, whatever links it comes by: answers to its questions, and chunks that it had before. Pure.

A question costs a peer a few bytes, and its answer may be megabytes; a link costs it a handshake, and with the old link went what
was known of it. So both are counted by peer, against what an honest one needs: a few answers when it arrives, and a version once,
again when it crashed. Must not know messages, channels, or what is in an answer.
"""

from __future__ import annotations

from p2p.limits import KIB, MIB

ANSWERS_BYTES, ANSWERS_PER_S = 4 * MIB, 256 * KIB
"""Bytes of answers (catalogs, manifest parts) that a peer gets at once, and bytes a second after those. An answer that is longer
than what is left is given, and owed: all parts of a 7B model's anchor are 2 MiB."""

ANSWER_LEAST = 16 * KIB
"""Bytes that an answer counts for at least: some 250 at once, then 16 a second."""

PASSES, PASS_S = 3.0, 200.0
"""How many times a peer is handed a version's bytes at once (each crash of it costs one time), and seconds in which it earns one
more."""

PASS_LEAST = 1 * MIB
"""Bytes that a version counts for at least: a small one may be drawn more often."""

MAX_COUNTED = 4096
"""Peers that are counted. Identities are free; beyond it those are forgotten that were counted first."""


class ReplyBudget:
    """Answers by peer."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """peer -> (bytes that are left, as of when)"""

    def __len__(self) -> int:
        return len(self._left)

    def take(self, peer: str, nbytes: int, now: float) -> bool:
        """Whether `peer` gets an answer of so many bytes now; it then counts."""
        left, at = self._left.pop(peer, (float(ANSWERS_BYTES), now))
        left = min(float(ANSWERS_BYTES), left + (now - at) * ANSWERS_PER_S)
        given = left > 0
        if given:
            left -= max(nbytes, ANSWER_LEAST)
        if len(self._left) >= MAX_COUNTED:
            del self._left[next(iter(self._left))]
        self._left[peer] = (left, now)
        return given


class PeerDraws:
    """Chunks of one manifest that were handed to each peer, in bytes."""

    def __init__(self) -> None:
        self._drawn: dict[str, tuple[float, float]] = {}
        """peer -> (bytes, as of when); they fade"""
        self.spent: dict[str, float] = {}
        """peers that get no more for now -> until when"""

    def __len__(self) -> int:
        return len(self._drawn)

    def handed(self, peer: str, nbytes: int, size: int, now: float) -> None:
        """`peer` is handed a chunk of so many bytes, of a manifest that has `size` so far."""
        one = max(size, PASS_LEAST)
        drawn, at = self._drawn.pop(peer, (0.0, now))
        drawn = max(0.0, drawn - (now - at) * one / PASS_S) + nbytes
        if len(self._drawn) >= MAX_COUNTED:
            del self._drawn[next(iter(self._drawn))]
        self._drawn[peer] = (drawn, now)
        if drawn > PASSES * one:  # until an eighth of the bytes is free, so that it is not asked after each chunk
            self.spent[peer] = now + PASS_S / 8

    def able(self, peers: list[str], now: float) -> list[str]:
        """Those of `peers` that may be handed more."""
        if not self.spent:
            return peers
        self.spent = {peer: until for peer, until in self.spent.items() if now < until}
        return [peer for peer in peers if peer not in self.spent]
