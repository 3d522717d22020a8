"""Strangers who take work and do not do it, against a live head with honest nodes, on a mock clock (findings F1, F3, F4 and F7 of
the first attacks: one that trickles, sybils that withhold, refuse, ask for money, or answer at once with rubbish)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.client.messages import CommitStep
from learner.requests.port import Ask
from p2p.errors import ChannelClosed
from p2p.protocol.generation import GenerateRequest, Interrupt, Rejected, Tokens
from p2p.protocol.prices import Terms
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version
from tests.support.harness import wall
from tests.support.nightly import HOW_MANY, NIGHTLY, cases
from tests.swarm.test_head import Bench, Node, check_books, open_head, publish

STRICT: dict[str, Any] = {"proven_tokens": 60}
"""A proven node has ended some thirty of these short sequences."""

BEGUN_S, MEASURED_S = 30.0, 60.0
"""Seconds from the attack's beginning until steps are counted, and for which they are."""

LEAST = 0.7
"""Share of the honest nodes' own pace that a run must keep."""

TOKEN_S = 0.1
"""Seconds of a token at an honest node: a sequence has two."""

Behaviour = Callable[..., Awaitable[None]]
"""What a node does with a sequence that it is given: told itself, and the request."""


def late(seconds: float) -> Behaviour:
    """All is made as asked, so much later."""

    async def behave(node: Node, request: GenerateRequest) -> None:
        async def make() -> None:
            await trio.sleep(seconds)
            if not node.closed:
                await node.finish(request)

        node.nursery.start_soon(make)

    return behave


async def honest(node: Node, request: GenerateRequest) -> None:
    """Its slots work beside each other."""
    await late(2 * TOKEN_S)(node, request)


async def withhold(node: Node, request: GenerateRequest) -> None:
    pass


async def trickle(node: Node, request: GenerateRequest) -> None:
    """One valid token now and then, and never an end."""

    async def drip() -> None:
        start = 0
        while not node.closed:
            await trio.sleep(4.0)
            event = TokenEvent.of(request.request_id, start, (1,), (-1.0,), node.version)
            try:
                await node.say(Tokens((event,)))
            except ChannelClosed:
                return  # it left meanwhile
            start += 1

    node.nursery.start_soon(drip)


async def refuse(node: Node, request: GenerateRequest) -> None:
    await node.say(Rejected(request.request_id, node.version, "this prompt breaks my engine", retryable=False))


async def fail(node: Node, request: GenerateRequest) -> None:
    await node.say(Tokens((TokenEvent.of(request.request_id, 0, (), (), node.version, "error"),)))


class Run:
    """A trainer that takes steps as fast as groups come, and a version for each."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.steps = bench, 0
        self.nodes: list[Node] = []

    async def train(self) -> None:
        while True:
            await self.bench.batch(self.steps, 600)
            self.steps += 1
            self.bench.head.trainer_requests.on_commit(CommitStep(self.steps, ""))
            await publish(self.bench.head, self.steps)
            for node in self.nodes:
                node.version = Version(1, self.steps)

    async def join(self, behave: Callable[..., Awaitable[None]], **more: Any) -> Node:
        node = await self.bench.join(behave, **more)
        node.version = Version(1, self.steps)
        self.nodes.append(node)
        return node

    async def keep_coming(self, node: Node, behave: Callable[..., Awaitable[None]]) -> None:
        """As soon as it may again."""
        while True:
            await node.until_closed(10_000)
            self.nodes.remove(node)
            while True:
                await trio.sleep(1)
                try:
                    node = await self.bench.again(node, behave)
                except AssertionError:
                    continue  # it is told to come later
                break
            node.version = Version(1, self.steps)
            self.nodes.append(node)

    async def pace(self, seconds: float) -> float:
        """Steps a second over the next seconds."""
        before = self.steps
        await trio.sleep(seconds)
        return (self.steps - before) / seconds


@asynccontextmanager
async def open_run(path: Path, nursery: trio.Nursery, *, honest_nodes: int = 2, **more: Any) -> AsyncIterator[Run]:
    """Two honest nodes of four slots, unless said, and steps of four groups of four."""
    more = {"standing": STRICT, "staleness": 1, "groups_per_step": 4, "samples": 4, "steps": 100_000, "wall": wall} | more
    async with open_head(path / "run", **more) as bench:
        run = Run(bench)
        for _ in range(honest_nodes):
            await run.join(honest)
        nursery.start_soon(run.train)
        yield run
        check_books(bench.head)
        nursery.cancel_scope.cancel()


async def check_pace(path: Path, behave: Callable[..., Awaitable[None]], count: int, *, proven_first: bool = True) -> None:
    """`count` attackers, who come again as soon as they may."""
    async with trio.open_nursery() as nursery, open_run(path, nursery) as run:
        if proven_first:
            await trio.sleep(20)
        alone = await run.pace(MEASURED_S) if proven_first else 0.0
        for _ in range(count):
            node = await run.join(behave)
            nursery.start_soon(run.keep_coming, node, behave)
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        honest_nodes = [n for n in run.nodes if n.behaviour is honest]
        assert len(honest_nodes) == 2 and not any(n.closed for n in honest_nodes)
        if not proven_first:  # the honest nodes' own pace: by now they are proven
            nursery.cancel_scope.cancel()
            async with trio.open_nursery() as second, open_run(path / "alone", second) as other:
                await trio.sleep(20)
                alone = await other.pace(MEASURED_S)
        print(f"{behave.__name__} {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone, f"{under_attack:.2f} steps/s, {alone:.2f} without"


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("behave", cases([withhold, fail], trickle, refuse))
async def test_the_run_keeps_its_pace(tmp_path: Path, autojump_clock, behave, count: int) -> None:
    await check_pace(tmp_path, behave, count)


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("behave", [withhold, trickle] if NIGHTLY else [withhold])
async def test_a_stranger_who_was_there_first_holds_nothing_up_for_long(
    tmp_path: Path, autojump_clock, behave: Behaviour, count: int
) -> None:
    """Nobody is proven yet, and identities that end nothing come before the honest nodes do. From sixteen on, who hold two each,
    they have all that is in flight: the run stood still for `stall_s` twice over."""
    await check_pace_of_newcomers(tmp_path, behave.__name__, behave, count)


async def check_pace_of_newcomers(path: Path, what: str, behave: Behaviour, count: int, **more: Any) -> None:
    """Two honest nodes come 5 s after `count` others, while nobody is proven."""
    more = {"standing": STRICT, "staleness": 1, "groups_per_step": 4, "samples": 4, "steps": 100_000, "wall": wall} | more
    async with trio.open_nursery() as nursery, open_head(path / "run", stall_s=120.0, **more) as bench:
        run = Run(bench)
        for _ in range(count):
            nursery.start_soon(run.keep_coming, await run.join(behave), behave)
        nursery.start_soon(run.train)
        await trio.sleep(5)
        for _ in range(2):
            await run.join(honest)
        await trio.sleep(BEGUN_S)
        pace = await run.pace(MEASURED_S)
        print(f"there first, {what}, {count}: {pace:.2f}")
        assert pace >= LEAST * 1.5  # 32 slots' worth of sequences of 0.2 s, at two nodes of four
        check_books(bench.head)
        nursery.cancel_scope.cancel()


async def drip(node: Node, request: GenerateRequest) -> None:
    """As many tokens as show that it has begun, and no more: 1,024 take half an hour."""

    async def make() -> None:
        start = 0
        while not node.closed:
            await trio.sleep(5.9)
            event = TokenEvent.of(request.request_id, start, (1,) * 3, (-1.0,) * 3, node.version)
            try:
                await node.say(Tokens((event,)))
            except ChannelClosed:
                return  # it left meanwhile
            start += 3

    node.nursery.start_soon(make)


class OneThenLate:
    """Ends one sequence at once and is as good as anybody while nobody is proven; the others after 20 s."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        self._asked[node.peer] += 1
        await (honest if self._asked[node.peer] == 1 else late(20.0))(node, request)


@pytest.mark.parametrize(
    ("what", "count"),
    cases(
        [("one then late", 20)], ("drip", 1), ("drip", 20), ("drip", 60), ("one then late", 1), ("one then late", 8),
        ("one then late", 60),
    ),
)
async def test_who_was_there_first_and_makes_a_little_does_not_keep_all(
    tmp_path: Path, autojump_clock, what: str, count: int
) -> None:
    """Twenty who drip, and eight who had ended one sequence, held all that was in flight: the run stood still."""
    behave: Behaviour = drip if what == "drip" else OneThenLate()
    await check_pace_of_newcomers(tmp_path, what, behave, count, max_new_tokens=1024)


@pytest.mark.skipif(not NIGHTLY, reason="nightly: a minute of sixty nodes")
async def test_sixty_of_all_kinds(tmp_path: Path, autojump_clock) -> None:
    kinds = [withhold, trickle, refuse, fail]
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery) as run:
        await trio.sleep(20)
        alone = await run.pace(MEASURED_S)
        for i in range(60):
            node = await run.join(kinds[i % len(kinds)])
            nursery.start_soon(run.keep_coming, node, kinds[i % len(kinds)])
        await trio.sleep(BEGUN_S)
        assert await run.pace(MEASURED_S) >= LEAST * alone
        assert not any(n.closed for n in run.nodes if n.behaviour is honest)


@pytest.mark.parametrize("count", HOW_MANY)
async def test_who_refuses_a_group_chooses_no_prompt(tmp_path: Path, autojump_clock, count: int) -> None:
    """Eight identities could abort any group whose prompt they had seen (F4)."""
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery) as run:
        for i in range(count):
            kind = (refuse, fail)[i % 2]
            nursery.start_soon(run.keep_coming, await run.join(kind), kind)
        await trio.sleep(90)
        status = run.bench.head.status()["trajectories"]
        print(f"refuse groups, {count}: {run.steps} steps in 90 s, {status['aborted']} aborted")
        assert run.steps > 60 and not status["aborted"]


async def test_who_is_never_paid_spends_nothing(tmp_path: Path, autojump_clock) -> None:
    """Six identities that asked for much and never worked made the head think that its budget was spent (F3)."""
    async with trio.open_nursery() as nursery, open_run(
        tmp_path, nursery, activation={"budget_usd": 1.0, "dwell_s": 5.0}
    ) as run:
        for node in run.nodes:
            await node.say(Terms(0.5, 0.5))
        await trio.sleep(20)
        for _ in range(6):
            node = await run.join(withhold)
            await node.say(Terms(99.0, 99.0))
            nursery.start_soon(run.keep_coming, node, withhold)
        before = run.steps
        await trio.sleep(120)
        pool = run.bench.head.status()["pool"]
        assert run.steps - before > LEAST * 1.5 * 120
        assert "is spent" not in pool["blocked"]
        assert run.bench.head.keeper.pool.spent_usd(trio.current_time()) < 2 * 0.5 * 150 / 3600


async def test_who_installed_nothing_is_given_nothing(tmp_path: Path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", standing=STRICT) as bench:
        node = await bench.join(honest)
        node.digest = b"\0" * len(node.digest)
        node.version = Version(1, 0)
        liar = await bench.join(honest)
        liar.digest = b"\1" * len(liar.digest)
        await trio.sleep(0.05)
        before = len(liar.requests)
        await trio.sleep(20)
        assert len(liar.requests) <= before + 3  # what it was given before its word was heard


async def test_a_version_that_was_never_published_is_refused(tmp_path: Path, autojump_clock) -> None:
    """It made a node eligible for everything (F1)."""
    async with open_head(tmp_path / "run", standing=STRICT) as bench:
        liar = await bench.join(withhold)
        await trio.sleep(3)
        liar.version = Version(1, 1 << 40)
        await liar.until_closed()
        assert any("not published" in text for text in bench.head.reports)
        assert bench.head.swarm.peering.is_banned(liar.peer)


async def test_what_is_asked_back_in_vain_is_taken_by_force(tmp_path: Path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", standing={"trusted": ["*"]}) as bench:
        deaf = await bench.join(withhold)
        await bench.until(lambda: len(deaf.requests) > 1)
        rollouts = bench.head.rollouts
        name = deaf.requests[0].request_id
        rollouts.rescue.ask_back(deaf.peer, [name], trio.current_time())
        await bench.until(lambda: any(isinstance(m, Interrupt) for m in deaf.heard))
        assert name in rollouts.working(deaf.peer)
        await trio.sleep(13)
        assert name not in rollouts.working(deaf.peer)
        assert bench.head.trust.standing.of(deaf.peer).doubted


@pytest.mark.parametrize("count", HOW_MANY)
async def test_what_strangers_make_together_is_bounded(tmp_path: Path, autojump_clock, count: int) -> None:
    """Identities that answer at once, with rubbish of the right form, made 97 % of the tokens (F7)."""
    rules = STRICT | {"proven_tokens": 2000}

    async def at_once(node: Node, request: GenerateRequest) -> None:
        await node.finish(request)

    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, standing=rules) as run:
        honest_peers = {n.peer for n in run.nodes}
        for peer in honest_peers:
            run.bench.head.trust.standing.ended(peer, 2000)
        for _ in range(count):
            await run.join(at_once)
        await trio.sleep(60)
        by_node = run.bench.head.rollouts.collector.tokens_by_node
        strangers = sum(n for peer, n in by_node.items() if peer not in honest_peers)
        share = strangers / sum(by_node.values())
        print(f"at once, {count}: {share:.2f} of the tokens")
        assert share < 0.3  # unproven_share is a quarter


async def test_what_is_made_for_requests_counts_as_well(tmp_path: Path, autojump_clock) -> None:
    """A run whose trainer samples through the endpoint has no other sequences."""
    async with open_head(tmp_path / "run", standing=STRICT, groups_per_step=0) as bench:
        node = await bench.join(honest, capacity=16)
        ask = Ask(request_class="serving", prompt_ids=(1, 2, 3), max_new_tokens=4, stop_ids=(0,), seed=5)
        for _ in range(20):
            async with bench.head.requests.sample(ask) as tokens:
                async for _run in tokens:
                    pass
        assert bench.head.trust.standing.of(node.peer).delivered >= 40
        assert bench.head.trust.standing.may_hold(node.peer, 16) == 16


async def ask_many(bench: Bench, count: int) -> list[float]:
    """Seconds until each of so many requests was answered."""
    took: list[float] = []
    began = trio.current_time()

    async def one(seed: int) -> None:
        ask = Ask(request_class="serving", prompt_ids=(1, 2, 3), max_new_tokens=4, stop_ids=(0,), seed=seed)
        async with bench.head.requests.sample(ask) as tokens:
            async for _run in tokens:
                pass
        took.append(trio.current_time() - began)

    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for seed in range(count):
                nursery.start_soon(one, seed)
    return took


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("behave", [withhold, refuse])
async def test_requests_go_on_beside_strangers(tmp_path: Path, autojump_clock, behave, count: int) -> None:
    """A stranger that said it could hold 4,096 held all the endpoint's requests for `stall_s`; three that refused failed them."""
    async with open_head(tmp_path / "run", standing=STRICT, groups_per_step=0, stall_s=120.0, wall=wall) as bench:
        nodes = [await bench.join(honest, capacity=4) for _ in range(2)]
        for node in nodes:
            bench.head.trust.standing.ended(node.peer, 4000)
        alone = max(await ask_many(bench, 256))
        for _ in range(count):
            await bench.join(behave, capacity=4096)
        await trio.sleep(3)
        first = max(await ask_many(bench, 256))
        under_attack = max(await ask_many(bench, 256))
        print(f"requests, {behave.__name__} {count}: {first:.1f} and {under_attack:.1f} s, {alone:.1f} alone")
        assert under_attack <= alone / LEAST and first <= alone / LEAST + BEGUN_S


async def test_who_ends_what_others_made_is_not_credited_with_it(tmp_path: Path, autojump_clock) -> None:
    """A request of which another node had made thirty tokens."""

    async def begins(node: Node, request: GenerateRequest) -> None:
        if len(node.requests) == 1:
            await node.say(Tokens((TokenEvent.of(request.request_id, 0, (1,) * 30, (-1.0,) * 30, node.version),)))

    async def ends(node: Node, request: GenerateRequest) -> None:
        start = len(request.prefix_ids) // 4
        await node.say(Tokens((TokenEvent.of(request.request_id, start, (0,), (-1.0,), node.version, "stop"),)))

    async with open_head(tmp_path / "run", standing=STRICT, groups_per_step=0, stall_s=10.0) as bench:
        first = await bench.join(begins, capacity=4)
        ask = Ask(request_class="serving", prompt_ids=(1, 2, 3), max_new_tokens=64, stop_ids=(0,), seed=5)
        async with bench.head.requests.sample(ask) as tokens:
            await bench.until(lambda: bool(first.requests))
            second = await bench.join(ends, capacity=4)
            assert len([t async for run in tokens for t in run.ids]) == 31
        assert bench.head.trust.standing.of(second.peer).delivered == 1
