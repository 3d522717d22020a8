"""AdamW whose moments are kept in 8 bits: bitsandbytes', an extra. Must not know losses or settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from learner.trainer.optimizers.kinds import NO_PACKAGE
from p2p.errors import UsageError

MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Keys of a parameter's state that have bitsandbytes' maps from 8 bits to values, and its names of these maps."""


def make_adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Moments by blocks of 256 values, each with a scale (arXiv 2110.02861); tensors below 4,096 values keep theirs in float32.
    UsageError without bitsandbytes."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UsageError(f"{NO_PACKAGE} ({error})" if error.name != "bitsandbytes" else NO_PACKAGE) from None

    class Resumable(AdamW8bit):
        """With a state of plain tensors of their own, which checkpoints are made of."""

        def state_dict(self) -> dict[str, Any]:
            # bitsandbytes' own puts some of it into a dictionary inside. The maps from 8 bits to values are the same for all.
            saved: dict[str, Any] = torch.optim.Optimizer.state_dict(self)
            kept = {i: {k: v for k, v in entry.items() if k not in MAPS} for i, entry in saved["state"].items()}
            return {**saved, "state": kept}

        def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
            state = {i: dict(entry) for i, entry in state_dict["state"].items()}
            for entry in state.values():
                entry["step"] = int(entry["step"])  # it counts in a plain integer
                if entry["state1"].dtype == torch.uint8:
                    entry |= {key: self.name2qmap[name] for key, name in MAPS.items()}
            super().load_state_dict({**state_dict, "state": state}, **kwargs)

    return Resumable(groups, lr=lr, betas=betas)
