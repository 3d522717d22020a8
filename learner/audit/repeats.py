"""Which of a node's tokens say what was said before: the same token in the same context. Pure.

How a token's log probability is rounded follows from its context, the prompt and all tokens before it. Members of a group share
their prompt and often their first tokens, and where a task has few answers nearly all of them; a prompt comes again in a later
step. Such tokens are off by the same amount, however often they come. A test that took sixteen of them for sixteen tokens called
an honest node wrong in two of ten runs of the demo (bench/audit.md#the-same-token-in-the-same-context). So a token of a context
counts once. Of further ones some are asked whether they are further off than it was: otherwise a node could say of them what it
likes. Which ones is chosen without looking at them, the k-th with a chance of 1 in k: whoever counted those alone that are
further off would count an honest node's worst ones. What seed draws a token differs for each, so distances and shifts count
always (a context that is far off raises them for all of a group: see docs/design/audits.md).

Must not know tests, versions or what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from learner.audit.bets import LOGPROB_SCALE, logit_differences
from p2p.forgetting import forget_oldest, renewed

MOST_KEPT = 4_096
"""Tokens of a node that are known again: 80 KiB. Members of a group are looked at one after the other."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Spreads a key's bits."""

OF_ONE = 32
"""Tokens of one completion that are known again, of those that may be off: two that agree in so many are rare."""

SAME = 1e-5
"""Nats by which a token may be further off than before and still be the same one: the auditor's own rounding, and a tenth of the
least noise that is counted."""

UNASKED = math.inf
"""In place of how much further off a repeated token is: it is not asked."""


class SeenTokens:
    """Tokens of one node, each in its context: the MOST_KEPT that were new last. `secret`: 64 bits that no node knows."""

    def __init__(self, secret: int = 0) -> None:
        self._secret = secret
        self._keys = np.empty(MOST_KEPT, np.uint64)
        self._off = np.empty(MOST_KEPT, np.float32)
        self._times = np.empty(MOST_KEPT, np.uint64)
        self._seen = 0

    def again(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], places: Sequence[int], claimed: np.ndarray,
        recomputed: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Of the tokens at `places` of a completion, of which log probabilities are claimed and recomputed (nats, one entry a
        place): nan where one is new; of a repeated one by how much it is further off than each that was asked before (nats, 0
        where it is not), or UNASKED. They are seen from here on."""
        found = np.full(len(places), np.nan)
        telling = np.flatnonzero(~np.isnan(logit_differences(claimed, recomputed)))[:OF_ONE]
        if not len(telling):
            return found
        keys = self._keys_of(prompt_ids, completion_ids, [places[i] for i in telling])
        with np.errstate(invalid="ignore"):
            off = np.abs(np.asarray(claimed, np.float64)[telling] - recomputed[telling])
        off = np.nan_to_num(off, nan=LOGPROB_SCALE).clip(max=LOGPROB_SCALE)
        known = keys[:, None] == self._keys[None, : min(self._seen, MOST_KEPT)]
        repeated, at = known.any(axis=1), np.nonzero(known)[1]
        self._times[at] += np.uint64(1)
        before, times = self._off[at].astype(np.float64), self._times[at]
        asked = (keys[repeated] >> np.uint64(7)) * _ODD % times == times - np.uint64(1)
        further = np.where(off[repeated] > before + SAME, off[repeated] - before, 0.0)
        found[telling[repeated]] = np.where(asked, further, UNASKED)
        self._off[at] = np.where(asked, before + further, before)
        self._add(keys[~repeated], off[~repeated])
        return found

    def _add(self, keys: np.ndarray, off: np.ndarray) -> None:
        at = (self._seen + np.arange(len(keys))) % MOST_KEPT
        self._keys[at], self._off[at], self._times[at] = keys, off, 0
        self._seen += len(keys)

    def _keys_of(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """uint64, of each place: of all tokens up to it and the one there."""
        ids = np.asarray(completion_ids, "<i8")
        text, first, keys = xxhash.xxh3_64(np.asarray(prompt_ids, "<i8").tobytes(), seed=self._secret), 0, []
        for place in places:
            text.update(ids[first : place + 1].tobytes())
            keys.append(text.intdigest())
            first = place + 1
        return np.array(keys, np.uint64)


class SeenByNode:
    """The same of many nodes: of `most`, and of those that are here. `secret`: bytes that no node knows."""

    def __init__(self, secret: bytes, most: int, is_here: Callable[[str], bool]) -> None:
        self._secret, self._most, self._is_here = xxhash.xxh3_64_intdigest(secret), most, is_here
        self._of: dict[str, SeenTokens] = {}

    def of(self, node: str) -> SeenTokens:
        """A node's, empty at first, or when it was gone and forgotten."""
        seen = self._of.get(node)
        if seen is None:
            seen = self._of[node] = SeenTokens(self._secret)
            forget_oldest(self._of, self._most, lambda one: one == node or self._is_here(one))
        renewed(self._of, node)
        return seen

    def forget(self, node: str) -> None:
        """It begins anew."""
        self._of.pop(node, None)
