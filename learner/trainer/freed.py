"""What a trainer does with the memory that it frees, by the size of its model. Must not know models, steps or settings."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.processes import give_back_what_is_freed, keep_blocks_apart

AT_PEAK_FROM = 1_000_000
"""Parameters from which on what is free goes back to the system before a forward's logits, when most is held. Of a smaller model
it is little, and making pages anew at each step was a fifth of the CPU time of the demo's trainer (bench/demo.md). At 2 million
it is a twentieth, for a fifth of the memory."""

APART_FROM = 10_000_000
"""Parameters from which on large blocks are kept apart, and what is free goes back after each step as well. At 2 million the two
took a tenth of the time and left the peak as it is (bench/trainer.md)."""


@dataclass(frozen=True, slots=True)
class FreedMemory:
    """Of a model of `parameters`; on a GPU (`on_host` False) tensors are not the host's memory, and forwards leave it alone."""

    parameters: int
    on_host: bool = True

    @property
    def at_peak(self) -> bool:
        """Whether it goes back before a forward's logits."""
        return self.on_host and self.parameters >= AT_PEAK_FROM

    def begin(self) -> None:
        """Of this process, once its model is there."""
        if self.parameters >= APART_FROM:
            keep_blocks_apart()
            give_back_what_is_freed()  # of the loading

    def after_step(self) -> None:
        """The gradients are gone, and the next step's groups may be far."""
        if self.parameters >= APART_FROM:
            give_back_what_is_freed()
