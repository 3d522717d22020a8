"""Who holds the trainer up a little, again and again, and who only seems to."""

from __future__ import annotations

import pytest

from learner.rollouts.hold_ups import (
    CROSSED_S,
    FEW,
    MOST_MOVES,
    ONE_S,
    RECENT_S,
    SURE_OF,
    TRIES_S,
    GivenBack,
    HoldUps,
    HoldUpVerdict,
)

FAULT_S, AT_ONCE_S = 1.0, 1.8
HELD = GivenBack(2.0, 7, asked=False, touched=False, waits=True, credible=True)


def with_others(hold_ups: HoldUps) -> HoldUps:
    """Two others have ended much, and held up nothing."""
    for node in "xy":
        for i in range(100):
            hold_ups.ended(node, f"{node}{i}.0", 0.0, AT_ONCE_S, False)
    return hold_ups


def gave_back(hold_ups: HoldUps, what: GivenBack, now: float) -> HoldUpVerdict:
    return hold_ups.gave_back("n", what, now, FAULT_S)


def test_what_is_given_back_when_asked_with_tokens_or_soon_costs_nothing() -> None:
    hold_ups = HoldUps()
    for touched, held_s in (True, 9.0), (False, CROSSED_S):
        back = HELD._replace(asked=True, touched=touched, held_s=held_s)
        assert all(gave_back(hold_ups, back, float(now)) is HoldUpVerdict.NOTHING for now in range(0, 100, 2))


def test_what_is_given_back_again_and_again_is_a_doubt_the_third_time_and_rests_before() -> None:
    hold_ups = with_others(HoldUps())
    said = [gave_back(hold_ups, HELD, now) for now in (0.0, 0.5, 2.0, 4.0, 6.0)]
    rests, doubted = HoldUpVerdict.RESTS, HoldUpVerdict.DOUBTED
    assert said == [rests, rests, rests, doubted, rests], "the first two are one"
    alone = HoldUps()
    assert all(gave_back(alone, HELD, 2.0 * i) is HoldUpVerdict.RESTS for i in range(9)), "nobody to compare it with"
    idle = HELD._replace(waits=False)
    assert all(gave_back(with_others(HoldUps()), idle, 2.0 * i) is HoldUpVerdict.RESTS for i in range(9))


def test_a_stranger_that_was_asked_and_made_nothing_is_to_blame_at_once() -> None:
    back = HELD._replace(asked=True, credible=False)
    assert gave_back(HoldUps(), back, 0.0) is HoldUpVerdict.DOUBTED
    assert gave_back(HoldUps(), back._replace(held_s=FAULT_S), 0.0) is HoldUpVerdict.RESTS


def test_all_that_is_given_back_at_once_is_one_doubt_and_who_leaves_is_not_to_blame() -> None:
    """An honest stranger that hands over what it holds, as its owner wants the machine back, was expelled by one message."""
    back, hold_ups = HELD._replace(credible=False, held_s=20.0), HoldUps()
    assert [gave_back(hold_ups, back, i / 100) for i in range(10)] == [HoldUpVerdict.DOUBTED] + [HoldUpVerdict.RESTS] * 9
    assert all(gave_back(HoldUps(), back._replace(leaves=True), float(i)) is HoldUpVerdict.RESTS for i in range(9))


def test_what_crosses_a_nodes_word_is_free_once_a_step() -> None:
    hold_ups = with_others(HoldUps())
    soon = HELD._replace(held_s=0.1)
    for step in range(50):  # all eight of a node that updates, with each version
        crossed = soon._replace(step=step)
        assert all(gave_back(hold_ups, crossed, step + i / 10) is HoldUpVerdict.NOTHING for i in range(8))
    crossed = soon._replace(step=99)
    assert gave_back(hold_ups, crossed, 99.0) is HoldUpVerdict.NOTHING
    assert gave_back(hold_ups, crossed, 99.5 + ONE_S) is HoldUpVerdict.RESTS, "and once more under the same version"


def moved_and_made(hold_ups: HoldUps, member: str, at: float, took_s: float, *, late: bool = False) -> str:
    assert hold_ups.may_move(member)
    hold_ups.moved("n", member, at)
    return hold_ups.ended("m", member, at + took_s, AT_ONCE_S, late)


def test_who_is_silent_with_what_another_makes_at_once_is_to_blame_the_third_time() -> None:
    hold_ups = with_others(HoldUps())
    assert [moved_and_made(hold_ups, f"{i}.0", 2.0 * i, 0.2) for i in range(4)] == ["", "", "n", ""]
    slow = with_others(HoldUps())
    assert not any(moved_and_made(slow, f"{i}.0", 40.0 * i, 5.0) for i in range(9)), "it was the sequence"


def test_pauses_that_all_have_are_nobodys_fault_and_twice_as_many_are_not_either() -> None:
    hold_ups, blamed = HoldUps(), list[str]()
    for i in range(600):
        node, other = "abc"[i % 3], "abc"[(i + 1) % 3]
        if i % (5 if node == "a" else 10) == 0:  # a fifth of what a makes, and a tenth of what the others do
            hold_ups.moved(node, f"{i}.0", float(i))
            blamed.append(hold_ups.ended(other, f"{i}.0", i + 0.2, AT_ONCE_S, False))
        else:
            hold_ups.ended(node, f"{i}.0", float(i), AT_ONCE_S, False)
    assert len(blamed) > 60 and not any(blamed)


def test_what_waited_for_a_slot_is_nobodys_fault() -> None:
    hold_ups = with_others(HoldUps())
    for i in range(9):
        hold_ups.moved("", f"{i}.0", 2.0 * i)
        assert not hold_ups.ended("m", f"{i}.0", 2.0 * i + 0.2, AT_ONCE_S, False)


def test_one_member_of_a_group_is_moved_first_and_each_once() -> None:
    hold_ups = HoldUps()
    hold_ups.moved("n", "7.0", 0.0)
    assert not hold_ups.may_move("7.0") and not hold_ups.may_move("7.1") and hold_ups.may_move("8.0")
    hold_ups.ended("m", "7.0", 0.2, AT_ONCE_S, False)
    assert hold_ups.may_move("7.1") and hold_ups.may_move("7.2"), "it was no long prompt"
    hold_ups.moved("n", "8.0", 0.0)
    hold_ups.ended("m", "8.0", 9.0, AT_ONCE_S, False)
    assert not hold_ups.may_move("8.1")


@pytest.mark.parametrize(("late", "sure"), [(0, True), (2, True), (3, False)])
def test_where_it_was_the_nodes_nearly_always_whole_groups_are_moved(late: int, sure: bool) -> None:
    hold_ups = HoldUps()
    for i in range(SURE_OF):
        assert not hold_ups.sure(0.0), "that is few"
        hold_ups.moved("n", f"{i}.0", 0.0)
        hold_ups.ended("m", f"{i}.0", AT_ONCE_S + 1.0 if i < late else 1.0, AT_ONCE_S, False)
    assert hold_ups.sure(3.0) == sure and not hold_ups.sure(3.0 + TRIES_S)
    hold_ups.moved("n", "99.0", 3.0)
    assert not hold_ups.may_move("99.1") and hold_ups.may_move("99.1", sure=True)
    assert not hold_ups.may_move("99.0"), "each once"
    assert hold_ups.may_move("99.0", sure=True), "who has it now may be another of them"
    hold_ups.moved("n", "99.0", 3.5)
    assert not hold_ups.may_move("99.0", sure=True)
    for _ in range(MOST_MOVES - 2):
        assert hold_ups.may_move("99.0", slow=True), "it goes on elsewhere"
        hold_ups.moved("n", "99.0", 4.0)
    assert not hold_ups.may_move("99.0", slow=True) and hold_ups.may_move("99.1", slow=True), "that is no long prompt"


def test_a_second_move_forgives_nobody_the_first() -> None:
    hold_ups = HoldUps()
    blamed = []
    for i in range(6):
        hold_ups.moved("a", f"{i}.0", 2.0 * i)
        hold_ups.moved("b", f"{i}.0", 2.0 * i + 0.6, sooner=True)
        blamed.append(hold_ups.ended("m", f"{i}.0", 2.0 * i + 0.9, AT_ONCE_S, False))
    assert "a" in blamed and "b" not in blamed


def test_what_was_moved_sooner_shows_nothing() -> None:
    """Else one who is late would have those blamed who are three times slower than others, and be waited for no less."""
    hold_ups = with_others(HoldUps())
    for i in range(2 * SURE_OF):
        hold_ups.moved("n", f"{i}.0", float(i), sooner=True)
        assert not hold_ups.ended("x", f"{i}.0", i + 0.1, AT_ONCE_S, False)
    assert not hold_ups.sure(float(SURE_OF))


def test_where_it_was_the_sequences_nothing_more_is_moved_for_a_while() -> None:
    hold_ups = HoldUps()
    for i in range(FEW):
        assert hold_ups.worth_it(float(i))
        moved_and_made(hold_ups, f"{i}.0", float(i), 9.0)
    assert not hold_ups.worth_it(12.0) and hold_ups.worth_it(12.0 + TRIES_S)
    said_nothing = HoldUps()
    for i in range(9):  # made by those who were late with what they made before
        moved_and_made(said_nothing, f"{i}.0", float(i), 9.0, late=True)
    assert said_nothing.worth_it(20.0)


@pytest.mark.parametrize("what", ["noticed", "moved", "gave back"])
def test_what_is_held_up_is_known_for_a_while(what: str) -> None:
    hold_ups = HoldUps()
    assert not hold_ups.lately(0.0)
    if what == "noticed":
        hold_ups.noticed(0.0)
    elif what == "moved":
        hold_ups.moved("n", "1.0", 0.0)
    else:
        gave_back(hold_ups, HELD, 0.0)
    assert hold_ups.lately(RECENT_S - 1) and not hold_ups.lately(RECENT_S + 1)
