"""Muon for hidden matrices, AdamW for everything else, as one optimizer. Must not know losses or settings."""

from __future__ import annotations

from typing import Any

import torch

MUON = "muon"
"""`kind` of the groups that Muon updates; those of any other are AdamW's."""


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's own Muon (Keller Jordan's, with Nesterov momentum of 0.95) and torch's own AdamW over one state.

    Muon's update is scaled to the size that AdamW's has (0.2 sqrt(max(rows, columns)), arXiv 2502.16982, section 2.2), so that
    one learning rate serves both. Its five iterations of Newton and Schulz are in bfloat16.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        ours = [g for g in groups if g["kind"] == MUON]
        others = [g for g in groups if g["kind"] != MUON]
        # Each fills in the settings of its own groups, in the group itself.
        self._muon = torch.optim.Muon(ours, lr=lr, adjust_lr_fn="match_rms_adamw") if ours else None
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=True) if others else None
        named = [{**g, "params": list(zip(g.pop("param_names"), g["params"], strict=True))} for g in ours + others]
        super().__init__(named, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient. `closure` is not called: gradients are there."""
        for inner, mine in ((self._muon, True), (self._adamw, False)):
            if inner is not None:
                # Anew each time: what is loaded from a checkpoint replaces groups and state.
                inner.param_groups = [g for g in self.param_groups if (g["kind"] == MUON) == mine]
                inner.state = self.state
                inner.step()
