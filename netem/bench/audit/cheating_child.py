"""An engine's process that cheats: `node.engine.child`, with each draw among the SHOAL_BENCH_TOP_K most likely tokens alone, and
their log probabilities reported as the engine's. Runs in an engine's own environment; must not import more of the bench."""

from __future__ import annotations

import os
import sys

import torch

from node.engine import sampling
from node.engine.child import main

_honest = sampling.log_probs


def _of_few(logits: torch.Tensor, params: sampling.SamplingParams) -> torch.Tensor:
    logp = _honest(logits, params)
    least = logp.topk(int(os.environ["SHOAL_BENCH_TOP_K"]), dim=-1).values[:, -1:]
    return torch.log_softmax(logp.masked_fill(logp < least, -torch.inf), dim=-1)


if __name__ == "__main__":
    sampling.log_probs = _of_few
    sys.exit(main(sys.argv[1:]))
