"""The port through which the head's gate asks the run's books who may come. Must not know what the books are made of.

The gate has checked signatures, run and epoch by then. A node has no books: it takes whoever shows the head's membership.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from p2p.membership.admission import Ticket


class Doorkeeper:
    """The books of a head. This one has none: every ticket and every membership of the head's is good. `now` is the wall time in
    Unix seconds. All of it is called in the event loop, for strangers too: it takes milliseconds at the most."""

    def knows(self, peer: str, now: float) -> bool:
        """Whether `peer`, which shows a membership, may come by that alone; if not, it needs a ticket. Refusal when it may not
        come at all."""
        return True

    def admit(self, peer: str, ticket: Ticket, now: float, *, visit: bool = False) -> None:
        """Take down that `peer` comes by `ticket`. Refusal, which says why, when it may not; the refusal is fatal unless it may
        later. `visit`: it only asks, and nothing is taken down."""

    def unwelcome(self, peers: Collection[str], now: float) -> Mapping[str, str]:
        """Those of `peers`, which are here, that have to go since the last call, each with the reason."""
        return {}
