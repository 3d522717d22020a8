"""What the author of an environment writes: a subclass of `Environment`. Must not know tokens, processes, trio or torch.

docs/environments.md is its page for users.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from learner.tasks.port import ChatMessage


class ToolCall(NamedTuple):
    """One call that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    """names it in the tool's message; drawn from its place in the episode"""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What the model wrote."""

    text: str
    """all of it, tool calls included, special tokens stripped"""
    number: int
    """from 0"""
    calls: tuple[ToolCall, ...] = ()
    """the tool calls in it that could be read"""
    tool_messages: tuple[ChatMessage, ...] = ()
    """what the tools answered, and what is to be said of calls that could not be read; they were run before `respond`"""
    over: str = ""
    """why the model gets no further turn, whatever is answered: "length", "turns", "time"; "": it may"""


@dataclass(frozen=True, slots=True)
class Done:
    """The episode is over."""

    reward: float | Mapping[str, float]
    """a finite number; or named parts, whose sum is the reward"""
    exact: bool | None = None
    """whether it counts as fully solved; None: where the reward is 1 or more"""
    parts: Mapping[str, float] = field(default_factory=dict)
    """where `reward` is a number: named parts to be shown beside it, before their weights"""


Messages = str | ChatMessage | Sequence[ChatMessage]
"""What an environment says: a text (one user message in a chat, and the text as it is otherwise), a message, or several."""

Reply = Messages | Done
"""What `respond` returns."""


class Environment:
    """One episode. A fresh one is made for each, with the options of `EnvironmentSource`; every method may be `async`.

    Methods that are not async run in threads, so they may wait. An async one must not: it would hold up all episodes of its
    process. What raises gives up the whole group, and says so.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Functions that the model may call, with types and a docstring (Google style: an `Args:` part). Methods are offered by
    `@tool`. What they return is told to the model: a text as it is, anything else as JSON."""
    tool_parser: str = "hermes"
    """how the model writes calls: a name of `PARSERS` (learner/environments/tools.py)"""
    replayable: bool = True
    """The same row, seed and turns give the same answers again, and doing so harms nothing. False: an episode whose process was
    lost begins anew."""

    def begin(self, row: Any, seed: int) -> Any:
        """Set up for a problem: `row` is the prompt's `entry`. All members of a group have the same row and seed."""

    def respond(self, turn: ModelTurn) -> Reply | Awaitable[Reply]:
        """Answer the model's turn, or be done. By default tools are answered, and a turn that calls none is the last."""
        if turn.tool_messages:
            return turn.tool_messages
        return self._finish()

    def reward(self) -> Any:
        """The reward of an episode that a limit ended: a number, parts, or `Done`. Also where the default `respond`
        ends it."""
        return 0.0

    def close(self) -> Any:
        """The episode is over or given up. Not called where its process was lost."""

    async def _finish(self) -> Reply:
        found = self.reward()
        if isinstance(found, Awaitable):
            found = await found
        return found if isinstance(found, Done) else Done(found)


Method = TypeVar("Method", bound=Callable[..., Any])


def tool(method: Method) -> Method:
    """Marks a method of an environment as one that the model may call."""
    method.__dict__["_is_tool"] = True
    return method


def tools_of(environment: Environment) -> dict[str, Callable[..., Any]]:
    """Name -> what the model may call: the class's functions, then its marked methods. ValueError when two share a name."""
    marked = [
        getattr(environment, name)
        for name in dir(type(environment))
        if getattr(getattr(type(environment), name, None), "_is_tool", False)
    ]
    found: dict[str, Callable[..., Any]] = {}
    for function in [*environment.tools, *marked]:
        if function.__name__ in found:
            raise ValueError(f"two tools are called {function.__name__}")
        found[function.__name__] = function
    return found


def oddities(environment: Environment) -> list[str]:
    """What a person is likely to have forgotten, each in a sentence; it works all the same."""
    kind = type(environment)
    if kind.respond is Environment.respond and kind.reward is Environment.reward and not tools_of(environment):
        return [f"{kind.__name__} has no respond, no reward and no tools: every episode ends after one turn with the reward 0"]
    if kind.respond is Environment.respond and kind.reward is Environment.reward:
        return [f"{kind.__name__} has tools, and neither respond nor reward: every episode has the reward 0"]
    return []
