"""Installed environments of verifiers as tasks, through the processes that run episodes. Somebody's sampling stands for nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.environments.port import Episode, EpisodeKey, Turn
from learner.environments.running import set_environment
from learner.environments.settings import EnvironmentSection
from learner.tasks.port import EpisodeEnd, Task
from learner.tasks.registry import make_task
from p2p.errors import UsageError
from tests.support.episode_driver import PATIENCE_S, TOKENIZER, open_episodes

LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}
"""verifiers runs programs in somebody's cloud unless it is told otherwise."""

CALL = '<tool_call>{"name": "look_up", "arguments": {"number": 4}}</tool_call>'


def words(**taskset: Any) -> Task:
    return make_task("verifiers:shoal-words-v1", 1, {**LOCAL, "shoal": {"held_out": 0}, "taskset": taskset})


def place(task: Task, row: int) -> int:
    """The problem that is made of a row."""
    return next(i for i in range(100) if task.prompt(i).entry["row"] == row)


async def test_one_turn_is_scored_by_the_environment(installed_words: Path) -> None:
    task = words()
    assert sorted(task.prompt(i).where for i in range(3)) == [f"verifiers:shoal-words-v1, row {i}" for i in range(3)]
    again = words()
    assert [task.prompt(i) for i in range(9)] == [again.prompt(i) for i in range(9)] and task.fingerprint == again.fingerprint
    reef = place(task, 1)
    assert task.prompt(reef).messages == ({"role": "system", "content": "one word"}, {"role": "user", "content": "word 1"})
    async with open_episodes(task) as s:
        right = await s.says(0, "reef", index=reef)
        assert right.score is not None and right.score.reward == 1.5 and right.score.exact
        assert right.score.parts == {"right": 1.0, "letters": 1.0}, "each function's value, before its weight"
        wrong = await s.says(1, "tide", index=reef)
        assert wrong.score is not None and wrong.score.reward == 0.125 and wrong.score.parts == {"right": 0.0, "letters": 0.25}


async def test_the_sandbox_is_refused(installed_words: Path) -> None:
    with pytest.raises(UsageError, match=r'run = "sandbox", and task verifiers:shoal-words-v1 cannot run there: verifiers'):
        set_environment(words(), EnvironmentSection(run="sandbox"))
    set_environment(words(), EnvironmentSection())


async def test_many_turns_extend_what_was_sampled_and_survive_a_killed_process(installed_words: Path) -> None:
    task = words(kind="again", words=["kelp"])
    async with open_episodes(task) as s:
        first = await s.says(0, "rock ")  # a client may strip it: the ids stay
        assert TOKENIZER.decode(first.given) == "</assistant><user>no, again</user><assistant>"
        pid = s.host.pids[0]
        os.kill(pid, signal.SIGKILL)
        second = await s.says(0, "moss")
        assert second.given == first.given and s.host.pids != [pid], "it was set back in a fresh process"
        done = await s.says(0, "kelp")
        assert done.score is not None and done.score.reward == 1.5
        assert s.text(EpisodeKey(1, 0)) == (
            "<system>one word</system><user>word 0</user><assistant>rock <eos></assistant><user>no, again</user>"
            "<assistant>moss<eos></assistant><user>no, again</user><assistant>kelp<eos>"
        )


async def test_tools_are_the_environments_own(installed_words: Path) -> None:
    task = words(kind="tool", words=["kelp"])
    assert [tool["function"]["name"] for tool in task.chat_format.tools] == ["look_up"]
    async with open_episodes(task) as s:
        first = await s.says(0, "I ask. " + CALL)
        assert TOKENIZER.decode(first.given) == "</assistant><tool>it has 4 letters</tool><assistant>"
        done = await s.says(0, "kelp")
        assert done.score is not None and done.score.reward == 1.5
        assert done.score.end == EpisodeEnd(), "its own tools' calls are not counted"
        assert "<tool>{" in s.text(EpisodeKey(1, 0)).partition("<system>")[0], "the model was told of the tool"
        plain = await s.says(1, "<tool_call>{nonsense</tool_call>")
        assert plain.score is not None and plain.score.parts["right"] == 0.0


async def test_a_streamed_call_is_a_turn_too(installed_words: Path) -> None:
    async with open_episodes(words(kind="stream", words=["reef"])) as s:
        done = await s.says(0, "reef")
        assert done.score is not None and done.score.reward == 1.5


@pytest.mark.parametrize("over", ["length", "turns", "time"])
async def test_an_episode_that_a_limit_ends_is_scored_as_it_stands(over: str, installed_words: Path) -> None:
    async with open_episodes(words(kind="again", words=["kelp"])) as s:
        await s.says(0, "rock")
        done = await s.says(0, "pelk", over=over)
        assert done.score is not None and done.score.reward == 0.5 and done.score.parts == {"right": 0.0, "letters": 1.0}
        waiting = await s.says(1, "pelk")
        key = EpisodeKey(1, 1)
        assert waiting.given
        s.host.respond(Episode(key, 0, unanswered(s.turns[key]), over))
        with trio.fail_after(PATIENCE_S):
            answer = await s.host.answers.receive()
        assert answer.score is not None and answer.score.reward == 0.5, "no turn was under way"


def unanswered(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return (*turns[:-1], turns[-1]._replace(given=()))


@pytest.mark.parametrize(
    ("taskset", "turns", "why"),
    [
        ({"trouble": "reward"}, 1, ("KeyError: 'no such word'",)),
        ({"kind": "rewrite"}, 1, ("rewrites what was said (message 2, user)",)),
        # Which of the two is seen depends on whether the second call comes before the first is answered.
        ({"kind": "parallel"}, 2, ("calls at once are not supported", "rewrites what was said")),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
async def test_what_goes_wrong_names_environment_and_row(
    taskset: dict[str, Any], turns: int, why: tuple[str, ...], installed_words: Path
) -> None:
    async with open_episodes(words(words=["kelp"], **taskset)) as s:
        for turn in range(1, turns):
            assert (await s.says(0, "rock")).given, turn
        failed = (await s.says(0, "rock")).failed
        assert f"verifiers:shoal-words-v1, row 0, turn {turns}: " in failed and "\n" not in failed
        assert any(one in failed for one in why), failed


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("shoal-wrods-v1", {}, "no module 'shoal_wrods_v1' is installed; did you mean"),
        ("shoal-words-v1", {"taskset": {"trouble": "load"}}, "FileNotFoundError: words.txt"),
        ("shoal-words-v1", {"taskset": {"kind": "never"}}, "kind"),
        ("shoal-words-v1", {"shoal": {"tool_praser": "x"}}, "no option shoal.tool_praser; did you mean"),
        ("shoal-words-v1", {"shoal": {"tool_parser": "hermse"}}, "tool_parser = 'hermse' is not known"),
        ("shoal-words-v1", {"taskset": {"words": []}}, "it has no rows"),
    ],
)
def test_what_is_wrong_with_a_task_is_one_line(name: str, options: dict[str, Any], why: str, installed_words: Path) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        make_task(f"verifiers:{name}", 1, {**LOCAL, **options})
    text = str(caught.value)
    assert f"verifiers:{name}" in text and "\n" not in text, text


def test_rows_are_held_out_by_their_prompt_alone(installed_words: Path) -> None:
    few = make_task("verifiers:shoal-words-v1", 1, {**LOCAL, "shoal": {"held_out": 0.5}, "taskset": {"words": ["a"] * 20}})
    more = make_task("verifiers:shoal-words-v1", 1, {**LOCAL, "shoal": {"held_out": 0.5}, "taskset": {"words": ["a"] * 30}})
    assert few.held_out_count is not None and 0 < few.held_out_count < 20
    held = {few.held_out(i).text for i in range(few.held_out_count)}
    train = {few.prompt(i).text for i in range(100)}
    assert len(held | train) == 20 and not held & train
    assert held < {more.held_out(i).text for i in range(more.held_out_count or 0)}
    assert few.held_out(0).held_out
