"""When groups without a reward stop a run: by whom they were made decides."""

from __future__ import annotations

from learner.rewards.lost_groups import BLAMED, ROW, LostGroups


def made_by(*nodes: str) -> list[frozenset[str]]:
    """Answers of one node each; "a+b" is the work of both."""
    return [frozenset(node.split("+")) for node in nodes]


def test_without_proven_nodes_to_ask_for_every_group_counts() -> None:
    lost = LostGroups(3)
    assert [lost.lost(made_by("a")) for _ in range(2)] == [False, False]
    lost.scored()
    assert [lost.lost(made_by("a", "b")) for _ in range(3)] == [False, False, True]


def test_what_strangers_break_never_counts_and_what_a_proven_node_breaks_does() -> None:
    lost = LostGroups(3)
    lost.proven = lambda: {"good", "well"}
    assert not any(lost.lost(made_by("stranger", f"s{i}")) for i in range(100))
    assert not any(lost.lost(made_by("stranger+good")) for _ in range(100)), "a stranger began what a proven node ended"
    assert [lost.lost(made_by("stranger", "good")) for _ in range(3)] == [False, False, True]
    lost.scored()
    assert lost.in_a_row == 0 and not lost.lost(made_by("good"))


def test_one_proven_node_of_three_stops_nothing_and_two_of_them_do() -> None:
    lost = LostGroups(3)
    lost.proven = lambda: {"good", "well", "bad"}
    assert not any(lost.lost(made_by("bad")) for _ in range(50))
    assert lost.lost(made_by("good"))


def test_while_nobody_is_proven_nothing_counts_and_once_somebody_is_what_it_lost_before_does() -> None:
    lost, proven = LostGroups(3), set[str]()
    lost.proven = lambda: proven
    assert not any(lost.lost(made_by("new")) for _ in range(20))
    proven.add("new")
    assert lost.lost(made_by("stranger"))


def test_what_is_remembered_is_bounded_and_names_who_failed_most() -> None:
    lost = LostGroups(3)
    lost.proven = lambda: ()
    lost.failed(["often"] * 5)
    for i in range(5 * ROW):
        lost.failed([f"s{i}"])
        lost.lost(made_by(f"s{i}"))
    assert lost.in_a_row == ROW and len(lost._blamed) <= BLAMED  # what is kept has no other face
    assert lost.blame().startswith("5 of node often, 1 of node s") and lost.blame().endswith(" and others")
