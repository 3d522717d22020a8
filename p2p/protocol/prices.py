"""Messages about money: what a node costs, and whether the head wants it to generate.

Must not know how the head decides.
"""

from __future__ import annotations

from typing import Literal

from p2p.protocol.wire import Message, Real, Text

MAX_PRICE = 1e6
"""The highest price of a node hour or of 10^9 bytes, in US dollars: far above any offer, so that sums stay finite."""

State = Literal["active", "warm", "asleep"]
"""What a node can be wanted for (see `Activate`)."""


class Terms(Message, frozen=True, tag="terms"):
    """Node to head, once a link is up: what this node costs, in US dollars. `idle_usd_per_hour` is what it costs while it is not
    asked to generate, `usd_per_gb` what 10^9 bytes cost that leave it. The head refuses what is not `sound`."""

    usd_per_hour: Real
    idle_usd_per_hour: Real = 0.0
    usd_per_gb: Real = 0.0

    @property
    def sound(self) -> bool:
        """Whether these are prices at all: waiting costs no more than working."""
        return 0 <= self.idle_usd_per_hour <= self.usd_per_hour <= MAX_PRICE and 0 <= self.usd_per_gb <= MAX_PRICE


class Activate(Message, frozen=True, tag="activate"):
    """Head to node: what it is wanted for from here on, and why. "active": it generates; "warm": it takes every version and
    generates nothing; "asleep": it takes no versions either."""

    state: State
    why: Text
