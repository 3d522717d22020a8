"""How long nodes whose word does not count keep what the trainer waits for."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import count

from learner.rollouts.hedging import Hedge
from learner.rollouts.strangers_time import LEAST_S, MOST_PAUSE_S, SHARE, USUALS, StrangersTime

USUAL_S = 1.0
TIME_S = USUALS * USUAL_S


def known(usual_s: float = USUAL_S) -> StrangersTime:
    time = StrangersTime()
    for _ in range(9):
        time.ended("proven", "0.0.0", usual_s, counts=True)
    return time


def look(
    time: StrangersTime, hedges: Sequence[Hedge], now: float, *, places: bool = True, doubted: Container[str] = (),
    asked: Container[tuple[str, str]] = (), holds: Callable[[str, str], bool] = lambda node, request: True,
) -> list[Hedge]:  # fmt: skip
    return time.look(hedges, now, places=places, asked=asked, doubted=doubted.__contains__, holds=holds)


def held(node: str, since: float, number: int = 0) -> Hedge:
    return Hedge(node, f"{number}.0.0", since)


def saved(time: StrangersTime, now: float) -> float:
    """The trainer has waited for others for long enough that there is time for strangers; when."""
    for now in (now + i * MOST_PAUSE_S for i in range(round(2 * TIME_S / SHARE / MOST_PAUSE_S))):
        look(time, [], now)
    return now


def test_each_may_stay_for_a_moment() -> None:
    time = StrangersTime()
    assert look(time, [held("n", 0.0)], LEAST_S / 2) == []
    assert look(time, [held("n", 0.0)], LEAST_S) == [held("n", 0.0)], "what is usual is not known"


def test_who_is_new_has_as_long_as_others_take() -> None:
    time = known()
    start = saved(time, 0.0)
    one = held("n", start)
    for after in (0.3, 0.8, 1.3, 1.8):
        assert look(time, [one], start + after) == []
    assert look(time, [one], start + TIME_S) == [one]


def test_what_is_behind_or_early_is_not_theirs() -> None:
    time = known()
    start = saved(time, 0.0)
    hedges = [Hedge("n", "1.0.0", start, behind_s=5.0), Hedge("n", "2.0.0", start, early=True)]
    assert look(time, hedges, start + LEAST_S / 2) == hedges


def test_who_is_doubted_has_no_time() -> None:
    time = known()
    start = saved(time, 0.0)
    assert look(time, [held("bad", start), held("n", start)], start + 0.5, doubted={"bad"}) == [held("bad", start)]


def test_the_trainer_waits_for_strangers_for_a_share_of_its_time_however_many_they_are() -> None:
    """Sixty identities, each with a sequence that it never ends, and another one as soon as that is taken."""
    time, number = known(), count()
    now = saved(time, 0.0)
    began, waited, look_s = now, 0.0, 0.1
    of = {f"n{i}": held(f"n{i}", now, next(number)) for i in range(60)}
    while now < began + 1000.0:
        now += look_s
        taken = look(time, list(of.values()), now)
        kept = {n for n, hedge in of.items() if hedge not in taken and now - hedge.since > LEAST_S}
        waited += look_s if kept else 0.0
        for hedge in taken:
            of[hedge.node] = held(hedge.node, now, next(number))
    assert waited < SHARE * 1000.0 + 2 * TIME_S, waited
    assert waited > 0.5 * SHARE * 1000.0, "that is little"


def test_where_nobody_else_has_a_place_nothing_is_waited_for() -> None:
    time = known()
    start = saved(time, 0.0)
    one = held("n", start)
    for after in (0.5, 5.0, 50.0):
        assert look(time, [one], start + after, places=False) == [one], "whoever moves finds none"
    other = held("n", start + 50.0, 2)
    assert look(time, [other], start + 50.5) == []


def test_who_lets_it_pass_comes_after_those_who_did_not() -> None:
    """Taken, or gone with its node; what ends makes up for it, and every other time all have their turn."""
    for goes in ("taken", "leaves"):
        time = known()
        start = saved(time, 0.0)
        bad = held("bad", start)
        assert look(time, [bad], start + 0.5) == []
        if goes == "taken":
            assert look(time, [bad], start + TIME_S) == [bad]
        else:
            assert look(time, [], start + 1.9, holds=lambda node, request: False) == []
        turns = []
        for number in (1, 2):
            start = saved(time, start + TIME_S)
            both = [held("bad", start, 2 * number), held("n", start, 2 * number + 1)]
            turns.append(look(time, both, start + 0.5))
            for hedge in both:
                time.ended("n", hedge.request_id, 1.0, counts=False)
            look(time, [], start + 0.6)
        assert turns == [[], [held("bad", start, 4)]], goes
        time.ended("bad", "9.9.9", 1.0, counts=False)
        start = saved(time, start)
        look(time, [held("n", start, 11)], start + 0.5)
        start = saved(time, start + 1.0)
        assert look(time, [held("bad", start, 12), held("n", start, 13)], start + 0.5) == [], goes


def test_what_ended_between_two_looks_is_not_paid_for_any_longer() -> None:
    time = known()
    start = saved(time, 0.0)
    assert look(time, [held("n", start)], start + 0.2) == []
    time.ended("n", "0.0.0", 0.3, counts=False)
    time.rests(start + 0.3)
    assert look(time, [held("n", start + 0.4, 2)], start + 0.6) == [], "nearly all of it is left"


def test_who_was_asked_is_waited_for_on_the_same_account() -> None:
    time = known()
    start = saved(time, 0.0)
    old = held("n", start - 9.0)
    for after in range(4):
        look(time, [old], start + after, asked={("n", "0.0.0")})
    assert look(time, [held("m", start + 3.0, 2)], start + 3.5) == [held("m", start + 3.0, 2)]


def test_those_who_are_asked_again_and_again_leave_newcomers_something() -> None:
    time = known()
    start = saved(time, 0.0)
    for after in range(1000):
        look(time, [held("n", start - 9.0)], start + after, asked={("n", "0.0.0")})
    start = saved(time, start + 1000.0)
    assert look(time, [held("m", start, 2)], start + 0.5) == []


def test_what_begins_has_the_time_for_all_of_it() -> None:
    """Else strangers would be waited for a little, again and again, and none would end anything."""
    time = known()
    start = saved(time, 0.0)
    first = held("n", start)
    assert look(time, [first], start + 0.5) == []
    assert look(time, [first], start + 1.5) == []
    second = held("m", start + 1.5, 2)
    assert look(time, [first, second], start + 1.9) == [second], "the first has used up most of it"
