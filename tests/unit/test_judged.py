"""Which of what an answer of the auditor's says of nodes counts."""

from __future__ import annotations

from dataclasses import replace

from learner.audit.judged import Judged, that_count
from learner.audit.sequential import Verdict


def test_once_a_node_was_odd_what_it_made_before_does_not_speak_for_it() -> None:
    sound = Verdict(caught=False, tokens=1, why="")
    odd, caught = replace(sound, gross=1), replace(sound, caught=True)
    said = [Judged("a", 10, sound), Judged("a", 11, odd), Judged("b", 12, sound), Judged("a", 13, sound), Judged("a", 14, odd),
            Judged("b", 15, sound), Judged("a", 16, caught)]  # fmt: skip
    assert [j.tokens for j in that_count(iter(said))] == [10, 11, 12, 15, 16]
    assert [j.tokens for j in that_count([Judged("a", 1, sound)])] == [1], "another answer"
