"""The end of a run: nodes reach the last version and answer its evaluations, then hear that it is over.

Must not know why the run ends.
"""

from __future__ import annotations

import trio

from learner.head.head import Head
from p2p.protocol.join import Bye

FAREWELL_S = 30.0
"""How long nodes may take to install the last version before the head says goodbye."""


async def farewell(head: Head, reason: str) -> None:
    """Let the nodes reach the last version and answer its evaluations, then tell them that the run is over. The last samples
    are written meanwhile."""
    if head.local_engine is not None:
        head.local_engine.stay_on(head.rollouts)
    await head.evaluations.settled()
    with trio.move_on_after(FAREWELL_S):
        while any(head.still_follows(n) and n.version != head.publisher.current for n in head.nodes.values()):
            await head.moved()
    with trio.move_on_after(FAREWELL_S):
        await head.samples.settled()
    head.requests.close("the run is over")
    head.final_nodes = {p: head.describe(n) for p, n in head.nodes.items()}
    head.final_pool = head.pool_status()
    head.keeper.keep()
    for node in head.nodes.values():
        node.link.post(Bye(reason, done=True))
    with trio.move_on_after(5.0):
        while head.nodes:
            await head.moved()

