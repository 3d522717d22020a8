"""Tasks: deterministic, held-out apart from training, scores that never raise."""

from __future__ import annotations

import hashlib
import sys

import pytest

from learner.tasks.registry import make_task
from p2p.errors import UsageError

NAMES = ("reverse", "add", "reasoning_gym:basic_arithmetic")


@pytest.mark.parametrize("name", NAMES)
def test_problems_depend_on_seed_and_index_alone(name: str) -> None:
    a, b, other = make_task(name, 7), make_task(name, 7), make_task(name, 8)
    texts = [a.prompt(i).text for i in range(20)]
    assert texts == [b.prompt(i).text for i in reversed(range(20))][::-1]
    assert texts != [other.prompt(i).text for i in range(20)]


def test_problems_are_the_same_in_every_release() -> None:
    texts = "\n".join(make_task("reverse", 0).prompt(i).text for i in range(100))
    assert make_task("reverse", 0).prompt(0).text == "199740>"
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "e2745085844073f6"


def test_the_game_asks_for_each_number_once_in_a_round() -> None:
    task = make_task("guess_number", 3, {"numbers": 24, "guesses": 6})
    rounds = [[task.prompt(r * 24 + i).entry["secret"] for i in range(24)] for r in range(4)]
    assert all(sorted(secrets) == list(range(24)) for secrets in rounds) and len({tuple(s) for s in rounds}) == 4
    assert rounds[0] != [make_task("guess_number", 4, {"numbers": 24}).prompt(i).entry["secret"] for i in range(24)]
    assert task.prompt(5).text == task.prompt(6).text  # nothing but the hints tells it


def test_the_game_of_digits_asks_for_each_secret_once_in_a_round_and_its_blind_player_only_knows_the_form() -> None:
    task = make_task("guess_digits", 3, {"digits": 2, "symbols": 3, "guesses": 4})
    rounds = [[task.prompt(r * 9 + i).entry["secret"] for i in range(9)] for r in range(4)]
    assert all(sorted(r) == sorted(a + b for a in "012" for b in "012") for r in rounds) and len({tuple(r) for r in rounds}) == 4
    assert rounds[0] != [make_task("guess_digits", 4, {"digits": 2}).prompt(i).entry["secret"] for i in range(9)]
    found = 0
    for index in range(2000):
        secret, said = task.prompt(index).entry["secret"], task.transcript(task.prompt(index))
        found += said[-1] == secret
        guesses, hints = said[::2], said[1::2]
        assert len(guesses) == len(hints) + 1 <= 4 and set("".join(said)) <= set(task.characters())
        for guess, answer in zip(guesses, hints, strict=False):
            assert answer == "".join(g if g == s else "abc"[int(g)] for g, s in zip(guess, secret, strict=True)) + "?"
    assert found / 2000 == pytest.approx(1 - (8 / 9) ** 4, abs=0.04)


@pytest.mark.parametrize("name", ["reverse", "add"])
def test_held_out_never_meets_training(name: str) -> None:
    task = make_task(name, 3)
    training = {task.prompt(i).text for i in range(3000)} | {task.prompt(10**9 + i).text for i in range(1000)}
    assert not training & {make_task(name, seed).held_out(i).text for seed in (3, 4) for i in range(300)}


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_scores_one_and_babble_less(name: str) -> None:
    task = make_task(name, 1)
    for index in range(10):
        for prompt in (task.prompt(index), task.held_out(index)):
            solution = task.solution(prompt)
            assert solution is not None
            assert task.score(prompt, solution) == type(task.score(prompt, solution))(1.0, True)
            for babble in ("", "zzz", "\x00<answer></answer>", "9" * 500):
                score = task.score(prompt, babble)
                assert 0.0 <= score.reward < 1.0 and not score.exact


def test_reverse_gives_half_for_positions() -> None:
    task = make_task("reverse", 0)
    prompt = task.prompt(0)
    assert prompt.text == "199740>" and task.solution(prompt) == "047991"
    assert task.score(prompt, "047000").reward == pytest.approx(0.25)
    assert task.score(prompt, "0479911").reward == pytest.approx(0.5)  # all places, one too many: not exact
    assert set(prompt.text + "047991") <= set(task.characters())


def test_only_our_own_scorers_run_in_the_learner() -> None:
    assert make_task("reverse").confined is None and make_task("add").confined is None
    task = make_task("reasoning_gym:basic_arithmetic", 4, {"size": 50, "min_terms": 2})
    confined = task.confined
    assert confined is not None
    again = make_task(confined.name, confined.seed, confined.options)
    assert again.confined == confined
    for i in (0, 3):
        assert again.prompt(i) == task.prompt(i) and again.held_out(i) == task.held_out(i)
    assert task.held_out(3).held_out and not task.prompt(3).held_out


def test_reasoning_gym_answers_come_from_tags() -> None:
    task = make_task("reasoning_gym:basic_arithmetic", 1, {"chat": False})
    prompt = task.prompt(0)
    assert not prompt.chat
    assert task.score(prompt, f"so <answer> {task.solution(prompt)} </answer>").exact


def test_a_package_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"needs the package reasoning-gym.*pip install '\.\[reasoning-gym\]'"):
        make_task("reasoning_gym:basic_arithmetic")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("guess_digits", {"digits": 9}, "digits = 9 is not within 1..8"),
        ("guess_digits", {"symbols": 11}, "symbols = 11 is not within 2..10"),
        ("guess_digits", {"guesses": 0}, "guesses = 0 is not within 1..20"),
        ("guess_digits", {"digits": 5, "symbols": 10}, r"10 symbols \*\* 5 digits are more than 10000 secrets"),
        ("chess", {}, "reverse, add, guess_number, guess_digits, data, reasoning_gym:DATASET"),
        ("reverse:6", {}, "unknown task"),
        ("reverse", {"digit": 6}, "digit"),
        ("reverse", {"digits": 2}, "within 3..18"),
        ("reasoning_gym:nope", {}, "nope"),
        ("reasoning_gym:basic_arithmetic", {"nope": 1}, "nope"),
        ("reasoning_gym:basic_arithmetic", {"seed": 3}, "task.seed"),
        ("reasoning_gym:basic_arithmetic", {"dataset": "x"}, "task.name"),
        ("reasoning_gym:basic_arithmetic", {"size": 0}, "size = 0"),
        ("reasoning_gym:basic_arithmetic", {"size": True}, "size = True"),
        ("reasoning_gym:basic_arithmetic", {"size": "many"}, "size = 'many'"),
        ("reasoning_gym:basic_arithmetic", {"chat": 1}, "chat = 1"),
        ("reasoning_gym:basic_arithmetic", {"min_terms": "few"}, "min_terms|str"),
        ("reasoning_gym:basic_arithmetic", {"operators": ["?"]}, "reasoning_gym:basic_arithmetic"),
        ("reasoning_gym:composite", {}, "dataset"),
        ("reverse", {"seed": 3}, "task.seed"),
        ("reverse", {"digits": "three"}, "digits"),
    ],
)
def test_usage_errors(name: str, options: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make_task(name, 0, options)
