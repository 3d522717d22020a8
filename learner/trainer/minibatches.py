"""Groups of a step that wait for its updates: which update trains on which, and what pi was before the first.

Must not know models, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack
import torch
from torch import Tensor

from learner.trainer.losses import check_logprobs
from learner.trainer.packing import ForwardRow, sampled_logprobs
from learner.trainer.ranks.port import Ranks


class HeldGroup(NamedTuple):
    """A group as far as training goes."""

    weight: float
    """what it counts in the mean of its update, `learner.trainer.losses.weight_of` all of its rows"""
    rows: list[ForwardRow]
    """those that have a gradient"""


@dataclass
class HeldGroups:
    """The step's groups, in the order in which they came, for `count` updates."""

    count: int
    _groups: list[HeldGroup] = field(default_factory=list, init=False, repr=False)
    _before: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """id of a row, which is in `_groups` -> its log probabilities before the first update"""
    _updates: int = field(default=0, init=False, repr=False)
    """that were made before the minibatch that is trained on"""

    def add(self, group: HeldGroup) -> None:
        self._groups.append(group)

    def before(self, rows: Sequence[ForwardRow], logprobs: Tensor) -> None:
        """`logprobs` [N]: of these rows' sampled tokens, row after row, under the weights of the step's start."""
        sizes = [row.trajectory.sampled_tokens for row in rows]
        self._before |= {id(row): values for row, values in zip(rows, logprobs.split(sizes), strict=True)}

    def tell(self, ranks: Ranks) -> None:
        """Each rank has looked at a part of the rows: all of them know all from here on."""
        if ranks.count == 1:
            return
        rows = [row for group in self._groups for row in group.rows]
        own = {at: self._before[id(row)] for at, row in enumerate(rows) if id(row) in self._before}
        device = next(iter(own.values())).device if own else torch.device("cpu")
        for data in ranks.all_told(msgpack.packb({at: values.tolist() for at, values in own.items()})):
            for at, values in msgpack.unpackb(data, strict_map_key=False).items():
                self._before.setdefault(id(rows[at]), torch.tensor(values, device=device))

    def minibatches(self) -> Iterator[list[HeldGroup]]:
        """The groups cut into at most `count` runs, whose sizes differ by at most one. An update follows each."""
        parts = min(self.count, len(self._groups))
        for number in range(parts):
            self._updates = number
            yield self._groups[number * len(self._groups) // parts : (number + 1) * len(self._groups) // parts]

    def proximal(self, rows: Sequence[ForwardRow]) -> Tensor | None:
        """[N]: log pi of these rows at the start of the step; None where that is what pi is now, and where nobody asked."""
        if not self._updates or not self._before:
            return None
        return torch.cat([self._before[id(row)] for row in rows])


def check_rows(rows: Sequence[ForwardRow]) -> None:
    """ValueError as from `check_logprobs`, before a forward."""
    values = [sampled_logprobs(row.trajectory) for row in rows]
    numbers = [at for at, row in enumerate(values) for _ in row]
    try:
        check_logprobs(torch.tensor([value for row in values for value in row]), torch.tensor(numbers))
    except ValueError as error:
        raise ValueError(f"groups {sorted({row.group_id for row in rows})}: {error}") from error
