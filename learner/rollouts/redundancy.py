"""More than is needed, and the end of what blocks: who goes, and what that costs. Pure.

StaleFlow's redundancy (arXiv 2601.12784, section 3): more groups than a step takes (`rollout.extra_groups`), more members than a
group takes (`rollout.extra_samples`), the surplus aborted; and the truncation of what keeps a step waiting
(`rollout.truncate_stuck_s`). Each favours short answers, since what ends first is kept and what takes long is cut: so the tokens
of what was kept are counted beside those of what was cut. Must not know nodes, the journal or why a step waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from learner.dispatch.lengths import Lengths
from learner.rollouts.collector import Collector
from learner.rollouts.ledger import Ledger, Surplus
from learner.trajectory import TRUNCATED, Group


@dataclass
class _Counts:
    surplus_groups: int = 0
    """reserved, and aborted because others filled their step first"""
    surplus_sequences: int = 0
    """cut because their group had its members, or was surplus itself; those without a token too"""
    surplus_tokens: int = 0
    """that these had made: nobody trains on them"""
    truncated: int = 0
    """sequences that were ended where they were, and kept"""
    kept: int = 0
    """sequences kept that came to their own end"""
    kept_tokens: int = 0
    cut: int = 0
    """sequences that had a token and not come to their end: surplus or truncated"""
    cut_tokens: int = 0

    def values(self) -> dict[str, float]:
        """Plain values; means only of what there was."""
        out: dict[str, float] = {
            "surplus_groups": self.surplus_groups, "surplus_sequences": self.surplus_sequences,
            "surplus_tokens": self.surplus_tokens, "truncated": self.truncated,
        }  # fmt: skip
        if self.kept:
            out["kept_mean_length"] = self.kept_tokens / self.kept
        if self.cut:
            out["cut_mean_length"] = self.cut_tokens / self.cut
        return out


@dataclass
class Redundancy:
    """The account of one epoch. `spared` are prompts of which a group was surplus and none was finished since: there it is
    another's turn, where there is another, so that no prompt is passed over for being slow."""

    spared: set[int] = field(default_factory=set)
    total: _Counts = field(default_factory=_Counts, init=False)
    _told: _Counts = field(default_factory=_Counts, init=False)
    """`total` as it was at the last `metrics`"""

    # ---- who goes

    def choose(self, surplus: Surplus, collector: Collector) -> list[int]:
        """As many groups as must go: those that have made least, so that least is lost. First of prompts that are not `spared`,
        the newest among equals; whole ones, which only wait for their reward, when nothing else is left."""

        def cost(group_id: int) -> tuple[bool, bool, int, int]:
            progress = collector.progress_of(group_id)
            if progress is None:
                return True, False, 0, -group_id
            return False, collector.task_of(group_id)[0] in self.spared, progress.tokens, -group_id

        return sorted(surplus.of, key=cost)[: surplus.count]

    # ---- what happened

    def surplus_group(self, task_index: int, ended: Sequence[int], running: Sequence[int]) -> None:
        """A group was aborted as surplus; its members had so many tokens."""
        self.spared.add(task_index)
        self.total.surplus_groups += 1
        self.total.surplus_sequences += len(ended)
        self.total.surplus_tokens += sum(ended)
        self.surplus_members(running)

    def surplus_members(self, running: Sequence[int]) -> None:
        """A group is whole, or goes, without these, which had so many tokens."""
        self.total.surplus_sequences += len(running)
        self.total.surplus_tokens += sum(running)
        self._cut([n for n in running if n])

    def finished(self, group: Group) -> None:
        """A group is kept for the trainer."""
        self.spared.discard(group.task_index)
        cut = [len(t.completion_ids) for t in group.trajectories if t.finish == TRUNCATED]
        kept = [len(t.completion_ids) for t in group.trajectories if t.finish != TRUNCATED]
        self.total.truncated += len(cut)
        self.total.kept += len(kept)
        self.total.kept_tokens += sum(kept)
        self._cut(cut)

    # ---- what it says

    def metrics(self) -> dict[str, float]:
        """Of the time since this was last asked for, as a line of metrics has it."""
        told, self._told = vars(self._told), replace(self.total)
        since = _Counts(**{name: count - told[name] for name, count in vars(self.total).items()})
        return {f"redundancy/{name}": value for name, value in since.values().items()}

    def _cut(self, tokens: Sequence[int]) -> None:
        self.total.cut += len(tokens)
        self.total.cut_tokens += sum(tokens)


@dataclass
class Patience:
    """How long the trainer has waited for one step and nothing but what is under way could end that."""

    seconds: float
    """0: it is endless"""
    _began: tuple[int, float] | None = field(default=None, init=False)
    """(step, since when)"""

    def over(self, step: int | None, now: float) -> bool:
        """`step` is the one that it waits for so now; None when it does not. To be called every now and then."""
        if step is None or not self.seconds:
            self._began = None
            return False
        if self._began is None or self._began[0] != step:
            self._began = step, now
        return now - self._began[1] >= self.seconds


def to_cut(ledger: Ledger, collector: Collector, lengths: Lengths) -> list[int]:
    """Which groups to cut, so that the current step gets what it lacks: those first that would still make least. Only such as
    have a token of as many members as they need."""
    left: dict[int, float] = {}
    whole: list[int] = []
    for group_id in ledger.blockers():
        progress = collector.progress_of(group_id)
        if progress is None:
            whole.append(group_id)  # it waits for its reward, and comes anyway
        elif len(progress.longest) == progress.missing:
            belief = lengths.believe(*collector.task_of(group_id), progress.ended, [n for n in progress.running if n])
            left[group_id] = sum(belief.expected(made, lengths.most) - made for made in progress.longest)
    ranked = sorted(left, key=lambda group_id: left[group_id])
    return [group_id for group_id in ledger.fillers([*whole, *ranked]) if group_id in left]
