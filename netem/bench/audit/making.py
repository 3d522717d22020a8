"""Makes the tokens of the bench: each kind of node serves and cheats, what it claims is checked and kept. Resumable.

Must not know how tokens are judged, or flags. One engine's process at a time, and one thread that checks beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio
from torch import nn

from learner.audit.calibration import NodeArithmetic
from learner.audit.deviations import Deviations
from learner.audit.scorer import Claim, score
from netem.bench.audit.cheats import Change, Cheat, cheats, likelier
from netem.bench.audit.nodes import EngineNode, open_node
from netem.bench.audit.store import TokenFiles, claims_of
from netem.bench.audit.world import NOW, World

GROUPS = {"tiny": (64, 16), "chat": (8, 2)}
"""Groups of a batch of honest nodes and of cheats: what is written at once, and lost when the bench is cut off."""

CHEATS_FROM = 500_000_000
"""Number of a cheat's first group: honest nodes never answer these prompts."""

ROUND = 100_000
"""Honest tokens that one kind makes before the next one's turn, beyond the first round: a run that is cut short has all kinds."""

SHORT, SHORT_OF, SHORT_FROM = "honest, short answers", 2, 50_000_000
"""Honest answers that end where a run's do, most of a group alike: one token of them for so many others of the first round, and
the number of the first group is that of the others and so much more."""

HONEST = "honest"
"""Name of the behaviour that is none of the cheats."""


@dataclass(frozen=True, slots=True)
class TokenGoals:
    """How many tokens there are to be: honest ones in sum over all kinds, and of each cheat of each kind."""

    honest: int = 400_000
    cheat: int = 6_000
    mild: int = 18_000
    """of a cheat that may take many to be found"""


def stream_of(world: World, kind: NodeArithmetic, behaviour: str) -> TokenFiles:
    """Where the tokens of that behaviour are kept."""
    name = "".join(c if c.isalnum() else "_" for c in behaviour)
    return TokenFiles(world.tokens / f"{kind.engine}-{kind.dtype}" / name, world)


@dataclass(frozen=True, slots=True)
class TokenMaker:
    """Makes what is missing."""

    world: World
    checker: nn.Module
    goals: TokenGoals
    python: str
    """of vLLM's environment"""
    say: Callable[[str], None]

    async def make(self, kinds: Sequence[NodeArithmetic]) -> None:
        """First each kind's first honest round and its cheats, then the other honest rounds in turns."""
        each = -(-self.goals.honest // len(kinds))
        goal = min(ROUND, each)
        for kind in kinds:
            await self._make_kind(kind, goal)
        while goal < each:
            goal = min(goal + ROUND, each)
            for kind in kinds:
                if self._honest_of(kind).tokens < goal:
                    async with self._open(kind) as node:
                        await self._honest(kind, node, goal)

    def _open(self, kind: NodeArithmetic, top_k: int = 0) -> AbstractAsyncContextManager[EngineNode]:
        return open_node(kind, self.world, self.python, self.world.folder / "engine.log", top_k=top_k)

    def _honest_of(self, kind: NodeArithmetic) -> TokenFiles:
        return stream_of(self.world, kind, HONEST)

    def _goal(self, cheat: Cheat) -> int:
        return self.goals.mild if cheat.mild or cheat.rare else self.goals.cheat

    async def _make_kind(self, kind: NodeArithmetic, honest: int) -> None:
        missing = {
            name: cheat for name, cheat in cheats(self.world.states).items()
            if stream_of(self.world, kind, name).tokens < self._goal(cheat)
        }  # fmt: skip
        short = self._short_goal(honest)
        enough = self._honest_of(kind).tokens >= honest and stream_of(self.world, kind, SHORT).tokens >= short
        if not enough or any(not c.top_k and c.change is None for c in missing.values()):
            async with self._open(kind) as node:
                await self._honest(kind, node, honest)
                await self._short(kind, node, short)
                for name, cheat in missing.items():
                    if not cheat.top_k and cheat.change is None:
                        await self._cheat(kind, node, name, cheat)
        for name, cheat in missing.items():
            if cheat.top_k:
                async with self._open(kind, cheat.top_k) as node:
                    await self._cheat(kind, node, name, cheat)
            elif cheat.change is not None:
                self._changed(kind, name, cheat, cheat.change)

    async def _honest(self, kind: NodeArithmetic, node: EngineNode, goal: int) -> None:
        await node.serve(NOW)
        stream = self._honest_of(kind)
        await self._fill(stream, node.make, stream.next_group or _first_group(kind), goal)
        self.say(f"{kind}: {stream.tokens:,} honest tokens")

    def _short_goal(self, honest: int) -> int:
        return honest // SHORT_OF if self.world.end else 0

    async def _short(self, kind: NodeArithmetic, node: EngineNode, goal: int) -> None:
        stream = stream_of(self.world, kind, SHORT)
        make = partial(node.make, end=self.world.end)
        await self._fill(stream, make, stream.next_group or SHORT_FROM + _first_group(kind), goal)

    async def _cheat(self, kind: NodeArithmetic, node: EngineNode, name: str, cheat: Cheat) -> None:
        await node.serve(cheat.state)

        async def tries(first: int, groups: int) -> list[Claim]:
            made = [await node.make(first, groups, temperature=cheat.temperature, shop=shop) for shop in range(cheat.shop)]
            return made[0] if len(made) == 1 else likelier(made)

        stream = stream_of(self.world, kind, name)
        await self._fill(stream, tries, stream.next_group or CHEATS_FROM, self._goal(cheat))
        self.say(f"{kind}: {name}")

    async def _fill(self, stream: TokenFiles, source: MakesBatch, first: int, goal: int) -> None:
        """Batches until there are `goal` tokens. A batch is checked in a thread while the next one is made."""
        groups, tokens = GROUPS[self.world.name][first >= CHEATS_FROM], stream.tokens
        if tokens >= goal:
            return
        async with trio.open_nursery() as nursery:
            send, receive = trio.open_memory_channel[tuple[int, list[Claim]]](1)

            async def check() -> None:
                async with receive:
                    async for at, claims in receive:
                        stream.add(at, groups, claims, await trio.to_thread.run_sync(score, self.checker, claims))

            nursery.start_soon(check)
            async with send:
                while tokens < goal:
                    claims = await source(first, groups)
                    tokens += sum(len(c.completion_ids) for c in claims)
                    await send.send((first, claims))
                    first += groups

    def _changed(self, kind: NodeArithmetic, name: str, cheat: Cheat, change: Change) -> None:
        """A cheat that changes what honest nodes of this kind made: their first batches."""
        stream = stream_of(self.world, kind, name)
        for path in self._honest_of(kind).batches():
            if stream.tokens >= self._goal(cheat):
                return
            first, _, groups = map(int, path.stem.split("-"))
            made = claims_of(path, self.world)
            claims = change(made, np.random.default_rng(first))
            found = score(self.checker, claims)
            if cheat.rare:
                found = [_said_right(*of) for of in zip(found, claims, made, strict=True)]
            stream.add(first, groups, claims, found)


def _said_right(found: Deviations, claim: Claim, made: Claim) -> Deviations:
    """As if the node had said of each changed token what its log probability is."""
    changed = np.array(claim.completion_ids) != np.array(made.completion_ids)
    return found._replace(claimed=np.where(changed, found.recomputed, found.claimed))


MakesBatch = Callable[[int, int], Awaitable[list[Claim]]]
"""Of the groups from a number on, so many: what a node claims."""


def _first_group(kind: NodeArithmetic) -> int:
    """Each kind answers other prompts: a hundred million groups apart."""
    return 1 + 100_000_000 * ((kind.engine == "vllm") * 2 + (kind.dtype != "float32"))
