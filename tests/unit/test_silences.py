"""Sequences that make no progress for longer than is usual."""

from __future__ import annotations

import pytest

from learner.rollouts.silences import (
    BEGIN_S,
    EARLY_S,
    EARLY_USUALS,
    HELD_UP_S,
    HURRY,
    LEAST_ENDED,
    LONGER,
    LOOKS,
    MANY,
    MANY_S,
    NEARLY_ALL,
    RECENT,
    SLOW_SHARE,
    USUAL,
    USUALS,
    SilenceWatch,
)


def watch_of(*silences: float) -> SilenceWatch:
    """Sequences ended that had been silent for so long each."""
    watch = SilenceWatch()
    for number, silence in enumerate(silences):
        watch.look({"n": {f"{number}": 1}}, 0.0, least=0.0)
        watch.ended("n", f"{number}", silence)
    return watch


def test_who_says_nothing_is_behind_after_some_seconds_and_what_is_usual() -> None:
    watch = watch_of(*[2.0] * LEAST_ENDED)
    assert watch.usual_s == 2.0
    bound = HELD_UP_S + USUALS * 2.0
    assert not watch.behind("n", "a", 6, 99.0, least=0.0) and not watch.begun("n", "a")
    assert not watch.behind("n", "a", 7, 100.0, least=0.0) and watch.begun("n", "a")
    assert not watch.behind("n", "a", 7, 100.0 + bound, least=0.0)
    assert watch.behind("n", "a", 7, 100.5 + bound, least=0.0) == bound + 0.5
    assert not watch.behind("n", "a", 8, 101.0 + bound, least=0.0), "it made a token"


def test_what_is_early_behind_goes_by_the_least_that_was_usual_lately() -> None:
    watch = watch_of(*[0.2] * LEAST_ENDED)
    at_once = EARLY_S + EARLY_USUALS * 0.2
    watch.look({"n": {"a": 0}}, 100.0, least=0.0)
    assert not watch.early("n", "a", 100.0 + at_once) and watch.early("n", "a", 100.1 + at_once)
    assert not watch.early("n", "a", 100.0 + at_once / 3, 1 / 3) and watch.early("n", "a", 100.1 + at_once / 3, 1 / 3)
    assert not watch.early("m", "a", 200.0), "it is not there"
    watch.look({"m": {f"late{number}": 0 for number in range(RECENT)}}, 200.0, least=0.0)
    for number in range(RECENT):  # nearly all nodes are late now
        watch.ended("m", f"late{number}", 203.0)
    assert watch.usual_s > 2.9 and watch.at_once_s == at_once
    for _ in range(LOOKS):
        watch.look({}, 300.0, least=0.0)
    assert watch.at_once_s == EARLY_S + EARLY_USUALS * watch.usual_s, "for five minutes"


def test_what_comes_slowly_is_early_behind_and_is_unlike_others_where_its_node_makes_others_quickly() -> None:
    watch = watch_of(*[0.2] * LEAST_ENDED)
    at_once = EARLY_S + EARLY_USUALS * 0.2
    watch.look({"n": {"slow": 0, "long prompt": 0, "quick": 0, "silent": 0}}, 100.0, least=0.0)

    def look(now: float, **tokens: int) -> None:
        for name, count in tokens.items():
            watch.behind("n", name.replace("_", " "), count, now, least=0.0)

    look(100.5, slow=1, quick=50)
    look(101.0, slow=20, quick=100)
    look(104.0, slow=129, long_prompt=1, quick=400)
    assert not watch.slow("n", "slow", 104.0), "it is not known what is usual"
    for _ in range(LEAST_ENDED):
        watch.made("m", 100, 1.0)
        watch.made("n", 30, 1.0)
    watch.made("m", 0, 1.0)
    watch.made("m", 9, 0.0)
    for _ in range(2):
        watch.made("m", 1000, 1.0)
    assert watch.usual_rate == 100.0
    assert watch.slow("n", "slow", 104.0) and not watch.slow("n", "quick", 104.0)
    assert not watch.slow("n", "silent", 104.0), "it has not begun: that is silence"
    soon = 104.0 + SLOW_SHARE * at_once
    assert not watch.slow("n", "long prompt", soon) and watch.slow("n", "long prompt", soon + 0.1)
    assert watch.slow("n", "long prompt", 104.1 + at_once / 3, 1 / 3) and not watch.slow("n", "gone", 200.0)
    assert not watch.unlike_others("n", "slow", 104.0), "it makes all others at 30 a second"
    for _ in range(LEAST_ENDED):
        watch.made("n", 100, 1.0)
    assert watch.moved_early("n", "slow", 104.0) == (True, True, pytest.approx(4.0 - 1.29))
    assert watch.moved_early("n", "quick", 104.0) == (False, False, 0.0)
    assert watch.moved_early("n", "silent", 100.4) == (False, False, pytest.approx(0.4)), "it was given it then"
    assert watch.moved_early("n", "long prompt", 104.2) == (False, False, pytest.approx(0.19)), "from when it began"
    assert watch.unlike_others("n", "slow", 104.0) and not watch.unlike_others("other", "slow", 104.0)


def test_who_is_late() -> None:
    watch = watch_of(*[0.2] * LEAST_ENDED)
    assert not watch.late("n") and not watch.late("new")
    watch.taken("n")
    assert watch.late("n")
    watch.look({"n": {"a": 0, "b": 0}}, 100.0, least=0.0)
    watch.ended("n", "a", 100.2)
    assert not watch.late("n")
    watch.ended("n", "b", 105.0)
    assert watch.late("n")


def test_a_prompt_may_be_long() -> None:
    watch = watch_of(*[2.0] * LEAST_ENDED)
    bound = BEGIN_S + USUALS * 2.0
    assert not watch.behind("n", "a", 7, 100.0, least=0.0)
    assert not watch.behind("n", "a", 7, 100.0 + bound, least=0.0)
    assert watch.behind("n", "a", 7, 100.5 + bound, least=0.0) == bound + 0.5


def waiting(watch: SilenceWatch, groups: int, nodes: int, until: float) -> None:
    """From 100 on, so many nodes do not begin with sequences of so many groups; it is looked at every second."""
    for at in range(100, int(until) + 1):
        held = {f"n{number}": {f"{number % groups}.{number}.0": 0} for number in range(nodes)}
        watch.look(held, float(at), least=0.0)


def test_where_nearly_all_begin_at_once_and_many_do_not_no_prompt_is_long() -> None:
    few = round(LEAST_ENDED * 5 * (1 - NEARLY_ALL))
    for slow, begin in (few, HELD_UP_S), (few + 1, BEGIN_S):  # engines that pause, now and then or more often
        watch = watch_of(*[0.25] * (LEAST_ENDED * 5 - slow), *[4.0] * slow)
        bound = begin + USUALS * 0.25
        waiting(watch, MANY, MANY, 100.0 + bound + 1)
        assert not watch.behind("n0", "0.0.0", 0, 100.0 + bound, least=0.0)
        assert watch.behind("n0", "0.0.0", 0, 100.5 + bound, least=0.0) == bound + 0.5
    watch = watch_of(*[1.0] * LEAST_ENDED)
    bound = LONGER * 1.0 + USUALS * 1.0
    waiting(watch, MANY, MANY, 100.0 + bound)
    assert HELD_UP_S < LONGER < BEGIN_S and not watch.behind("n0", "0.0.0", 0, 100.0 + bound, least=0.0)
    assert watch.behind("n0", "0.0.0", 0, 100.5 + bound, least=0.0)


def test_one_long_prompt_or_one_node_is_not_many() -> None:
    for groups, nodes in (1, MANY + 1), (MANY, MANY - 1):
        watch = watch_of(*[0.25] * LEAST_ENDED)
        waiting(watch, groups, nodes, 108.0)
        assert not watch.behind("n0", "0.0.0", 0, 100.0 + BEGIN_S + USUALS * 0.25, least=0.0)


def test_a_token_now_and_then_is_no_progress_where_others_make_many() -> None:
    watch = watch_of(*[0.0] * LEAST_ENDED)
    watch.behind("n", "a", -10, -1.0, least=1.25)
    late = [at for at in range(20) if watch.behind("n", "a", at // 2, float(at), least=1.25)]
    assert late[:1] == [4]
    assert not any(watch.behind("n", "b", 2 * at, float(at), least=1.25) for at in range(200))


def test_before_enough_ended_nothing_is_unusual() -> None:
    watch = watch_of(*[0.0] * (LEAST_ENDED - 1))
    assert not watch.behind("n", "a", 1, 0.0, least=0.0) and not watch.behind("n", "a", 1, 1e6, least=0.0)


def test_engines_that_pause_and_queue_are_usual_once_enough_ended_so() -> None:
    most = round(LEAST_ENDED * (1 - USUAL))
    few = watch_of(*[0.0] * (LEAST_ENDED - most), *[60.0] * most)
    many = watch_of(*[0.0] * (LEAST_ENDED - most - 1), *[60.0] * (most + 1))
    assert few.usual_s == 0.0 and many.usual_s == 60.0


def test_what_came_and_went_between_two_looks_was_not_silent() -> None:
    watch = SilenceWatch()
    for number in range(LEAST_ENDED):
        watch.ended("n", str(number), 50.0)
    assert watch.usual_s == 0.0


def test_a_silence_within_a_sequence_counts_as_one_at_its_end() -> None:
    watch = SilenceWatch()
    for number in range(LEAST_ENDED):
        for at, tokens in (0.0, 1), (9.0, 5), (10.0, 9):
            watch.look({"n": {str(number): tokens}}, at, least=0.0)
        watch.ended("n", str(number), 10.5)
    assert watch.usual_s == 9.0


def test_what_is_held_no_more_is_forgotten() -> None:
    """A sequence that comes back to the same node is not silent since its first stay."""
    watch = watch_of(*[0.0] * LEAST_ENDED)
    watch.look({"n": {"a": 3}}, 0.0, least=0.0)
    watch.look({"n": {}}, 50.0, least=0.0)
    assert not watch.behind("n", "a", 3, 100.0, least=0.0)


def test_where_several_nodes_fall_silent_the_others_have_less_patience_for_a_while() -> None:
    watch = watch_of(*[2.0] * LEAST_ENDED)
    short = BEGIN_S * HURRY + USUALS * 2.0
    for number in range(MANY):
        watch.held_up("same", float(number))
    assert not watch.behind("n", "a", 7, 5.0, least=0.0) and not watch.behind("n", "a", 7, 5.5 + short, least=0.0), "one node"
    for number in range(MANY):
        watch.held_up(f"m{number}", 5.0)
    assert not watch.behind("n", "b", 7, 5.0, least=0.0) and not watch.behind("n", "b", 7, 5.0 + short, least=0.0)
    assert watch.behind("n", "b", 7, 5.5 + short, least=0.0)
    later = 5.0 + MANY_S
    assert not watch.behind("n", "c", 7, later, least=0.0) and not watch.behind("n", "c", 7, later + 0.5 + short, least=0.0)


def test_where_many_did_patience_is_shorter_still() -> None:
    watch = watch_of(*[2.0] * LEAST_ENDED)
    shortest = BEGIN_S * HURRY**2 + USUALS * 2.0
    for number in range(MANY * MANY - 1):
        watch.held_up(f"n{number}", 0.0)
    assert not watch.behind("n", "a", 7, 1.0, least=0.0) and not watch.behind("n", "a", 7, 1.5 + shortest, least=0.0)
    watch.held_up("one more", 1.0)
    assert watch.behind("n", "a", 7, 1.5 + shortest, least=0.0) and watch.many(1.0) == 2 and watch.many(1.0 + MANY_S) == 0
