"""A version of the weights: (epoch, step). Must not know how versions are made or moved."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0)]


class Version(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One state of the weights, ordered first by learner epoch, then by optimizer steps done. On the wire `[epoch, step]`.

    `epoch` grows by one each time a learner starts on a run (it fences out a dead learner's messages);
    `step` is the number of optimizer steps behind these weights, never a count of publications.
    """

    epoch: Number
    step: Number

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read "EPOCH.STEP". ValueError on anything else."""
        epoch, dot, step = text.partition(".")
        if not dot or not all(number.isascii() and number.isdigit() for number in (epoch, step)):  # "²" is a digit, and no number
            raise ValueError(f"not a version: {text!r} (want EPOCH.STEP)")
        return cls(int(epoch), int(step))
