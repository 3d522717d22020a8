"""Weights that tell what changed are published as the same bytes as weights that are copied whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.client.connection import HeadGone
from learner.trainer.device_weights import DeviceWeights
from learner.trainer.model import served_tensors
from p2p.codec.classes import Changes
from p2p.errors import UsageError
from p2p.layout import Layout
from tests.unit.test_publishing import SEGMENT, Head


class Model(torch.nn.Module):
    """Matrices of several segments, tied ones, small ones, integers of every size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(300, 40)
        self.layer = torch.nn.Linear(40, 90)
        self.head = torch.nn.Linear(40, 300, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(30, 20).t())
        self.scale = torch.nn.Parameter(torch.ones(()))
        for name, dtype in (("steps", torch.int64), ("table", torch.int32), ("codes", torch.uint8), ("mask", torch.bool)):
            self.register_buffer(name, torch.arange(700).to(dtype))


@torch.no_grad()
def nudge(model: Model, share: float, seed: int) -> None:
    torch.manual_seed(seed)
    for tensor in (*model.parameters(), model.steps, model.table, model.codes):
        hit = torch.rand(tensor.shape) < share
        tensor.copy_(torch.where(hit, tensor * 1.05 + 1, tensor).to(tensor.dtype))


def twins(root: Path, **settings: int) -> tuple[Head, Head]:
    made = []
    for name in ("copied", "told"):
        (root / name / "versions").mkdir(parents=True)
        made.append(Head(root / name, **settings))
    return made[0], made[1]


def counting(weights: DeviceWeights) -> list[bool]:
    """Fills with whether each segment that is taken was told as changes."""
    told: list[bool] = []
    take: Callable = weights.take

    def counted(segment):
        found = take(segment)
        told.append(isinstance(found, Changes))
        return found

    weights.take = counted  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_same_bytes_either_way(tmp_path: Path, dtype: str) -> None:
    model = Model()
    weights = DeviceWeights(model, dtype)
    told = counting(weights)
    copied, tells = twins(tmp_path, anchor_every=4, squash_every=3)
    for step, share in enumerate((0.0, 0.01, 0.0, 0.05, 0.9, 0.01, 0.1, 0.02)):
        nudge(model, share, step)
        for head, source in ((copied, served_tensors(model, dtype)), (tells, weights)):
            head.publish(step, source)
    assert copied.made == tells.made and len(copied.made) > 10
    segments = len(weights.layout.segments(SEGMENT))
    assert segments > 5 and not any(told[:segments])
    assert sum(told[segments:]) > 4 * segments  # the rest: words of eight bytes, and what is dense
    for head in (copied, tells):
        head.close()


def test_what_was_not_published_is_not_built_on(tmp_path: Path) -> None:
    """A publication that failed half way, and one by other means in between: all segments are given whole again."""
    model = Model()
    weights = DeviceWeights(model)
    told = counting(weights)
    copied, tells = twins(tmp_path)
    ask, segments = tells.line.ask, len(weights.layout.segments(SEGMENT))  # what the client says to the head, before it says it

    def both(step: int, source: object) -> list[bool]:
        told.clear()
        nudge(model, 0.01, step)
        copied.publish(step, served_tensors(model))
        tells.publish(step, source)  # type: ignore[arg-type]
        assert copied.made[-1] == tells.made[-1]
        return list(told)

    both(0, weights)
    assert any(both(1, weights))
    nudge(model, 0.01, 2)
    for head in (copied, tells):
        head.publish(2, served_tensors(model))
    assert both(3, weights) == [False] * segments
    assert any(both(4, weights))

    def gone(request: object, expect: object) -> object:
        raise HeadGone("it fell over")

    nudge(model, 0.01, 99)
    tells.line.ask = gone  # type: ignore[method-assign]
    with pytest.raises(HeadGone):
        tells.publish(5, weights)
    tells.line.ask = ask  # type: ignore[method-assign]
    assert both(5, weights) == [False] * segments
    assert any(both(6, weights))
    for head in (copied, tells):
        head.close()


def test_changes_from_nowhere_are_refused(tmp_path: Path) -> None:
    class Liar:
        layout = Layout.build([("w", "bfloat16", (100,))])

        def take(self, segment: object) -> Changes:
            return Changes(np.zeros((256, 2), np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint16))

        def forget(self) -> None:
            pass

    (tmp_path / "versions").mkdir()
    head = Head(tmp_path)
    with pytest.raises(ValueError, match="segment 0: changes that do not fit"):
        head.publish(0, Liar())
    head.close()
    with pytest.raises(UsageError, match="float8"):
        DeviceWeights(Model(), "float8")
