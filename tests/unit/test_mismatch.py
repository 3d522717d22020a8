"""What each node's tokens come to under the trainer's own pass, and whose do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.client.mismatch import MOST_KL, MOST_NODES, NodeMismatch, token_makers
from learner.standing.mismatch import ENOUGH, MismatchWatch
from learner.trainer.by_node import by_node, of_step
from learner.trainer.losses import merge_stats
from learner.trainer.packing import ForwardRow
from learner.trajectory import Gap, Maker, Trajectory
from p2p.protocol.rollout import Span
from p2p.version import Version


def trajectory(node: str, tokens: int, **more) -> Trajectory:
    return Trajectory(
        prompt_ids=(1,), completion_ids=(2,) * tokens, logprobs=(-1.0,) * tokens, spans=(Span(Version(1, 0), 0, tokens),),
        finish="stop", node=node, seed=0, **more,
    )  # fmt: skip


def test_sums_go_to_who_made_the_tokens() -> None:
    moved = trajectory("b", 6, makers=(Maker(0, "a"), Maker(4, "b")), given=(Gap(1, 3),))
    assert token_makers(moved) == ["a", "a", "b", "b"]
    rows = [ForwardRow(1, moved, 0.5), ForwardRow(1, trajectory("c", 2), 0.5)]
    found = by_node(rows, torch.tensor([0.0, 1.0, -1.0, 0.0, 50.0, 0.0]))
    merge_stats(found, by_node(rows[1:], torch.tensor([0.0, 0.0])))
    step = of_step(found | {"tokens": 9.0})
    assert step["a"] == [2, round(float(np.e - 2), 4)] and step["b"] == [2, round(float(np.exp(-1)), 4)]
    assert step["c"] == [4, MOST_KL]


def test_an_own_trainer_tells_the_same_without_torch() -> None:
    rng = np.random.default_rng(3)
    moved = trajectory("b", 6, makers=(Maker(0, "a"), Maker(4, "b")), given=(Gap(1, 3),))
    others = [trajectory(node, 40) for node in "cbd"]
    watch, ours = NodeMismatch(), dict[str, float]()
    for t in [moved, *others]:
        own = rng.normal(-1.0, 3.0, len(t.completion_ids))
        own[-1] = -1e9
        watch.add(t, own.tolist())
        given = {at for gap in t.given for at in range(gap.start, gap.stop)}
        ratio = torch.tensor([x + 1.0 for at, x in enumerate(own.tolist()) if at not in given])
        merge_stats(ours, by_node([ForwardRow(1, t, 0.5)], ratio))
    assert watch.take() == of_step(ours) and not watch.take()
    watch.add(others[0], [float("nan")] * 40)
    assert watch.take() == {"c": [40, 40 * MOST_KL]}
    with pytest.raises(ValueError, match="2 log probabilities of 6"):
        watch.add(moved, [0.0, 0.0])
    for i in range(2 * MOST_NODES):
        watch.add(trajectory(f"n{i}", 1), [-1.0 - i / 1000])
    assert len(watch.take()) == MOST_NODES, "those that are furthest off"


def test_a_slow_honest_node_of_a_stale_run_stays() -> None:
    rng = np.random.default_rng(1)
    assert not feed(MismatchWatch(32), rng, 200, fresh=0.02, other=0.05, slow=0.75)
    assert feed(MismatchWatch(32), rng, 200, fresh=0.02, other=0.05, odd=5.0) == {"odd"}


def feed(watch: MismatchWatch, rng: np.random.Generator, steps: int, tokens: int = 100, **means: float) -> set[str]:
    found: set[str] = set()
    for _ in range(steps):
        watch.add({peer: (tokens, float(rng.exponential(mean, tokens).sum())) for peer, mean in means.items()})
        found |= set(watch.outliers(lambda peer: peer != "odd"))
    return found


def test_who_does_not_fit_is_found_soon_and_honest_nodes_never() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        assert not feed(MismatchWatch(), rng, 200, fresh=0.01, stale=0.2, slow=0.4, odd=0.45)
        assert feed(MismatchWatch(), rng, int(ENOUGH / 100) + 1, a=0.02, b=0.03, odd=3.0) == {"odd"}


def test_a_node_alone_is_judged_by_what_chance_would_have() -> None:
    rng = np.random.default_rng(0)
    assert not feed(MismatchWatch(), rng, 20, odd=2.0)
    assert feed(MismatchWatch(), rng, 20, odd=6.0) == {"odd"}
    assert not feed(MismatchWatch(), rng, 2, a=0.01, odd=9.0)  # too few tokens


def test_what_is_long_past_is_forgotten() -> None:
    rng, watch = np.random.default_rng(0), MismatchWatch()
    feed(watch, rng, 100, a=0.4)
    feed(watch, rng, 200, a=0.01)
    assert watch.mean("a") < 0.02
    watch.forget("a")
    assert watch.mean("a") == 0.0
