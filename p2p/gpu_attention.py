"""Which kernels compute attention on a GPU, where no two calls have the same lengths. Must not know models, or import torch:
whoever has it gives it.

On Hopper and newer torch may choose cuDNN's attention, which makes a plan for each new shape: some tenths of a second, forward
and backward each. Forwards of rows as they come, prompts and growing completions nearly always have a new one: a step of 0.5B
took 6 to 13 s on an H100 where it takes 1.2 (bench/trainer.md). Torch's other kernels, flash attention and the memory-efficient
one, are compiled once for all lengths.
"""

from __future__ import annotations

from typing import Any


def without_plans_by_shape(torch: Any) -> None:
    """Of this process, from here on: no cuDNN attention. `torch`: the module. Where there is no GPU it changes nothing."""
    torch.backends.cuda.enable_cudnn_sdp(False)
