"""The compact set of chunk numbers behaves as a set of ints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2p.broadcast.chunkset import ChunkSet

NUMBERS = st.integers(0, 200)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "compact"]), NUMBERS)), st.sets(NUMBERS))
def test_it_is_a_set(steps, other_numbers) -> None:
    chunks, model, other = ChunkSet(), set(), ChunkSet()
    for number in other_numbers:
        other.add(number)
    for step, number in steps:
        if step == "compact":
            chunks.compact(number)
        else:
            getattr(chunks, step)(number)
            getattr(model, step)(number)
        assert len(chunks) == len(model)
    assert {n for n in range(300) if n in chunks} == model
    assert chunks.lowest_not_in(other) == min(model - other_numbers, default=None)
    assert other.lowest_not_in(chunks) == min(other_numbers - model, default=None)


@given(st.integers(1, 300), NUMBERS)
def test_a_full_one_lets_go_of_its_bits_and_takes_them_up_again(total, number) -> None:
    chunks = ChunkSet()
    for chunk in range(total):
        chunks.add(chunk if chunk else total)
        chunks.compact(total)
        assert chunks._bits  # not all of them are in, so that compacting would lose some
    chunks.discard(total)
    chunks.add(0)
    chunks.compact(total)
    assert not chunks._bits and len(chunks) == total  # memory is what compacting is for
    assert total - 1 in chunks and total not in chunks
    chunks.discard(number)
    assert {n for n in range(400) if n in chunks} == set(range(total)) - {number}
