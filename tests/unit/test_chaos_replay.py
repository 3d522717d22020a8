"""An episode played again by its tokens: what fits passes, and each thing that must not happen is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learner.tasks.guess_number import HIGHER, LOWER, SYMBOLS, GuessNumberTask
from learner.trajectory import Gap, Trajectory
from netem.bench.chaos.replay import GameReplay
from netem.demo.tiny_model import char_tokenizer
from p2p.errors import ShoalError
from p2p.protocol.rollout import Span
from p2p.version import Version

TASK = GuessNumberTask(seed=1, numbers=24, guesses=3)
SECRET = TASK.prompt(0).entry["secret"]
TOKENIZER = char_tokenizer("".join(TASK.characters()))
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def won_after(wrong: int) -> Trajectory:
    """One wrong guess, its hint, and the number."""
    hint = LOWER if SECRET < wrong else HIGHER
    return Trajectory(
        prompt_ids=ids("?"), completion_ids=(*ids(SYMBOLS[wrong]), EOS, *ids(hint), *ids(SYMBOLS[SECRET]), EOS),
        logprobs=(-3.0, -0.1, 0.0, -3.0, -0.1), spans=(Span(Version(1, 0), 0, 2), Span(Version(1, 1), 3, 5)), finish="stop",
        node="", seed=7, reward=1 - 0.25 / 3, exact=True, given=(Gap(2, 3),),
    )  # fmt: skip


@pytest.fixture
def replay(tmp_path: Path) -> GameReplay:
    TOKENIZER.save_pretrained(tmp_path)
    return GameReplay(tmp_path, TASK)


def test_an_episode_as_the_game_plays_it_has_its_turns_counted(replay: GameReplay) -> None:
    assert replay.check(0, won_after((SECRET + 5) % 24)) == 2
    babble = replace(
        won_after(0), completion_ids=ids("zz"), logprobs=(-1.0, -1.0), spans=(Span(Version(1, 0), 0, 2),), given=(), reward=0.0,
        exact=False, finish="length",
    )  # fmt: skip
    assert replay.check(0, babble) == 1


def test_what_the_game_does_not_give_is_found(replay: GameReplay) -> None:
    wrong = (SECRET + 5) % 24
    fine = won_after(wrong)
    other_hint = ids(HIGHER if SECRET < wrong else LOWER)
    faults = {
        "answered otherwise": replace(fine, completion_ids=(*fine.completion_ids[:2], *other_hint, *fine.completion_ids[3:])),
        "the game's": replace(fine, reward=1.0),
        "its reward": replace(fine, exact=False),
        "a given token has a log probability": replace(fine, logprobs=(-3.0, -0.1, -0.2, -3.0, -0.1)),
        "leave tokens out": replace(fine, spans=fine.spans[:1]),
    }
    for match, episode in faults.items():
        with pytest.raises(ShoalError, match=match):
            replay.check(0, episode)
    with pytest.raises(ShoalError, match="prompt 1"):  # another prompt's number
        replay.check(1, fine)
