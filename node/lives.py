"""The lives of a node's agent in one process: it takes part while its owner's limits let it, and rests without links in between.

A rest is as a drain: every token goes to the learner first, the engine ends, links close. The process stays, and the node comes
back by itself with its key and what lies in its folder. Must not know engines or channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from node.agent import Agent
from p2p.allowance.keeper import AllowanceKeeper
from p2p.version import Version

log = logging.getLogger("shoal.node")


class Lives:
    """`run` lives them. What they did together is in the attributes."""

    def __init__(self, keeper: AllowanceKeeper) -> None:
        self._keeper = keeper
        self._agent: Agent | None = None
        self.reason = ""
        """why the last one ended"""
        self._stopped = ""
        self.tokens = self.made = 0
        """as of `Agent`, of those that ended"""
        self.version: Version | None = None

    def stop(self, reason: str) -> None:
        """End in good order; there is no next life."""
        self._stopped = reason
        if self._agent is not None:
            self._agent.stop(reason)
        self._keeper.wake()

    async def run(self, new_agent: Callable[[], AbstractAsyncContextManager[Agent]]) -> None:
        """Until the run is over, or `stop`. UsageError as `Agent.run`."""
        while not self._stopped:
            if not await self._allowed():
                break
            async with new_agent() as agent:
                self._agent = agent
                if self._stopped:
                    agent.stop(self._stopped)
                try:
                    self.reason = await agent.run()
                finally:
                    self._agent, self.version = None, agent.shadow.version
                    self.tokens, self.made = self.tokens + agent.serving.tokens, self.made + agent.made
            if not agent.rested:
                return
        self.reason = self._stopped

    async def _allowed(self) -> bool:
        """Wait until the limits let the node take part; False when it is stopped meanwhile."""
        said = ""
        while rests := self._keeper.permission.rests:
            changed = self._keeper.changed
            if self._stopped:
                return False
            if rests != said:
                said = rests
                log.info("this node rests: %s", rests)
            await changed.wait()
        if said:
            log.info("this node takes part again")
        return True
