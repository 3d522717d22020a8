"""Which of a node's tokens say what was said before: the same token in the same context. Pure.

How a token's log probability is rounded follows from its context, the prompt and all tokens before it. Members of a group share
their prompt and often their first tokens, and where a task has few answers nearly all of them; a prompt comes again in a later
step. Such tokens are off by the same amount, however often they come. A test that took sixteen of them for sixteen tokens called
an honest node wrong in one of three runs of the demo (bench/audit.md#the-same-token-in-the-same-context). So a token of a context
counts once. A further one counts by as much as it is further off than the first ones were: otherwise a node could say of it what
it likes. What seed draws a token is another matter, and differs for each of them: distances and shifts count always.

Must not know tests, versions or what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from learner.audit.sequential import LOGPROB_SCALE, logit_differences
from p2p.forgetting import forget_oldest, renewed

MOST_KEPT = 4_096
"""Tokens of a node that are known again: 48 KiB. Members of a group are looked at one after the other."""

OF_ONE = 32
"""Tokens of one completion that are known again, of those that may be off: two that agree in so many are rare."""

SAME = 1e-5
"""Nats by which a token may be further off than before and still be the same one: the auditor's own rounding, and a tenth of the
least noise that is counted."""


class NewTokens(NamedTuple):
    """What there is to judge of some tokens."""

    claimed: np.ndarray
    """log probabilities (nats) as claimed; of a repeated token the right one, and by how much it is further off than before"""
    repeated: np.ndarray
    """bool: the same token came in the same context before"""


class SeenTokens:
    """Tokens of one node, each in its context: the last MOST_KEPT."""

    def __init__(self) -> None:
        self._keys = np.empty(MOST_KEPT, np.uint64)
        self._off = np.empty(MOST_KEPT, np.float32)
        self._seen = 0

    def new_of(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], places: Sequence[int], claimed: np.ndarray,
        recomputed: np.ndarray,
    ) -> NewTokens:  # fmt: skip
        """Of the tokens at `places` of a completion, of which log probabilities are claimed and recomputed (nats, one entry a
        place), what was not said before. They are seen from here on."""
        repeated, says = np.zeros(len(places), bool), np.array(claimed, np.float64)
        telling = np.flatnonzero(~np.isnan(logit_differences(claimed, recomputed)))[:OF_ONE]
        if not len(telling):
            return NewTokens(says, repeated)
        keys = _context_keys(prompt_ids, completion_ids, [places[i] for i in telling])
        with np.errstate(invalid="ignore"):
            signed = claimed[telling] - recomputed[telling]
        off = np.nan_to_num(np.abs(signed), nan=LOGPROB_SCALE).clip(max=LOGPROB_SCALE)
        known = keys[:, None] == self._keys[None, : min(self._seen, MOST_KEPT)]
        again, at = known.any(axis=1), np.nonzero(known)[1]
        before = self._off[at].astype(np.float64)
        further = np.where(off[again] > before + SAME, off[again] - before, 0.0)
        repeated[telling[again]] = True
        says[telling[again]] = recomputed[telling[again]] + np.where(signed[again] < 0, -further, further)
        self._off[at] = before + further
        self._add(keys[~again], off[~again])
        return NewTokens(says, repeated)

    def _add(self, keys: np.ndarray, off: np.ndarray) -> None:
        at = (self._seen + np.arange(len(keys))) % MOST_KEPT
        self._keys[at], self._off[at] = keys, off
        self._seen += len(keys)


class SeenByNode:
    """The same of many nodes: of `most`, and of those that are here."""

    def __init__(self, most: int, is_here: Callable[[str], bool]) -> None:
        self._most, self._is_here = most, is_here
        self._of: dict[str, SeenTokens] = {}

    def of(self, node: str) -> SeenTokens:
        """A node's, empty at first, or when it was gone and forgotten."""
        seen = self._of.setdefault(node, SeenTokens())
        renewed(self._of, node)
        forget_oldest(self._of, self._most, lambda one: one == node or self._is_here(one))
        return seen


def _context_keys(prompt_ids: Sequence[int], completion_ids: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """uint64, of each place: of all tokens up to it and the one there."""
    ids = np.asarray(completion_ids, "<i8")
    text, first, keys = xxhash.xxh3_64(np.asarray(prompt_ids, "<i8").tobytes()), 0, []
    for place in places:
        text.update(ids[first : place + 1].tobytes())
        keys.append(text.intdigest())
        first = place + 1
    return np.array(keys, np.uint64)
