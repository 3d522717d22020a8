"""The services that show metrics, behind one port. Runs in a process of its own; must not know the head.

Each package is imported by its own service alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.tracking.follower import TrackedStep
from learner.tracking.settings import TrackerName

SECRET = ("key", "token", "secret", "password", "authorization")
"""Words in the names of settings whose values go to no service."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a service shows."""

    id: str
    """the run's: the same in each of its lives"""
    name: str
    project: str
    folder: Path
    """for files of the service"""
    config: Mapping[str, Any]
    """the resolved settings, as plain values"""


class Tracker:
    """A service that is fed."""

    takes_back = False
    """whether it can be told that steps are void"""

    def log(self, step: TrackedStep) -> None:
        raise NotImplementedError

    def finish(self, *, good: bool) -> None:
        """No more comes from this life. `good`: the run came to its end."""
        raise NotImplementedError


class WandbTracker(Tracker):
    """Weights & Biases. Steps are its x axis by the metric "step": what comes late, as an evaluation, finds its place."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project, name=run.name, id=run.id, resume="allow", dir=str(run.folder), config=dict(run.config),
            settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: TrackedStep) -> None:
        self._run.log({**step.values, "step": step.step})

    def finish(self, *, good: bool) -> None:
        self._run.finish(exit_code=0 if good else 1)


class TensorboardTracker(Tracker):
    """TensorBoard's event files. A later file takes back the steps that it begins with."""

    takes_back = True

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        from learner.section import dump_toml

        self._event, self._start, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(run.folder))
        text = "".join(f"    {line}\n" for line in dump_toml(run.config).splitlines())  # Markdown shows it as it is
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag="config/text_summary", metadata=plugin, tensor=tensor)
        self._writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))

    def log(self, step: TrackedStep) -> None:
        """One event; before it one that voids what was told of this step and later ones, where that is so."""
        if step.back:
            start = self._start(status=self._start.START)
            self._writer.add_event(self._event(wall_time=step.time, step=step.step, session_log=start))
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in step.values.items()]
        self._writer.add_event(self._event(wall_time=step.time, step=step.step, summary=self._summary(value=values)))

    def finish(self, *, good: bool) -> None:
        self._writer.close()


class TrackioTracker(Tracker):
    """trackio: its store on this machine, unless its own variables name another place."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project, name=run.name, config=dict(run.config), resume="allow", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: TrackedStep) -> None:
        self._run.log(dict(step.values), step=step.step)

    def finish(self, *, good: bool) -> None:
        self._run.finish()


SERVICES: Mapping[TrackerName, type[Tracker]] = {
    "wandb": WandbTracker, "tensorboard": TensorboardTracker, "trackio": TrackioTracker,
}  # fmt: skip
"""By name. Each is made with a `TrackedRun`."""


def without_secrets(values: Any) -> Any:
    """Settings as they may be shown to a service: what a key's name calls secret is left out, at any depth."""
    if isinstance(values, Mapping):
        return {
            k: "(left out)" if isinstance(v, str) and v and any(word in k.lower() for word in SECRET) else without_secrets(v)
            for k, v in values.items()
        }
    return [without_secrets(v) for v in values] if isinstance(values, (list, tuple)) else values
