"""Which prompts the auditor answers itself."""

from __future__ import annotations

from learner.head.own_groups import AT_ONCE, OwnGroups


def test_they_are_the_runs_next_prompts_with_seeds_that_nobody_knows() -> None:
    asked: list[int] = []

    def prompt(index: int) -> tuple[int, ...]:
        asked.append(index)
        if index == 42:
            raise KeyError("a row that the task's own program cannot make")
        if index == 43:
            return ()
        return (index, 1)

    own = OwnGroups(prompt, 40, 3)
    first, second = own.next(), own.next()
    assert asked == list(range(40, 40 + 2 * AT_ONCE))
    assert [group.prompt_ids for group in (*first, *second)] == [(index, 1) for index in asked if index not in (42, 43)]
    seeds = [seed for group in (*first, *second) for seed in group.seeds]
    assert len(seeds) == len(set(seeds)) == 3 * (2 * AT_ONCE - 2)
    assert set(seeds).isdisjoint(seed for group in OwnGroups(lambda index: (index,), 40, 3).next() for seed in group.seeds)
