"""An optimizer's state from a checkpoint, by the names of parameters. Must not know files, losses or the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from p2p.errors import UsageError

BEFORE_NAMES = "adamw"
"""Kind of checkpoints' groups from before they had names: there was one group, of this kind, in the parameters' order."""

ADAMW = {"adamw", "adamw_host"}
"""Kinds that trainer.optimizer = "adamw_host" may be: on a CPU in float32 it is "adamw"."""

MOVED = ", trainer.device and trainer.compute_dtype"
"""Settings that decide between these two beside trainer.optimizer."""


def restore(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> None:  # fmt: skip
    """Give the optimizer its saved `state`, of each parameter by its number in the saved `groups`. `names` are those of the
    trained parameters, in order.

    The settings (learning rate, betas, decay) are those of this run, so they may have changed. The state goes by name, so another
    division into groups may be read too. UsageError where it is of other parameters or of another optimizer.
    """
    theirs = dict[str, tuple[int, str]]()
    for group in groups:
        listed = group.get("param_names") or (names if len(groups) == 1 and len(group["params"]) == len(names) else None)
        if listed is None:
            raise UsageError("the checkpoint's optimizer has other parameters than this model's, and no names of them")
        theirs |= {name: (at, group.get("kind", BEFORE_NAMES)) for name, at in zip(listed, group["params"], strict=True)}
    ours = optimizer.state_dict()["param_groups"]
    if not all("param_names" in group for group in ours):  # one that we did not make: by number, in the parameters' order
        # JSON has no tuples, and optimizers compare and unpack betas as one.
        plain = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in groups]
        optimizer.load_state_dict({"state": {at: dict(of) for at, of in state.items()}, "param_groups": plain})
        return
    kinds = {name: group["kind"] for group in ours for name in group["param_names"]}
    if odd := sorted(theirs.keys() ^ kinds.keys()):
        raise UsageError(f"the checkpoint's optimizer has other parameters: {odd[0]} and {len(odd) - 1} more do not match")
    for name, kind in kinds.items():
        if (saved := theirs[name][1]) != kind:
            raise UsageError(
                f"the checkpoint's optimizer has {saved} state for {name}, and trainer.optimizer makes {kind} of it: set "
                f"trainer.optimizer{MOVED if {saved, kind} == ADAMW else ''} as the run was begun"
            )
    found = {
        at: dict(state[theirs[name][0]])
        for group in ours
        for name, at in zip(group["param_names"], group["params"], strict=True)
        if theirs[name][0] in state
    }
    optimizer.load_state_dict({"state": found, "param_groups": ours})
