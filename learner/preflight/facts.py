"""What the checks before a start are told: the model's shape, the machine's room, and what was tried. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from learner.section import Finding
from learner.trainer.forecast.facts import ModelCosts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model on this machine's disk, as its files tell it."""

    parameters: int
    """values in its weights; 0 where that is not known"""
    vocabulary: int = 0
    """token ids; 0 where that is not known"""
    context: int = 0
    """most tokens of prompt and completion; 0 where that is not known"""
    longest_prompt: int = 0
    """tokens of the longest of the prompts that were tried; 0 where none was"""
    more_parts: bool = False
    """the files hold more than a language model, a vision tower for instance: how many of `parameters` are loaded is not known"""


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory."""

    name: str
    """as a person knows it: "the CPU", "NVIDIA H200 (cuda:0)" """
    total: int
    """bytes"""
    free: int
    """bytes"""
    swap: int = 0
    """bytes that may be on the disk instead"""


PARTS = ("checkpoints", "versions", "journal")
"""What a run keeps on a disk; each may be on one of its own, by a link in the run's directory."""


@dataclass(frozen=True, slots=True)
class Room:
    """A disk that something of the run is on, or would be."""

    folder: str
    """the folder, or the nearest one above it that exists"""
    free: int
    """bytes"""
    taken: int = 0
    """bytes of checkpoints and versions that the run has there already"""
    parts: tuple[str, ...] = PARTS
    """what of the run is there"""


@dataclass(frozen=True, slots=True)
class Facts:
    """None, or an empty value, is what is not known: nothing is said of it."""

    tried: tuple[Finding, ...] = ()
    """what was tried and failed: the task, the model's files, the ports, the run's directory"""
    notes: tuple[str, ...] = ()
    """what is to be known and no problem"""
    model: ModelShape | None = None
    rooms: tuple[Room, ...] = ()
    """the disks of the run, each once: run_dir's first"""
    host: Memory | None = None
    """the machine's own"""
    gpu: Memory | None = None
    """the trainer's device's, where that is not the CPU"""
    on_cpu: bool = False
    """the trainer computes in the host's memory"""
    costs: ModelCosts | None = None
    """what training takes, counted on the model without its weights"""
