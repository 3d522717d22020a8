"""Runs the evaluations beside training: asks for their sequences, has the answers scored, writes what was found. A thin shell.

When one is due and what it asks for is `plan`'s, what the answers say is `result`'s. Each evaluation runs by itself, one version
at a time. Nothing here makes the trainer wait, and nothing that goes wrong here ends the run. Must not know nodes, the journal
or how a request reaches a node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import trio

from learner.evaluation.episode import EpisodeLost
from learner.evaluation.plan import Schedule, Wanted, wanted
from learner.evaluation.problems import Evaluation
from learner.evaluation.result import EvalOutcome, EvalTally, SampledAnswer, better
from learner.requests.port import Ask, Busy, NoSuchVersion, Requests
from learner.rewards.port import Answer
from p2p.errors import ShoalError
from p2p.version import Version

log = logging.getLogger("shoal.evaluation")

LOOK_S = 0.25
"""Seconds between two looks whether an evaluation is due: a first version may be replaced a second after it is served."""

IN_FLIGHT = 256
"""Sequences of one evaluation that are asked for at once: more than a few nodes decode together, few enough that thousands of
prompts are not all held by nodes at a time."""

SCORED_AT_ONCE = 16
"""Prompts of one evaluation whose answers are being scored at once: those that wait cost memory, and no slot of a node."""

ATTEMPTS = 4
"""Versions that one evaluation is tried with. Where no node serves a version for long enough, a fifth would fare no better."""

BUSY_S = (0.25, 8.0)
"""Seconds until a request that was not taken is tried again; doubled each time up to the second number."""

TRIES = 2
"""How often a sequence is asked for that could not be made: the first time it may have waited for a place for too long."""

LATER_S = 0.5
"""Seconds until a version that nodes may yet come to serve is asked for again."""

STALL_S = 600.0
"""Seconds without a token or a score after which an attempt is given up: requests of this class wait behind training, so it is
longer than a busy swarm makes them wait."""

NEWER_S = 120.0
"""Seconds that a cut evaluation waits for another version to be served before it makes do with what it has."""

END_S = 1800.0
"""Seconds that the last evaluations may take when training is complete. The run's end waits for them."""

NOBODY_S = 30.0
"""Seconds without a node that serves the last version, or is on its way to it, after which the run ends without an evaluation."""


class EvaluationProgress:
    """An evaluation while it runs, and its schedule."""

    def __init__(self, evaluation: Evaluation, schedule: Schedule) -> None:
        self.evaluation, self.schedule = evaluation, schedule
        self.version: Version | None = None
        """that is evaluated now"""
        self.sequences = 0
        """that have ended, of this version"""
        self.moved = 0.0
        """when the last token or score came"""

    def describe(self) -> dict[str, Any]:
        """Plain values for the status page."""
        plan = self.evaluation.plan
        return {
            "name": plan.name, "version": str(self.version), "sequences": self.sequences, "of": plan.prompts * plan.samples,
        }  # fmt: skip


class Evaluations:
    """All evaluations of a run. `served()` is the newest version that nodes serve, None while none do; `write(result)` keeps
    what was found."""

    def __init__(
        self, evaluations: Iterable[tuple[Evaluation, Schedule]], requests: Requests, *, served: Callable[[], Version | None],
        write: Callable[[EvalOutcome], None], now: Callable[[], float] = trio.current_time,
    ) -> None:  # fmt: skip
        self._all = [EvaluationProgress(evaluation, schedule) for evaluation, schedule in evaluations]
        self._requests, self._served, self._write, self._now = requests, served, write, now

    def running(self) -> list[dict[str, Any]]:
        """Those that run now, for the status page."""
        return [one.describe() for one in self._all if one.version is not None]

    async def run(self) -> None:
        """For ever: evaluate what is due."""
        async with trio.open_nursery() as nursery:
            for one in self._all:
                nursery.start_soon(self._keep, one)

    async def settled(self, hope: Callable[[], bool]) -> None:
        """When training is complete: until the evaluations of the last version are done, or there is no hope. `hope()`: whether a
        node is there that serves the last version, or is on its way to it."""
        since = self._now()
        if self._open():
            log.info("training is complete; the run ends after %s of the last version", _names(self._open()))
        with trio.move_on_after(END_S) as scope:
            while self._open():
                since = self._now() if hope() else since
                if self._now() - since > NOBODY_S:
                    log.warning("no node serves the last version: the run ends without %s of it", _names(self._open()))
                    return
                await trio.sleep(LOOK_S)
        if scope.cancelled_caught:
            log.warning("%s took longer than %.0f s after training: the run ends without", _names(self._open()), END_S)

    def _open(self) -> list[EvaluationProgress]:
        return [one for one in self._all if not one.schedule.ended]

    async def _keep(self, one: EvaluationProgress) -> None:
        while True:
            version = self._served()
            if version is not None and one.schedule.due(version.step):
                try:
                    await self._evaluate(one, version)
                except Exception:  # of a person's task, say: no evaluation ends a run
                    log.exception("%s of version %s failed; the run goes on", one.evaluation.plan.called, version)
                    one.schedule.took(version.step)
            else:
                await trio.sleep(LOOK_S)

    async def _evaluate(self, one: EvaluationProgress, version: Version) -> None:
        """One evaluation, of this version or of a newer one."""
        plan, best, began, lost = one.evaluation.plan, None, self._now(), 0
        for attempt in range(1, ATTEMPTS + 1):
            one.version = version
            try:
                tally, why = await self._attempt(one, version)
            finally:
                one.version = None
            best, lost = better(best, tally.result(self._now() - began)), tally.lost
            newer = await self._other_version(version) if why and attempt < ATTEMPTS else None
            if newer is None:
                if why:
                    log.warning("%s was cut at version %s: %s", plan.called, version, why)
                break
            log.info("%s begins anew with version %s: of %s it was cut (%s)", plan.called, newer, version, why)
            version = newer
        one.schedule.took(version.step)
        if best is None:
            scored = f"the answers to {lost} prompts could not be scored" if lost else ""
            log.warning("%s found nothing: %s", plan.called, scored or f"no prompt was answered {plan.samples} times")
            return
        log.log(logging.INFO if best.whole else logging.WARNING, "%s", best.sentence())
        self._write(best)

    async def _other_version(self, version: Version) -> Version | None:
        with trio.move_on_after(NEWER_S):
            while True:
                served = self._served()
                if served is not None and served > version:
                    return served
                await trio.sleep(LOOK_S)
        return None

    async def _attempt(self, one: EvaluationProgress, version: Version) -> tuple[EvalTally, str]:
        """What was found at one version, and why it is not all: "" when nothing more is to be had."""
        attempt = _Attempt(one, version, self._requests, served=self._served, now=self._now)
        await attempt.run()
        return attempt.tally, attempt.cut


class _Attempt:
    """One evaluation at one version."""

    def __init__(
        self, one: EvaluationProgress, version: Version, requests: Requests, *, served: Callable[[], Version | None],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._one, self._requests, self._served, self._now = one, requests, served, now
        self._evaluation, self._version = one.evaluation, version
        self.tally = EvalTally(one.evaluation.plan, version)
        self.cut = ""
        self._left = wanted(one.evaluation.plan, one.evaluation.prompt_ids, version)
        self._scoring = trio.CapacityLimiter(SCORED_AT_ONCE)
        self._all = trio.CancelScope()
        self._complained = False
        player = one.evaluation.player
        self._stall_s = STALL_S + (player.turn_s if player is not None else 0.0)  # all may wait for a slow environment
        one.sequences, one.moved = 0, now()

    async def run(self) -> None:
        plan = self._evaluation.plan
        with self._all:
            async with trio.open_nursery() as watch:
                watch.start_soon(self._watch)
                async with trio.open_nursery() as nursery:
                    for _ in range(min(IN_FLIGHT, plan.prompts * plan.samples)):
                        nursery.start_soon(self._ask_for_more, nursery)
                watch.cancel_scope.cancel()

    async def _watch(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            if self._now() - self._one.moved > self._stall_s:
                self._end(f"no token came for {self._stall_s:.0f} s")

    def _end(self, why: str) -> None:
        self.cut = self.cut or why
        self._all.cancel()

    async def _ask_for_more(self, nursery: trio.Nursery) -> None:
        for one in self._left:
            answer = await self._answer(one)
            if answer is None:
                continue
            self._one.sequences += 1
            answers = self.tally.answered(one.prompt, one.sample, answer)
            if answers:
                nursery.start_soon(self._score, one.prompt, answers)

    async def _answer(self, one: Wanted) -> SampledAnswer | None:
        """The sequence's tokens, or the whole episode's. None when it cannot be had, of this version."""
        player = self._evaluation.player
        if player is None:
            return await self._turn(one.ask)
        try:
            return await player.play(one.prompt, one.ask, self._turn, self._heard)
        except EpisodeLost as error:
            self._complain(f"prompt {one.prompt} is not scored: {error}")
            return None

    def _heard(self) -> None:
        self._one.moved = self._now()

    async def _turn(self, ask: Ask) -> SampledAnswer | None:
        """The tokens that are asked for. None when they cannot be had, of this version."""
        pause, tries = BUSY_S[0], 0
        while True:
            try:
                return await self._sample(ask)
            except Busy:
                await trio.sleep(pause)
                pause = min(2 * pause, BUSY_S[1])
            except NoSuchVersion as error:
                newest = self._served()
                if not error.later or (newest is not None and newest > self._version):
                    self._end(str(error))
                    return None
                await trio.sleep(LATER_S)
            except ShoalError as error:
                tries += 1
                if tries >= TRIES:
                    self._complain(f"a sequence cannot be made: {error}")
                    return None

    async def _sample(self, ask: Ask) -> SampledAnswer:
        ids: list[int] = []
        finish = ""
        async with self._requests.sample(ask) as pieces:
            async for made in pieces:
                if made.ids and made.version != self._version:
                    raise ShoalError(f"a token of version {made.version}, and {self._version} was asked for")
                ids += made.ids
                finish = made.finish
                self._heard()
                if finish:
                    break
        if not finish:
            raise ShoalError("its tokens ended before it did")
        return SampledAnswer(tuple(ids), finish)

    async def _score(self, prompt: int, answers: Sequence[SampledAnswer]) -> None:
        async with self._scoring:
            try:
                own = [answer.score for answer in answers if answer.score is not None]
                if own:
                    self.tally.scored(prompt, own)
                    return
                told = [Answer(self._evaluation.text(answer.ids), "", answer.ids) for answer in answers]
                self.tally.scored(prompt, await self._evaluation.score(self._evaluation.problems[prompt], told))
            except Exception as error:  # of a reward function, which may be anybody's: it costs this prompt
                self.tally.unscored(prompt)
                self._complain(f"prompt {prompt} is not scored: {type(error).__name__}: {error}")
            self._heard()

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("%s of version %s: %.300s (said once)", self._evaluation.plan.called, self._version, what)


def _names(those: Iterable[EvaluationProgress]) -> str:
    return ", ".join(one.evaluation.plan.called for one in those)
