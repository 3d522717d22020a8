"""Whom a price of the configuration is for: a peer, or those who came by a ticket. Never whoever took a name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from p2p.identity import public_key_of

PEER, TICKET = "peer:", "ticket:"
"""How the key of a price begins: a peer's id follows, or the name of a ticket, * and ? as in a shell."""


def wrong_price_key(key: str) -> str | None:
    """What is wrong with the key of a price, and what to write, as the end of a sentence; None for a good one."""
    if key.startswith(PEER):
        try:
            public_key_of(key[len(PEER) :])
        except ValueError:
            return 'names no peer: write "peer:12D3KooW...", a whole peer id (shoal status --json)'
        return None
    if key.startswith(TICKET) and len(key) > len(TICKET):
        return None
    name = key.removeprefix(TICKET) or "NAME"
    return f'names nobody: write "ticket:{name}" for nodes of the ticket of that name, or "peer:PEERID" (a node picks its name)'


def price_of(prices: Mapping[str, Sequence[float]], peer: str, ticket: str) -> Sequence[float] | None:
    """The price of `peer`, which came by the ticket of that name: its own, or the first that fits the ticket."""
    own = prices.get(PEER + peer)
    if own is not None:
        return own
    return next((given for key, given in prices.items() if fnmatchcase(TICKET + ticket, key)), None)
