"""One host of the measurement: a contest's player with an owner's limits. The source publishes version after version.

Run by `measure` in a network namespace: `python -m netem.bench.limits.player JSON`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import trio

from netem.contest.players import events
from netem.contest.players.swarm import PORT, ShoalPlayer, key_of
from p2p.allowance.keeper import AllowanceKeeper
from p2p.allowance.limits import NO_LIMITS
from p2p.channel.libp2p import open_libp2p_network
from p2p.codec import warm


class EndlessPlayer(ShoalPlayer):
    """As a contest's, without commands: versions of `nbytes` follow each other for ever."""

    async def go(self, nbytes: int) -> None:
        """For ever; every player of the measurement at once."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.swarm.run)
            self.swarm.exchange.follow(not self.is_source)
            number = 0
            while True:
                number += 1
                if self.is_source:
                    while not self._linked():  # noqa: ASYNC110 (a measurement's start)
                        await trio.sleep(0.1)
                    self._prepare(number, nbytes, number)
                    await self._publish(number)
                    session = self.swarm.transfers[self.mids[number]].session
                    while not session.peers() or any(  # noqa: ASYNC110 (looked at as a clock is)
                        session.lowest_lacking(p) is not None for p in session.peers()
                    ):
                        await trio.sleep(0.05)
                    # What is on its way is not lacking: a chunk's way takes less than this.
                    await trio.sleep(0.3)
                else:
                    self._begin(number)
                    await self._receive(number, nbytes)


async def _main(said: dict) -> None:
    role = events.Role(**said["role"])
    folder = Path(role.directory)
    await trio.Path(folder).mkdir(parents=True, exist_ok=True)
    keeper = AllowanceKeeper(NO_LIMITS.changed(said["limits"]), folder)
    warm()
    address = f"/ip4/{role.hosts[role.name]}/tcp/{PORT}"
    async with open_libp2p_network(key_of(role.name), [address], meter=keeper.meter) as network:
        player = EndlessPlayer(role, network)
        keeper.tell(player.swarm)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            nursery.start_soon(player.go, said["bytes"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    trio.run(_main, json.loads(sys.argv[1]))
