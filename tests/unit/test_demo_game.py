"""The demo's game of several turns: its longest episode fits, and its tokens stand where a small model finds them."""

from __future__ import annotations

from pathlib import Path

from learner.config import build_config
from learner.tasks.guess_digits import GuessDigitsTask, hint
from learner.tasks.registry import open_task
from netem.demo.recipes import RECIPES
from netem.demo.tiny_model import char_tokenizer


def test_the_longest_game_fits_into_a_completion_and_a_step_asks_for_every_secret_once() -> None:
    config = build_config(RECIPES["game"].config(Path("run"), Path("model"), steps=1, seed=4), "test")
    task = open_task(config.task)
    assert isinstance(task, GuessDigitsTask)
    tokenizer = char_tokenizer("".join(task.characters()))
    assert tokenizer.unk_token_id not in tokenizer.encode("".join(task.characters()), add_special_tokens=False)
    turn, answer = len(task.solution(task.prompt(0))) + 1, len(hint("000", "000"))  # a turn ends with the eos token
    assert task.guesses * turn + (task.guesses - 1) * answer == config.rollout.max_new_tokens
    assert config.environment.max_turns >= task.guesses
    secrets = {task.solution(task.prompt(i)) for i in range(config.rollout.groups_per_step)}
    assert len(secrets) == config.rollout.groups_per_step == 3**3


def test_a_hint_stands_as_far_behind_its_guess_as_the_next_guess_behind_the_hint() -> None:
    task = GuessDigitsTask(seed=0, digits=4, symbols=5)
    said = next(t for t in (task.transcript(task.prompt(i)) for i in range(9)) if len(t) > 2)
    places = ""  # one character a token, "." for what ends a turn
    for turn, text in enumerate(said):
        places += text if turn % 2 else text + "."
    guess, its_hint, following = places.index(said[0]), len(said[0]) + 1, len(said[0]) + 1 + len(said[1])
    assert places[its_hint:].startswith(said[1]) and places[following:].startswith(said[2])
    assert its_hint - guess == following - its_hint
