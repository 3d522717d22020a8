"""Probes against a live head with its audits, on a mock clock: nodes are given copies on alert, these are checked and go nowhere
else, and who was found wrong shows by them what it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio

from learner.audit.calibration import Calibration
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.wire import Frames, read_claims, score_answer
from learner.head.audits import Audits
from learner.rollouts.probes import AT_NODE
from learner.standing.wave import ALERT_COMPLETIONS, WAVE_COMPLETIONS
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import Generate, TokenEvent
from tests.attacks.test_withholding import Run, honest, open_run
from tests.swarm.test_head import STOP, Node
from tests.swarm.test_rechecks import SoundAuditor

ODD = 7
"""The token that a cheat writes and no seed draws."""


class OddAuditor(SoundAuditor):
    """All is as it should be, but for each ODD."""

    async def ask(self, request: bytes) -> dict[str, Any]:
        [message] = Frames().feed(request)
        if message["do"] == "follow":
            return {"ok": True}
        await trio.sleep(0.1)

        def found(ids: tuple[int, ...]) -> Deviations:
            odd, even = np.array([float(token == ODD) for token in ids]), np.full(len(ids), -1.0)
            return Deviations(0.6 * odd, even, even, 2.0 * odd)

        parts = [[found(c.completion_ids[c.first : c.stop]) for _, c in of] for of in read_claims(message)]
        asked = message["bfloat16"]
        own = OwnDeviations(found((STOP,) * asked), np.zeros(asked, bool), np.arange(asked, dtype=float))
        [answer] = Frames().feed(score_answer(parts, own, cpu_s=0.0))
        return answer


class Cheat:
    """Each peer of `on` writes ODD once in place of its first token."""

    def __init__(self) -> None:
        self.on = set[str]()
        self.asked: Counter[str] = Counter()

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        self.asked[node.peer] += 1
        if node.peer not in self.on:
            await honest(node, request)
            return
        self.on.remove(node.peer)
        await trio.sleep(0.1)
        event = TokenEvent.of(request.request_id, 0, (ODD, STOP), (-1.0, -1.0), node.version, "stop")
        await node.say(Tokens((event,)))


@asynccontextmanager
async def alerted_run(path: Path, nursery: trio.Nursery, cheats: int = 4) -> AsyncIterator[tuple[Run, Audits, Cheat, list[Node]]]:
    """Two honest nodes and some that turned once, so that there is an alert, and do as others since."""
    async with open_run(path, nursery) as run:
        start: Any = OddAuditor
        audits = Audits(run.bench.head, start, Calibration(), share=0.999, window=3, false_alarm=1e-4)
        run.bench.head.audit(audits)
        nursery.start_soon(audits.run)
        cheat, trust = Cheat(), run.bench.head.trust
        nodes = [await run.join(cheat) for _ in range(cheats)]
        for node in run.nodes:  # they have worked for their standing
            trust.standing.ended(node.peer, 100)
            trust.standing.checked(node.peer, 100)
        assert not run.bench.head.probing.book.counts, "there is no alert yet"
        await trio.sleep(20)
        cheat.on |= {n.peer for n in nodes}
        await run.bench.until(lambda: all(trust.standing.found_wrong(n.peer) for n in nodes), 120)
        assert trust.on_alert()
        yield run, audits, cheat, nodes


async def test_copies_are_checked_and_nothing_of_them_is_trained_on(tmp_path: Path, autojump_clock) -> None:
    async with trio.open_nursery() as nursery, alerted_run(tmp_path, nursery) as (run, audits, _cheat, nodes):
        head, counts = run.bench.head, run.bench.head.probing.book.counts
        before, trained = Counter(counts), Counter(head.trust.trained)
        first = {id(node): len(node.requests) for node in run.nodes}
        refused, told, tell = head.refusals, list[str](), head.trust.ended

        def ended(peer: str, tokens: int) -> None:
            told.append(peer)
            tell(peer, tokens)

        head.trust.ended = ended  # type: ignore[method-assign]
        originals = sum(head.rollouts.rescue.ended.values())
        await run.bench.until(lambda: counts["ended"] >= before["ended"] + 40, 200)
        assert 0 < len(told) <= sum(head.rollouts.rescue.ended.values()) - originals, "copies are no share of a step"
        asked = Counter(r.request_id for node in run.nodes for r in node.requests[first[id(node)] :])
        assert max(asked.values()) > 1, "an original and its copies have one name"
        assert all(len({r.request_id for r in node.requests}) == len(node.requests) for node in run.nodes), "at no node twice"
        assert head.refusals == refused, "nothing of them is a fault"
        checked = audits.plan.counts["checked"]
        assert checked >= 2 * counts["ended"], "all tokens of all copies"
        wrong = {n.peer for n in nodes if head.trust.standing.found_wrong(n.peer)}
        assert all(head.trust.trained[peer] == trained[peer] for peer in wrong)


async def test_who_was_found_wrong_gets_nothing_else_until_enough_was_sound(tmp_path: Path, autojump_clock) -> None:
    async with trio.open_nursery() as nursery, alerted_run(tmp_path, nursery, cheats=6) as (run, _audits, _cheat, nodes):
        head = run.bench.head
        standing, book = head.trust.standing, head.probing.book
        sound, given = Counter[str](), list[str]()
        tell, give = standing.checked, head.rollouts.collector.assign

        def checked(peer: str, tokens: int, *, whole: bool = False) -> None:
            sound[peer] += whole and standing.found_wrong(peer)
            tell(peer, tokens, whole=whole)

        def assign(request_id: str, node: str, now: float = 0.0) -> Generate:
            given.extend([node] * standing.found_wrong(node))
            return give(request_id, node, now)

        standing.checked, head.rollouts.collector.assign = checked, assign  # type: ignore[method-assign]
        with trio.fail_after(600):
            while any(standing.found_wrong(n.peer) for n in nodes):
                assert all(len(book.working(n.peer)) <= AT_NODE for n in nodes)
                await trio.sleep(0.05)
        assert not given
        needed = sorted(sound[n.peer] for n in nodes)  # two were found before it was a wave
        assert needed[2:] == [ALERT_COMPLETIONS] * (len(nodes) - 2) and needed[1] == WAVE_COMPLETIONS
        assert head.trust.on_alert() and not any(node.closed for node in run.nodes)
        before = {n.peer: len(n.requests) for n in nodes}
        await trio.sleep(20)
        assert all(len(n.requests) > before[n.peer] for n in nodes), "they work again"


async def test_a_copy_that_is_wrong_is_stopped_and_its_node_rests(tmp_path: Path, autojump_clock) -> None:
    async with trio.open_nursery() as nursery, alerted_run(tmp_path, nursery) as (run, _audits, cheat, nodes):
        head = run.bench.head
        doubted = {n.peer: head.trust.standing.of(n.peer).doubted for n in nodes}
        await trio.sleep(60)
        cheat.on |= {n.peer for n in nodes}
        await run.bench.until(lambda: all(head.trust.standing.of(n.peer).doubted > doubted[n.peer] for n in nodes), 300)
        asked = Counter(cheat.asked)
        pace = await run.pace(15)
        assert all(cheat.asked[n.peer] <= asked[n.peer] + 1 for n in nodes), "nothing, not even a copy, while it rests"
        assert pace > 1.0
        assert not any(n.closed for n in run.nodes if n.behaviour is honest)
