"""Asks a provider for more nodes when they would be worth it: a command, a webhook, or both. Thin shell.

How many, and why, is `economy.allocation`'s business. Whoever is asked may do nothing: it is asked again after a while. Must not
know nodes or prices.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import trio

from learner.economy.allocation import Advice

log = logging.getLogger("shoal.provider")

LOOK_S = 5.0
"""Seconds between two looks whether nodes are missed; a node takes longer to come in any case."""
LASTING_S = 30.0
"""Nodes are missed for so long without a break before anybody is asked: one that restarts is back by then."""

PATIENCE_S = 120.0
"""A command or a server that takes longer is left alone (a command is killed)."""


@dataclass
class Provider:
    """`advice()`: what is wanted now, None for nothing. Asked at most every `every_s` seconds.

    The command gets SHOAL_MORE (how many), SHOAL_WHY, SHOAL_RUN and SHOAL_TICKET in its environment; the URL gets the same as
    JSON {"more", "why", "run", "ticket"}. """

    advice: Callable[[], Advice | None]
    run_id: str
    ticket: str
    command: Sequence[str] = ()
    url: str = ""
    every_s: float = 300.0
    asked: int = field(default=0, init=False)
    said: str = field(default="", init=False)
    """what became of it, for people"""

    async def run(self) -> None:
        """Ask whenever nodes have been missed for LASTING_S, for as long as the run lasts."""
        if not self.command and not self.url:
            return
        since: float | None = None
        while True:
            await trio.sleep(LOOK_S)
            advice, now = self.advice(), trio.current_time()
            if advice is None or advice.more <= 0:
                since = None
                continue
            since = now if since is None else since
            if now - since >= LASTING_S:
                await self.ask(advice)
                await trio.sleep(self.every_s)
                since = None

    async def ask(self, advice: Advice) -> None:
        """Once, whatever comes of it."""
        self.asked += 1
        facts = {"more": advice.more, "why": advice.why, "run": self.run_id, "ticket": self.ticket}
        told = []
        if self.command:
            told.append(await self._command({f"SHOAL_{key.upper()}": str(value) for key, value in facts.items()}))
        if self.url:
            told.append(await self._post(json.dumps(facts)))
        self.said = f"asked for {advice.more} more nodes: {'; '.join(told)}"
        log.info("%s (%s)", self.said, advice.why)

    async def _command(self, facts: dict[str, str]) -> str:
        name = self.command[0]
        with trio.move_on_after(PATIENCE_S) as patience:
            try:
                done = await trio.run_process(
                    list(self.command), stdin=b"", env={**os.environ, **facts}, capture_stdout=True, capture_stderr=True,
                    check=False,
                )  # fmt: skip
            except OSError as error:
                return f"{name}: {error.strerror}"
        if patience.cancelled_caught:
            return f"{name} took longer than {PATIENCE_S:.0f} s and was ended"
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return f"{name} ended with {done.returncode}" + (f" ({lines[-1][:200]})" if done.returncode and lines else "")

    async def _post(self, facts: str) -> str:
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                answer = await client.post(self.url, content=facts, headers={"content-type": "application/json"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{self.url}: {error or type(error).__name__}"
        return f"{self.url} answered {answer.status_code}"
