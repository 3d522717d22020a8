"""verifiers' environments, loaded and played: v1's tasksets (verifiers 0.4) and v0's `load_environment` (verifiers before 0.3).

The one file that imports verifiers, and only when an environment is loaded. asyncio; must not know tokens or the head.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from learner.environments.environment import Done
from learner.environments.verifiers_calls import MODEL
from learner.environments.verifiers_door import SESSION, ModelDoor, ModelSeat
from learner.user_code import told
from p2p.errors import UsageError
from p2p.verbs import nearest

KEY_VARIABLE = "SHOAL_MODEL_DOOR"
"""Environment variable with the door's key. Not one with API_KEY in its name: those, verifiers hides from what it starts."""

INSTALL = "pip install '.[verifiers]' from Shoal's checkout"


class VerifiersFailed(Exception):
    """An episode of verifiers' failed; says what it says."""


@dataclass(frozen=True, slots=True)
class VerifiersRow:
    """A row of an environment, as the model's prompt is made of it."""

    messages: tuple[dict[str, Any], ...]
    held_out: bool = False


class VerifiersKind(Protocol):
    """One loaded environment."""

    def rows(self, limit: int) -> list[VerifiersRow]:
        """Its rows, at most so many of either side, in its own order. UsageError for one that is no chat prompt."""

    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What it needs while episodes are played."""

    async def play(self, number: int, held_out: bool, seat: ModelSeat, door: ModelDoor) -> Done:
        """One episode of a row, by its own code, with its reward. Raises what went wrong."""


def load_kind(name: str, options: Mapping[str, Any]) -> VerifiersKind:
    """The installed environment called `name`. UsageError, one line, when it cannot be had."""
    try:
        import verifiers
    except ModuleNotFoundError as error:
        need = f"needs the package verifiers, which is not installed: {INSTALL}"
        raise UsageError(f"task verifiers:{name} {need} ({error})") from None
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    with contextlib.suppress(ImportError, ValueError):
        module = f"verifiers.v1.tasksets.{module}" if importlib.util.find_spec(f"verifiers.v1.tasksets.{module}") else module
    version = getattr(verifiers, "__version__", "?")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise UsageError(f"task verifiers:{name}: no module {module!r} is installed{_meant(module)}") from None
        raise UsageError(f"task verifiers:{name} cannot be imported: {told(error)}") from error
    except Exception as error:  # somebody's code: it may raise anything
        hint = _old(version) if isinstance(error, (AttributeError, ImportError)) and "verifiers" in str(error) else ""
        raise UsageError(f"task verifiers:{name} cannot be imported: {told(error)}{hint}") from error
    try:
        if not hasattr(found, "load_environment"):
            return _TasksetKind(name, options)
        if getattr(verifiers, "load_environment", None) is None:
            raise UsageError(f"it is an environment of verifiers v0{_old(version)}")
        return _OldKind(name, options)
    except UsageError as error:
        raise UsageError(f"task verifiers:{name}: {error}") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"])
        raise UsageError(f"task verifiers:{name}: task.options.{where}: {wrong['msg']}") from error
    except Exception as error:  # as above
        raise UsageError(f"task verifiers:{name} cannot be loaded: {told(error)}") from error


def _old(version: str) -> str:
    return f" (verifiers {version} is installed; environments of v0, with load_environment, need one before 0.3)"


def _meant(module: str) -> str:
    """A name that an installed package has and that looks like it."""
    return nearest(module, [name for name in importlib.metadata.packages_distributions() if not name.startswith("_")])


# ---- v1


class _TasksetKind:
    """A v1 taskset with its environment, harness and rewards. The options are those of verifiers' own `[env]`."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        try:
            from verifiers.v1.utils import loaders
        except ImportError as error:
            raise UsageError(f"a taskset of v1 needs verifiers 0.4: {INSTALL} ({error})") from None
        taskset = options.get("taskset") or {}
        if not isinstance(taskset, Mapping):
            raise UsageError(f"task.options.taskset is a table, and not {taskset!r:.60}")
        config = loaders.resolve_env_config({**options, "taskset": {**taskset, "id": name}})
        self._env = loaders.load_environment(config)
        self._tasks: list[Any] = []
        self._more = iter(self._env.taskset)

    def rows(self, limit: int) -> list[VerifiersRow]:
        """See `VerifiersKind`."""
        if not self._env.taskset.bounded and limit <= 0:
            raise UsageError("its taskset has no end: say how many rows in task.options.shoal.limit")
        found = []
        for number in itertools.count():
            if limit > 0 and number >= limit:
                break
            task = self._task(number)
            if task is None:
                break
            found.append(VerifiersRow(_prompt_of(task.data.prompt, task.data.system_prompt, number)))
        return found

    def _task(self, number: int) -> Any:
        while len(self._tasks) <= number:
            task = next(self._more, None)
            if task is None:
                return None
            self._tasks.append(task)
        return self._tasks[number]

    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        """See `VerifiersKind`."""
        return self._env.serving()

    async def play(self, number: int, held_out: bool, seat: ModelSeat, door: ModelDoor) -> Done:
        """See `VerifiersKind`."""
        import verifiers.v1 as vf

        task = self._task(number)
        if task is None:
            raise LookupError(f"the taskset has no row {number} any more")
        client = vf.EvalClientConfig(base_url=door.url, api_key_var=KEY_VARIABLE)
        traces: list[Any] = []

        def sit(trace: Any) -> None:
            traces.append(trace)
            door.seats[trace.id] = seat
            if len(traces) > 1:
                seat.fail("it has more than one agent, or tried again: an episode is one agent's")

        try:
            context = vf.ModelContext(model=MODEL, client=client, sampling=vf.SamplingConfig())
            seat.on_refused = lambda over: traces[0].stop(over)  # it is scored as it stands
            episode = await self._env.run_episode(task, context, on_trace=sit)
        finally:
            for trace in traces:
                door.seats.pop(trace.id, None)
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if not episode.ok:
            raise VerifiersFailed(f"{errors[-1].type}: {errors[-1].message}" if errors else "it failed, and does not say why")
        [trace] = traces
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored:
            raise VerifiersFailed(f"its reward {unscored[0]} was not scored ({trace.stop_condition})")
        return Done(trace.reward, parts={name: reward.score for name, reward in trace.rewards.items()})


def _prompt_of(prompt: Any, system: str | None, number: int) -> tuple[dict[str, Any], ...]:
    if prompt is None:
        raise UsageError(f"row {number} has no prompt: its user opens the conversation, which is not supported")
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        from verifiers.v1.dialects.chat import message_to_wire

        messages = [message_to_wire(message) for message in prompt]
    return tuple(([{"role": "system", "content": system}] if system is not None else []) + messages)


# ---- v0


class _OldKind:
    """A v0 environment: what `load_environment(**options)` of its module returns."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        import verifiers

        self._env = verifiers.load_environment(name, **options)
        if getattr(self._env, "requires_group_rollouts", False):
            raise UsageError("its rubric has rewards of whole groups, which are not supported")
        self._sides: dict[bool, Any] = {False: self._env.get_dataset()}
        if self._env.eval_dataset is not None or getattr(self._env, "eval_dataset_source", None) is not None:
            self._sides[True] = self._env.get_eval_dataset()

    def rows(self, limit: int) -> list[VerifiersRow]:
        """See `VerifiersKind`."""
        found = []
        for held_out, dataset in self._sides.items():
            for number in range(min(len(dataset), limit) if limit > 0 else len(dataset)):
                prompt = dataset[number].get("prompt")
                if not isinstance(prompt, list) or not prompt:
                    raise UsageError(f"row {number} has no chat messages in its column prompt")
                messages = tuple({key: value for key, value in message.items() if value is not None} for message in prompt)
                found.append(VerifiersRow(messages, held_out))
        return found

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """See `VerifiersKind`."""
        yield

    async def play(self, number: int, held_out: bool, seat: ModelSeat, door: ModelDoor) -> Done:
        """See `VerifiersKind`."""
        from verifiers.types import ClientConfig

        key = f"episode-{id(seat)}"
        client = ClientConfig(api_base_url=door.url, api_key_var=KEY_VARIABLE, max_retries=0, extra_headers={SESSION: key})
        door.seats[key] = seat
        try:
            found = await self._env.run_rollout(dict(self._sides[held_out][number]), client, MODEL, {})
        finally:
            door.seats.pop(key, None)
        error = found.get("error")
        if error:
            said = error.get("error_chain_str") or error.get("error") if isinstance(error, Mapping) else error
            raise VerifiersFailed(str(said))
        parts = {str(name): float(value) for name, value in (found.get("metrics") or {}).items() if value is not None}
        return Done(float(found["reward"]), parts=parts)
