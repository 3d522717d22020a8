"""The section `[tracking]`: which services a run's metrics go to, beside metrics.jsonl. Must not know the services."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

from pydantic import field_validator

from learner.section import Section
from p2p.errors import UsageError

TrackerName = Literal["wandb", "tensorboard", "trackio"]

TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
"""Services that a run can feed; each is the name of its package, and of our extra that brings it."""


class TrackingSection(Section):
    """Services that show a run's metrics: each line of metrics.jsonl goes there too, from a process of its own. A service that is
    gone costs the run nothing but a log line. Their packages are extras: `pip install '.[wandb]'`, `'.[tensorboard]'` and
    `'.[trackio]'` from Shoal's checkout."""

    wandb: str = ""
    """Project at Weights & Biases. Its own variables count: WANDB_API_KEY, WANDB_ENTITY, and WANDB_MODE=offline where there is
    no connection. "" is none."""
    tensorboard: bool = False
    """Write event files to the folder tensorboard/ of the run's: `tensorboard --logdir RUN_DIR/tensorboard`."""
    trackio: str = ""
    """Project of trackio, in its store on this machine unless its own variables (TRACKIO_DIR, TRACKIO_SPACE_ID) say otherwise. ""
    is none."""
    name: str = ""
    """The run's name there. "" is the name of the run directory's folder and the beginning of the run's id."""

    @field_validator("wandb", "trackio", "name")
    @classmethod
    def _sound(cls, text: str) -> str:
        if len(text) > 120 or not text.isprintable() or "/" in text:
            raise ValueError(f"{text[:60]!r} is no name: at most 120 characters that can be printed, without /")
        return text

    @property
    def wanted(self) -> tuple[TrackerName, ...]:
        """The services that are fed."""
        return tuple(name for name in TRACKERS if getattr(self, name))


def check_trackers(settings: TrackingSection) -> None:
    """UsageError for each service whose package is not installed."""
    missing = [name for name in settings.wanted if not _installed(name)]
    if missing:
        raise UsageError(
            *(
                f"tracking.{name} needs the package {name}, which is not installed: pip install '.[{name}]' from Shoal's checkout"
                for name in missing
            )
        )


def _installed(name: TrackerName) -> bool:
    """By what pip wrote: a folder of this name in the working directory, as wandb leaves one, could be imported as well."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
