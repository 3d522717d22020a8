"""Environments of verifiers v0 (`load_environment`), which verifiers before 0.3 runs, as tasks: one turn, many, and tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.environments.port import EpisodeKey
from learner.tasks.port import Task
from learner.tasks.registry import make_task
from p2p.errors import UsageError
from tests.support.episode_driver import TOKENIZER, open_episodes

CALL = '<tool_call>{"name": "look_up", "arguments": {"number": 4}}</tool_call>'


def words(**options: Any) -> Task:
    return make_task("verifiers:shoal-words-v0", 1, options)


async def test_one_turn_is_scored_by_a_rubric_of_two_functions(installed_old_words: Path) -> None:
    task = words(words=["reef"])
    prompt = task.prompt(0)
    assert prompt.messages == ({"role": "system", "content": "one word"}, {"role": "user", "content": "word 0"})
    assert task.held_out_count == 1 and task.held_out(0).where == "verifiers:shoal-words-v0, held-out row 0"
    async with open_episodes(task) as s:
        right = (await s.says(0, "reef")).score
        assert right is not None and right.reward == 1.5 and right.parts == {"right": 1.0, "letters": 1.0, "num_turns": 1.0}
        wrong = (await s.says(1, "tide")).score
        assert wrong is not None and wrong.reward == 0.125 and wrong.parts["letters"] == 0.25


async def test_many_turns_extend_what_was_sampled(installed_old_words: Path) -> None:
    async with open_episodes(words(kind="multi", words=["kelp"])) as s:
        first = await s.says(0, "rock ")
        assert TOKENIZER.decode(first.given) == "</assistant><user>no, again</user><assistant>"
        done = (await s.says(0, "kelp")).score
        assert done is not None and done.reward == 1.5
        assert s.text(EpisodeKey(1, 0)).endswith("rock <eos></assistant><user>no, again</user><assistant>kelp<eos>")
        await s.says(1, "rock")
        cut = (await s.says(1, "pelk", over="length")).score
        assert cut is not None and cut.reward == 0.5


async def test_tools_are_the_environments_own(installed_old_words: Path) -> None:
    task = words(kind="tool", words=["kelp"])
    assert [tool["function"]["name"] for tool in task.chat_format.tools] == ["look_up"]
    async with open_episodes(task) as s:
        first = await s.says(0, CALL)
        assert TOKENIZER.decode(first.given) == "</assistant><tool>it has 4 letters</tool><assistant>"
        done = (await s.says(0, "kelp")).score
        assert done is not None and done.reward == 1.5 and done.parts["look_up_calls"] == 1.0


def test_what_is_wrong_is_one_line(installed_old_words: Path) -> None:
    with pytest.raises(UsageError, match=r"verifiers:shoal-words-v0 cannot be loaded: .*words\.txt"):
        words(trouble="load")


def test_verifiers_that_has_no_v0_says_so(words_v0: Path) -> None:
    from tests.others.conftest import on_path

    wrong = r"verifiers 0\.4\.0 is installed; environments of v0, .* before 0\.3"
    with on_path(words_v0), pytest.raises(UsageError, match=wrong):
        words()
