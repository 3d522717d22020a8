"""How long nodes whose word does not count keep what the trainer waits for."""

from __future__ import annotations

from itertools import count

from learner.rollouts.hedging import Hedge, HedgeMove, Way
from learner.rollouts.strangers_time import LEAST_S, MOST_PAUSE_S, SHARE, USUALS, StrangersTime

USUAL_S = 1.0
TIME_S = USUALS * USUAL_S


def known(usual_s: float = USUAL_S) -> StrangersTime:
    time = StrangersTime()
    for _ in range(9):
        time.stayed(usual_s)
    return time


def nobody(node: str) -> bool:
    return False


def held(node: str, since: float, number: int = 0, way: Way = Way.TAKE) -> HedgeMove:
    return HedgeMove(Hedge(node, f"{number}.0.0", since), way)


def rested(time: StrangersTime, now: float) -> float:
    """The trainer has waited for others for long enough that there is time for strangers; when."""
    for now in (now + i * MOST_PAUSE_S for i in range(round(2 * TIME_S / SHARE / MOST_PAUSE_S))):
        time.look([], now, nobody)
    return now


def test_each_may_stay_for_a_moment() -> None:
    time = StrangersTime()
    assert time.look([held("n", 0.0)], LEAST_S / 2, nobody) == []
    assert time.look([held("n", 0.0)], LEAST_S, nobody) == [held("n", 0.0)], "what is usual is not known"


def test_who_is_new_has_as_long_as_others_take() -> None:
    time = known()
    start = rested(time, 0.0)
    move = held("n", start, way=Way.ASK)
    for after in (0.3, 0.8, 1.3, 1.8):
        assert time.look([move], start + after, nobody) == []
    assert time.look([move], start + TIME_S, nobody) == [move]


def test_what_is_behind_early_or_queued_is_not_theirs() -> None:
    time = known()
    start = rested(time, 0.0)
    behind = HedgeMove(Hedge("n", "1.0.0", start, behind_s=5.0), Way.TAKE)
    early = HedgeMove(Hedge("n", "2.0.0", start, early=True), Way.EARLY)
    assert time.look([behind, early], start + 0.1, nobody) == [behind, early]


def test_who_is_doubted_has_no_time() -> None:
    time = known()
    start = rested(time, 0.0)
    assert time.look([held("bad", start), held("n", start)], start + 0.5, {"bad"}.__contains__) == [held("bad", start)]


def test_the_trainer_waits_for_strangers_for_a_share_of_its_time_however_many_they_are() -> None:
    """Sixty identities, each with a sequence that it never ends, and another one as soon as that is taken."""
    time, number = known(), count()
    now = rested(time, 0.0)
    began, waited, look_s = now, 0.0, 0.1
    of = {f"n{i}": held(f"n{i}", now, next(number)) for i in range(60)}
    while now < began + 1000.0:
        now += look_s
        taken = time.look(of.values(), now, nobody)
        kept = {n for n, m in of.items() if m not in taken and now - m.hedge.since > LEAST_S}
        waited += look_s if kept else 0.0
        for move in taken:
            of[move.hedge.node] = held(move.hedge.node, now, next(number))
    assert waited < SHARE * 1000.0 + 2 * TIME_S, waited
    assert waited > 0.5 * SHARE * 1000.0, "that is little"


def test_those_come_first_who_had_their_time_in_vain_seldom() -> None:
    time = known()
    start = rested(time, 0.0)
    bad = held("bad", start)
    assert time.look([bad], start + 0.5, nobody) == []
    assert time.look([bad], start + TIME_S, nobody) == [bad]
    start = rested(time, start + TIME_S)
    both = [held("bad", start, 1), held("n", start, 2)]
    assert time.look(both, start + 0.5, nobody) == both[:1]
    assert time.look(both[1:], start + 1.0, nobody) == []


def test_what_begins_has_the_time_for_all_of_it() -> None:
    """Else strangers would be waited for a little, again and again, and none would end anything."""
    time = known()
    start = rested(time, 0.0)
    first = held("n", start)
    assert time.look([first], start + 0.5, nobody) == []
    assert time.look([first], start + 1.5, nobody) == []
    second = held("m", start + 1.5, 2)
    assert time.look([second], start + 2.0, nobody) == [second], "the first has used up most of it"
