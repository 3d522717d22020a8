"""Several ranks: who runs which forward, who holds and encodes what, what they tell each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.client.port import EncodedChanges, ResumeInfo
from learner.trainer.objectives.registry import make_objective
from learner.trainer.packing import BadBatch, ForwardRow, Packer, rows_of
from learner.trainer.ranks.client import RankedClient
from learner.trainer.ranks.port import OneProcess, RankFailed, shared_norm
from learner.trainer.ranks.rounds import Rounds
from learner.trainer.ranks.weights import RankedWeights, held_by, owners
from learner.trainer.settings import TrainerConfig
from p2p.codec import encode_segment
from p2p.layout import Layout
from p2p.weights.state import FlatState
from tests.support.ranks_twin import ThreadRanks, on_ranks
from tests.support.trainer_twins import FakeClient, make_group

CONFIG = TrainerConfig(model="m", checkpoint_dir="c")


def rows_of_groups(seed: int, groups: int) -> list[list[ForwardRow]]:
    rng, objective = np.random.default_rng(seed), make_objective("grpo", {})
    return [rows_of(make_group(i, rng, size=int(rng.integers(1, 7))), CONFIG, objective) for i in range(groups)]


def forwards(groups: list[list[ForwardRow]], rank: int, count: int, *, budget: int, padded: bool) -> list[list[ForwardRow]]:
    packer = Packer(budget, 2, padded)
    rounds, found = Rounds(packer, rank, count), list[list[ForwardRow]]()
    for rows in groups:
        found += rounds.add(packer.add(rows))
    return [*found, *rounds.flush(packer.flush()), *rounds.flush(packer.flush())]


@given(
    seed=st.integers(0, 2**16), groups=st.integers(0, 9), count=st.integers(1, 5), budget=st.sampled_from([16, 64, 4096]),
    padded=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_every_row_is_run_once_and_every_rank_runs_as_often(
    seed: int, groups: int, count: int, budget: int, padded: bool
) -> None:
    made = rows_of_groups(seed, groups)
    of_ranks = [forwards(made, rank, count, budget=budget, padded=padded) for rank in range(count)]
    assert len({len(packs) for packs in of_ranks}) == 1
    run = [id(row) for packs in of_ranks for pack in packs for row in pack]
    assert sorted(run) == sorted(id(row) for rows in made for row in rows)
    tokens = Packer(budget, 2, padded).tokens
    longest = max((tokens([row]) for rows in made for row in rows), default=0)
    assert all(tokens(pack) <= max(budget, longest) for packs in of_ranks for pack in packs)


def test_what_is_left_is_divided_evenly() -> None:
    made = rows_of_groups(3, 8)
    packer = Packer(1 << 20, 4)
    sizes = [sum(map(packer.tokens, forwards(made, rank, 4, budget=1 << 20, padded=False))) for rank in range(4)]
    assert min(sizes) > 0 and max(sizes) <= 1.6 * sum(sizes) / 4


SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 33), "b": (64, 5), "norm": (9,), "big": (130, 40), "one": (1, 3)}
WHOLE = "count"
"""The tensor that is not cut."""


def whole_state(seed: int, of: dict[str, torch.Tensor] | None = None, changed: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights; or `of` with this share of its values changed."""
    generator = torch.Generator().manual_seed(seed)
    if of is None:
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} | {WHOLE: torch.arange(6)}
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < changed, t * 1.5, t) if t.is_floating_point() else t + 1
        for name, t in of.items()
    }


def part(tensor: torch.Tensor, ranks: ThreadRanks) -> torch.Tensor:
    size = -(-tensor.shape[0] // ranks.count)
    return tensor[ranks.rank * size : (ranks.rank + 1) * size].clone()


def published(states: list[dict[str, torch.Tensor]], segment_bytes: int, forgotten: int = -1) -> Callable[[ThreadRanks], Any]:
    """What rank 0 takes of each state in turn; of any rank the bytes that it sent for each."""

    def work(ranks: ThreadRanks) -> Any:
        own = {n: t.clone() if n == WHOLE else part(t, ranks) for n, t in states[0].items()}
        shapes = {n: tuple(t.shape) for n, t in states[0].items()}
        source = RankedWeights(own, shapes, split=set(SHAPES), frozen=frozenset(), ranks=ranks, dtype="bfloat16")
        segments, taken, sent = source.layout.segments(segment_bytes), list[list[Any]](), list[int]()
        for number, state in enumerate(states):
            for name, tensor in state.items():
                own[name].copy_(tensor if name == WHOLE else part(tensor, ranks))
            before = ranks.sent
            if ranks.rank == 0:
                if number == forgotten:
                    source.forget()
                source.begin(segments)
                taken.append([source.take(segment) for segment in segments])
                source.dismiss()
            else:
                source.serve()
            sent.append(ranks.sent - before)
        return taken, sent, source.layout

    return work


def flat(state: dict[str, torch.Tensor], layout: Layout) -> FlatState:
    made = FlatState.in_memory(layout)
    for name, tensor in state.items():
        bits = tensor.to(torch.bfloat16).view(torch.int16) if tensor.is_floating_point() else tensor
        made.write_tensor(name, bits.numpy())
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("segment_bytes", [256, 1 << 16])
def test_ranks_encode_what_one_process_would(count: int, segment_bytes: int) -> None:
    first = whole_state(0)
    states = [first, whole_state(1, first, 0.02), whole_state(1, first, 0.02), whole_state(2, first, 0.5)]
    outcomes = on_ranks(count, published(states, segment_bytes))
    taken, _, layout = outcomes[0]
    now, before = FlatState.in_memory(layout), FlatState.in_memory(layout)
    for number, state in enumerate(states):
        wanted = flat(state, layout)
        for segment, found in zip(layout.segments(segment_bytes), taken[number], strict=True):
            words = now.words(segment)
            if number == 0:
                assert isinstance(found, np.ndarray)
                words[...] = found
            else:
                assert isinstance(found, EncodedChanges)
                words[found.positions] = found.words
                payload, changed = encode_segment(wanted.words(segment), before.words(segment))
                assert (found.payload, found.changed) == (payload, changed) and changed == len(found.positions)
        assert np.array_equal(now.bytes, wanted.bytes)
        before.bytes[...] = now.bytes
    sent = [sum(of_rank[1][number] for of_rank in outcomes) for number in range(len(states))]
    messages = 8 * count * count + 64 * len(taken[0])  # what says that nothing changed
    assert sent[2] <= messages, "nothing changed, and nothing but that is told"
    if count > 1:
        assert sent[1] < sent[0] / 3 + messages, "changes move, not weights"


def test_what_was_forgotten_is_given_whole() -> None:
    first = whole_state(0)
    taken, _, layout = on_ranks(2, published([first, whole_state(1, first, 0.1)], 1 << 16, forgotten=1))[0]
    wanted = flat(whole_state(1, first, 0.1), layout)
    for segment, found in zip(layout.segments(1 << 16), taken[1], strict=True):
        assert np.array_equal(found, wanted.words(segment))


def test_a_segment_is_encoded_where_most_of_it_lies() -> None:
    layout = Layout.build([("a", "bfloat16", (64, 32)), ("b", "bfloat16", (64, 32))])
    held = held_by(layout, {"a", "b"}, 4)
    assert [(h.rank, h.stop - h.start) for h in held] == [(rank, 1024) for _ in range(2) for rank in range(4)]
    assert owners(layout.segments(1024), held, 4) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sorted(owners(layout.segments(4096), held, 4)) == [0, 1], "equals in turn"


def test_ranks_are_given_the_same_groups_and_the_same_errors() -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(i, rng) for i in range(5)]

    class Refusing(FakeClient):
        def due(self, step: int) -> bool:
            raise BadBatch("no")

    def work(ranks: ThreadRanks) -> Any:
        own = Refusing(lambda step: groups, cuts=3, start=ResumeInfo(2, 7, Path("at"))) if ranks.rank == 0 else None
        client = RankedClient(own, ranks)
        got = [client.resume(), [batch for batch in client.batches(0)]]
        with pytest.raises((BadBatch, RankFailed), match="no"):
            client.due(1)
        client.finish()
        return got, own

    outcomes = on_ranks(3, work)
    assert all(got == outcomes[0][0] for got, _ in outcomes)
    assert [g for batch in outcomes[2][0][1] for g in batch.groups] == groups
    assert outcomes[0][1].finished


def test_the_norm_is_that_of_all_parts() -> None:
    values = [3.0, 4.0, 12.0]
    assert on_ranks(3, lambda ranks: shared_norm(ranks, values[ranks.rank])) == [13.0] * 3
    values[1] = math.nan
    assert all(math.isnan(norm) for norm in on_ranks(3, lambda ranks: shared_norm(ranks, values[ranks.rank])))
    assert shared_norm(OneProcess(), 5.0) == 5.0
