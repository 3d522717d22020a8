"""The section `[environment]`. Must not know processes or tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from learner.section import Section

LEAST_MB = 256
"""Least memory of an environment's process, in MB: Python, and 16 threads with stacks of 8 MB."""


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
    memory_mb: int = Field(default=4096, ge=0)
    """Most memory of one of these processes, in MB (2^20 bytes), and of each that it starts. Beyond it Python raises MemoryError:
    a tool's is told to the model, any other costs its group. 0: as much as there is. Linux."""
    run: Literal["process", "sandbox"] = "process"
    """Where environments run, with their tools. "process": in processes of their own, with your rights. "sandbox": there they
    have no network, start no processes, read only Python's packages, the modules beside their own and `readable`, and write only
    into a folder of 64 MB in memory. Linux 5.13 or later; elsewhere it is refused."""
    readable: list[str] = Field(default_factory=list)
    """Files and folders that environments may read besides, in the sandbox. Not a folder that holds the run's own."""
    allow_unconfined: bool = False
    """With "sandbox": run environments also where the system lacks a part of it, in what it has."""

    @field_validator("memory_mb")
    @classmethod
    def _enough(cls, memory_mb: int) -> int:
        if 0 < memory_mb < LEAST_MB:
            raise ValueError(f"{memory_mb} MB are too few for a process of Python: {LEAST_MB} or more, or 0 for no limit")
        return memory_mb
