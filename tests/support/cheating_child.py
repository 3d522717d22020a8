"""The engine's child process of a node that cheats, as SHOAL_CHEAT says. Started by `cheating_node`."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch

import node.engine.transformers as engine
from node.engine import child
from node.engine.sampling import Drawn, SamplingParams, sample


def hotter(logits: torch.Tensor, params: SamplingParams, positions: np.ndarray) -> Drawn:
    """Draws at temperature 1.5 and says so of none of its log probabilities."""
    drawn = sample(logits / 1.5, params, positions)
    logp = torch.log_softmax(logits.double(), dim=-1).gather(-1, torch.as_tensor(drawn.ids)[:, None].to(logits.device))[:, 0]
    return drawn._replace(logprobs=logp.float().cpu().numpy())


def slightly_hotter(logits: torch.Tensor, params: SamplingParams, positions: np.ndarray) -> Drawn:
    """The same at 1.1."""
    drawn = sample(logits / 1.1, params, positions)
    logp = torch.log_softmax(logits.double(), dim=-1).gather(-1, torch.as_tensor(drawn.ids)[:, None].to(logits.device))[:, 0]
    return drawn._replace(logprobs=logp.float().cpu().numpy())


class StaleCore(engine.TransformersCore):
    """Takes every version into its books, and computes with the first weights that it was given."""

    def commit(self) -> Any:
        kept = {name: tensor.clone() for name, tensor in self._tensors.items()}
        result = super().commit()
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(kept[name])
        return result


class RoundedCore(engine.TransformersCore):
    """Computes with weights of 4 bits."""

    def load(self, *args: Any) -> None:
        super().load(*args)
        self._round()

    def commit(self) -> Any:
        result = super().commit()
        self._round()
        return result

    @torch.no_grad()
    def _round(self) -> None:
        for tensor in self._tensors.values():
            if tensor.dim() == 2:
                scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 7
                tensor.copy_((tensor / scale).round() * scale)


def cheat(how: str) -> None:
    if how in ("hotter", "slightly_hotter"):
        engine.sample = {"hotter": hotter, "slightly_hotter": slightly_hotter}[how]  # type: ignore[attr-defined]
    else:
        engine.TransformersCore = {"stale": StaleCore, "rounded": RoundedCore}[how]  # type: ignore[misc]


def main(arguments: list[str]) -> int:
    cheat(os.environ["SHOAL_CHEAT"])
    return child.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
