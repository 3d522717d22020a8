"""Secrets that come once each in a round of prompts, in drawn order. Must not know games, tokens or torch.

Were they drawn one by one, a step would reward those that it happened to have more of, and a small model took nearly twice as
many steps to learn to listen.
"""

from __future__ import annotations

from learner.tasks.letters_and_sums import draw


def secret_of(index: int, count: int, *key: object, seed: int) -> int:
    """The secret of prompt `index`, below `count`; each comes once in a round of `count` prompts. `key` tells streams apart."""
    round_, place = divmod(index, count)
    return sorted(range(count), key=lambda secret: draw(seed, *key, round_, secret))[place]
