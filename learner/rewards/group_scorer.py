"""Gives whole groups their rewards: by the task's own score, or by reward functions. A thin shell around the pool of processes.

What an answer is to blame for (code that never ends, say) makes that answer worth nothing. An answer on which a reward function
fails is left out of its group. A group is lost where too few are left, and lost groups in a row stop the run (`lost_groups` says
which count). Must not know nodes (but by name), versions or the journal.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from learner.rewards.built_in import BUILT_IN, JUDGE, BuiltIn, check_built_in, make_built_in
from learner.rewards.combine import Values, checked_values, combined
from learner.rewards.confined import Complaints, ConfinedChild, Subject
from learner.rewards.function_process import FunctionProcess
from learner.rewards.lost_groups import LostGroups
from learner.rewards.pool import ScoringPool, WorkerKind
from learner.rewards.port import Answer, GroupUnscored, NoReward
from learner.rewards.scoring import Scorer, check_confined, check_scoring, child_score, place_of, task_subject
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.port import Prompt, Score, Task, columns_of
from p2p.errors import ShoalError, UsageError

log = logging.getLogger("shoal.scoring")

TELL_S = 10.0
"""Seconds between two log lines about what could not be scored: a function that always raises loses one group after another."""

LEAST = 2
"""Answers with a reward that make a group: one alone is better than nobody."""

InThread = Callable[..., Awaitable[Any]]
"""Calls a blocking function off the event loop: `trio.to_thread.run_sync`, or in tests the call itself."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One job: what a worker is to do about some answers of a group."""

    node: str
    work: Callable[[Any], Sequence[Any]]
    """blocks; one result an answer, in order"""
    answers: int = 1
    """that it is about"""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where results for the answers of a group come from."""

    title: str
    """for messages: "reward function score"; "" of the task's own score"""
    kind: WorkerKind[Any] | None
    """processes that do it; None: our own code, which may run in this process"""
    asked: Callable[[Prompt, Sequence[Answer]], Sequence[_Asked]]
    """the jobs, whose results in a row are those of the answers"""
    function: str = ""
    """as the settings name it; "" of the task's own score"""
    needs: tuple[str, ...] = ()
    """columns that it cannot do without; a function of a person's says so itself, once it is loaded"""
    ours: bool = False
    """its processes run our own program: what they cost is known, so all of them are there before they are needed"""

    @property
    def whole(self) -> bool:
        """Whether it is asked about all answers in one call; known once it was started."""
        first = self.kind.first if self.kind is not None else None
        return isinstance(first, FunctionProcess) and first.whole


class PooledScorer:
    """A group scorer; a context manager, whose processes end with it. Made and entered before the event loop may block on it.

    `in_thread` is for a task's own score that needs no process; one group at a time.
    """

    def __init__(
        self, task: Task, settings: RewardSettings | None = None, *, allow_unconfined: bool = False,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:  # fmt: skip
        self.task, self.settings, self._in_thread = task, settings or RewardSettings(), in_thread
        self._allow_unconfined = allow_unconfined
        self.pool = ScoringPool(self.settings.reward_workers)
        self.lost = LostGroups(self.settings.reward_failures)
        """groups whose reward could not be had; whoever knows which nodes are proven says so there"""
        self._complaints = Complaints()
        self._told = -math.inf
        self._one_at_a_time = trio.Lock()
        self._sources: list[_Source] = []
        if not self.settings.reward:
            self._sources = [self._of_task()]
        for part in self.settings.reward:
            self._sources.append(self._of_part(part))

    def __enter__(self) -> PooledScorer:
        try:
            for source in self._sources:
                if source.kind is not None:
                    worker = self.pool.first(source.kind)
                    if source.ours:
                        self.pool.spare(source.kind)
                    needs = worker.columns if isinstance(worker, FunctionProcess) else source.needs
                    if needs:
                        self.task.need(needs, source.function)
                elif source.needs:
                    self.task.need(source.needs, source.function)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process. Idempotent."""
        self.pool.close()

    @property
    def lost_in_a_row(self) -> int:
        """Groups whose reward could not be had since an answer was scored."""
        return self.lost.in_a_row

    async def score(self, task_index: int, answers: Sequence[Answer]) -> Sequence[Score | NoReward]:
        """See `GroupScorer`."""
        own = self._own_code()
        if own is not None:  # as fast as can be: one call in a thread
            return await self._in_turn(own, lambda: self.task.prompt(task_index), answers)
        prompt = await self._in_thread(self.task.prompt, task_index)
        try:
            scores = await self._scores(prompt, answers)
        except GroupUnscored as error:
            raise self._lost(f"{place_of(prompt)}: {error}", answers) from None
        failed = [(a, s) for a, s in zip(answers, scores, strict=True) if isinstance(s, NoReward)]
        if len(failed) == len(answers):
            raise self._lost(f"{place_of(prompt)}: {failed[0][1].why}", answers)
        self.lost.scored()
        if failed:
            self.lost.failed(a.node for a, _ in failed)
            why = f"{place_of(prompt)}: {failed[0][1].why}"
            if len(answers) - len(failed) < LEAST:
                self._tell("a group is given up and replaced", why)
                raise GroupUnscored(why)
            self._tell(f"{len(failed)} answers of {len(answers)} are left out of their group", why)
        return scores

    async def score_prompt(self, prompt: Prompt, answers: Sequence[Answer]) -> list[Score]:
        """The scores of any prompt that is no group of training's, all of them or GroupUnscored; what is lost counts for
        nothing."""
        own = self._own_code()
        if own is not None:
            return await self._in_turn(own, lambda: prompt, answers)
        try:
            scores = await self._scores(prompt, answers)
        except GroupUnscored as error:
            raise GroupUnscored(f"{place_of(prompt)}: {error}") from None
        for score in scores:
            if isinstance(score, NoReward):
                raise GroupUnscored(f"{place_of(prompt)}: {score.why}")
        return [score for score in scores if isinstance(score, Score)]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _lost(self, why: str, answers: Sequence[Answer]) -> ShoalError:
        self.lost.failed(answer.node for answer in answers)
        most = self.settings.reward_failures
        if self.lost.lost(answer.makers for answer in answers):
            return ShoalError(
                f"{most} groups in a row could not be scored (task.reward_failures = {most}); the last: {why}; "
                f"answers that failed: {self.lost.blame()}"
            )
        self._tell(f"a group is given up and replaced ({self.lost.in_a_row} in a row)", why)
        return GroupUnscored(why)

    def _tell(self, what: str, why: str) -> None:
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            log.warning("%s: %.400s; answers that failed so far: %s", what, ascii(why)[1:-1], self.lost.blame())

    def _own_code(self) -> _Source | None:
        """The task's own score where it is called in this process: a task of a person's may take its time."""
        own = self._sources[0] if not self.settings.reward else None
        return own if own is not None and own.kind is None else None

    async def _in_turn(self, source: _Source, prompt: Callable[[], Prompt], answers: Sequence[Answer]) -> list[Score]:
        def blocking() -> list[Any]:
            return [result for asked in source.asked(prompt(), answers) for result in asked.work(None)]

        async with self._one_at_a_time:
            return list(await self._in_thread(blocking))

    async def _scores(self, prompt: Prompt, answers: Sequence[Answer]) -> list[Score | NoReward]:
        results: list[list[Any]] = [[] for _ in self._sources]
        errors: list[ShoalError] = []

        async def ask(i: int, source: _Source) -> None:
            results[i] = await self._of_makers(source, prompt, answers, errors)

        async with trio.open_nursery() as nursery:
            for i, source in enumerate(self._sources):
                nursery.start_soon(ask, i, source)
        if errors:
            raise errors[0]
        return results[0] if not self.settings.reward else combined(self.settings.reward, results)

    async def _of_makers(
        self, source: _Source, prompt: Prompt, answers: Sequence[Answer], errors: list[ShoalError]
    ) -> list[Any]:
        """As `_results`. Where a call with the whole group fails, it is asked again without those whose answers fail alone; and
        without all but the proven nodes' answers, since a function may need several."""
        results = await self._results(source, prompt, answers, errors)
        by_makers: dict[frozenset[str], list[int]] = {}
        for i, answer in enumerate(answers):
            by_makers.setdefault(answer.makers, []).append(i)
        if errors or not source.whole or len(by_makers) < 2 or not any(isinstance(r, NoReward) for r in results):
            return results
        sound: list[int] = []

        async def alone(those: list[int]) -> None:
            if not any(isinstance(r, NoReward) for r in await self._results(source, prompt, [answers[i] for i in those], errors)):
                sound.extend(those)

        async with trio.open_nursery() as nursery:
            for those in by_makers.values():
                nursery.start_soon(alone, those)
        proven = frozenset(self.lost.proven() if self.lost.proven is not None else ())
        for some in (sorted(sound), [i for i, answer in enumerate(answers) if answer.makers <= proven]):
            if errors or not some or len(some) == len(answers):
                continue
            again = await self._results(source, prompt, [answers[i] for i in some], errors)
            if not any(isinstance(r, NoReward) for r in again):
                said = dict(zip(some, again, strict=True))
                return [said.get(i, result) for i, result in enumerate(results)]
        return results

    async def _results(
        self, source: _Source, prompt: Prompt, answers: Sequence[Answer], errors: list[ShoalError]
    ) -> list[Any]:
        """One result an answer, in order, `NoReward` where there is none. To `errors` goes what costs the whole group, or the
        run. What is under way ends first: to end it would cost processes that other groups need."""
        try:
            jobs = source.asked(prompt, answers)
        except GroupUnscored as error:
            errors.append(GroupUnscored(f"{source.title}: {error}"))
            return []
        found: list[Sequence[Any]] = [()] * len(jobs)

        async def run(i: int, asked: _Asked) -> None:
            try:
                if source.kind is None:
                    found[i] = asked.work(None)
                else:
                    found[i] = await self.pool.run(source.kind, asked.work, asked.node, wanted=lambda: not errors) or ()
            except GroupUnscored as error:
                found[i] = [NoReward(f"{source.title}: {error}")] * asked.answers
            except ShoalError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for i, asked in enumerate(jobs):
                nursery.start_soon(run, i, asked)
        return [result for results in found for result in results]

    def _of_task(self) -> _Source:
        task = self.task
        if task.confined is None:
            scorer = Scorer(task)  # it has no process

            def by_task(prompt: Prompt, answers: Sequence[Answer]) -> list[_Asked]:
                return [_Asked(answer.node, partial(_one, scorer.score, prompt, answer.text)) for answer in answers]

            return _Source("", None, by_task)
        check_scoring(task, allow_unconfined=self._allow_unconfined)
        subject = task_subject(task)

        def by_child(prompt: Prompt, answers: Sequence[Answer]) -> list[_Asked]:
            return [_Asked(a.node, partial(child_score, prompt, a.text, complaints=self._complaints)) for a in answers]

        return _Source("", WorkerKind(partial(self._child, subject)), by_child, ours=True)

    def _of_part(self, part: RewardPart) -> _Source:
        title = f"reward function {part.title}"
        if ":" in part.function or part.function == JUDGE:
            kind = WorkerKind(partial(FunctionProcess, part.function, part.options))
            return _Source(title, kind, partial(self._to_function, kind), part.function)
        check_built_in(part.function)
        of = BUILT_IN[part.function]
        if not of.confined:
            make = make_built_in(part.function, part.options)
            return _Source(title, None, partial(self._to_built_in, make), part.function, of.needs(part.options))
        check_confined(f"reward {part.function}", runs_answers=of.runs_answers, allow_unconfined=self._allow_unconfined)
        setup = {"function": part.function, "options": part.options}
        subject = Subject(f"reward {part.function}", setup, of.runs_answers, of.examined)
        return _Source(
            title, WorkerKind(partial(self._child, subject)), self._to_sandbox, part.function, of.needs(part.options), ours=True
        )

    def _child(self, subject: Subject) -> ConfinedChild:
        return ConfinedChild(subject, allow_unconfined=self._allow_unconfined, answer_s=self.settings.reward_s)

    def _to_built_in(self, function: BuiltIn, prompt: Prompt, answers: Sequence[Answer]) -> list[_Asked]:
        def score(answer: Answer, _: None) -> Values:
            return [None if wanted is None else function.score(wanted, answer.text)]

        try:
            wanted = function.wanted(columns_of(prompt))
        except UsageError as error:
            raise GroupUnscored(str(error)) from None
        return [_Asked(answer.node, partial(score, answer)) for answer in answers]

    def _to_sandbox(self, prompt: Prompt, answers: Sequence[Answer]) -> list[_Asked]:
        columns = columns_of(prompt)

        def score(answer: Answer, child: ConfinedChild) -> Values:
            said = child.ask({"columns": columns, "completion": answer.text})
            if "unscored" in said:
                raise GroupUnscored(str(said["unscored"]))
            reward = said.get("reward", said)
            if reward is None:
                return [None]
            if isinstance(reward, float) and math.isfinite(reward):
                return [reward]
            self._complaints.say(place_of(prompt), str(said.get("error", f"a reward of {reward!r:.40}")))
            return [0.0]

        return [_Asked(answer.node, partial(score, answer)) for answer in answers]

    def _to_function(self, kind: WorkerKind[FunctionProcess], prompt: Prompt, answers: Sequence[Answer]) -> list[_Asked]:
        common = {"prompt": list(prompt.messages) or prompt.text, "chat": prompt.chat, "columns": columns_of(prompt)}
        limit_s = self.settings.reward_s

        def score(some: Sequence[Answer], process: FunctionProcess) -> Values:
            request = {**common, "completions": [a.text for a in some], "ids": [a.ids for a in some]}
            return checked_values(process.ask(request, limit_s * len(some)), len(some))

        if kind.first is not None and kind.first.whole:
            most = Counter(answer.node for answer in answers).most_common(1)
            return [_Asked(most[0][0] if most else "", partial(score, answers), len(answers))]
        return [_Asked(answer.node, partial(score, [answer])) for answer in answers]


def _one(score: Callable[[Prompt, str], Score], prompt: Prompt, text: str, _: None) -> list[Score]:
    return [score(prompt, text)]
