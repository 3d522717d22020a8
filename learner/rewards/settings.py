"""Every setting of rewards: part of the table [task]. Must import without torch and without any reward function."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from learner.section import Section


class RewardPart(Section):
    """One reward function, as `[[task.reward]]` has it."""

    function: str = Field(min_length=1)
    """`file.py:function`, `module:function`, or the name of a built-in one (docs/rewards.md)."""
    weight: float = 1.0
    """What its values are multiplied with before they are added up."""
    name: str = ""
    """What it is called in samples and metrics. "" is the function's own name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    @field_validator("function")
    @classmethod
    def _whole(cls, function: str) -> str:
        home, colon, name = function.rpartition(":")
        if colon and not (home and name.isidentifier()):
            raise ValueError(f"{function!r} is not file.py:function, module:function or a built-in name")
        return function

    @property
    def title(self) -> str:
        """What it is called where there are several."""
        return self.name or self.function.rpartition(":")[2]


class RewardSettings(Section):
    """How answers are scored."""

    reward: list[RewardPart] = Field(default_factory=list)
    """What an answer is worth: a reward function, or several as a list of tables with the keys `function`, `weight`, `name` and
    `options` (docs/rewards.md). Empty: the task's own score."""
    reward_workers: int = Field(default=4, ge=1, le=1024)
    """Processes that score, where answers are not scored in the learner itself. The answers of one node hold at most so many; one
    more is kept for those of other nodes. With 1 there is one process, which the nodes take in turn."""
    reward_s: float = Field(default=4.0, gt=0, le=86400)
    """Seconds that an answer may take to score; where it runs as code, the making and ending of its process included. A reward
    function that takes a group's completions in one call has so long for each of them."""
    reward_failures: int = Field(default=16, ge=1)
    """Groups in a row of which no answer could be scored (a reward function that raises, hangs, or returns no numbers) until the
    run stops. Each of them is replaced by another group. What only nodes that are not proven made does not count."""

    @field_validator("reward", mode="before")
    @classmethod
    def _as_parts(cls, value: Any) -> Any:
        """A single function may be written as its name alone."""
        if isinstance(value, str):
            return [{"function": value}] if value else []
        return value

    @field_validator("reward")
    @classmethod
    def _told_apart(cls, parts: list[RewardPart]) -> list[RewardPart]:
        titles = [part.title for part in parts]
        twice = next((title for title in titles if titles.count(title) > 1), "")
        if twice:
            raise ValueError(f"two reward functions are called {twice!r}: give one a `name`")
        return parts

    def reward_settings(self) -> RewardSettings:
        """These settings alone, of a section that has more."""
        return RewardSettings(**{key: getattr(self, key) for key in RewardSettings.model_fields})
