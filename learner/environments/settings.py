"""The section `[environment]`. Must not know processes or tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from learner.section import Section


class EnvironmentSection(Section):
    """Episodes of several turns: limits, and where environments run. Nothing here counts for a task without an environment."""

    name: str = ""
    """Environment that the task's prompts begin: a class of yours, `file.py:Class` or `module:Class` (docs/environments.md). ""
    is the task's own, if it has one."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that class."""
    max_turns: int = Field(default=16, ge=1, le=1024)
    """Most turns of the model in an episode. The environment is then asked for the reward."""
    turn_tokens: int = Field(default=0, ge=0)
    """Most tokens of one turn of the model. 0: as many as the completion has left."""
    turn_s: float = Field(default=60.0, gt=0, le=86400)
    """Seconds that an environment may take to answer one turn, its tools included. One that is later costs its group."""
    episode_s: float = Field(default=3600.0, gt=0)
    """Seconds from an episode's begin, generation included, until the environment is asked for the reward of what there is."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that run environments. Each runs many episodes at once: one is enough for those that mostly wait."""
    run: Literal["process", "sandbox"] = "process"
    """Where environments run. "process": in processes of their own, with your rights. "sandbox" is not built."""

    @field_validator("run")
    @classmethod
    def _no_sandbox(cls, run: str) -> str:
        if run == "sandbox":
            raise ValueError(
                '"sandbox" is not built: an environment keeps threads, and the sandbox of rewards forbids them. Use "process", '
                "and have tools that run the model's code confine it themselves"
            )
        return run
