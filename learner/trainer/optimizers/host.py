"""AdamW whose state, and the weights that it changes, are in the machine's memory. Must not know losses or settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learner.trainer.matrices import keep_in_bfloat16

BUCKET_BYTES = 256 << 20
"""Bytes of gradients on their way at once: enough that copies run at the bus's speed, and little beside 12 bytes a parameter."""

MASTER = "master"
"""Key of a parameter's float32 weights in the state of a checkpoint."""


class HostAdamW(torch.optim.AdamW):
    """AdamW over masters on the host.

    The device keeps the weights that the model computes with, and their gradient, which is float32. In an update the gradients
    come to the host, bucket by bucket, the masters are changed there, and the weights go back. What `param_groups` and `state`
    have are the masters. With `bfloat16` the model's matrices are kept in it on the device from here on.
    The update is torch's own AdamW, tensor by tensor, so it has the same bits as on a CPU.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, model: nn.Module, bfloat16: bool, lr: float, betas: tuple[float, float],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        self._resident = [parameter for group in groups for _, parameter in group["params"]]
        masters = [{**group, "params": [(name, _master(p)) for name, p in group["params"]]} for group in groups]
        super().__init__(masters, lr=lr, betas=betas, fused=True)
        if bfloat16:
            keep_in_bfloat16(model, self._resident)
        self._locked = self._resident[0].is_cuda
        self._values = max(bucket_bytes // 4, max(p.numel() for p in self._resident))
        self._staging: Tensor | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the device's weights."""
        for parameter in self._resident:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient. `closure` is not called: gradients are there."""
        for bucket in self._buckets():
            at = 0
            for master, resident in bucket:
                master.grad = self._stage(at, resident.numel()).view_as(resident)
                master.grad.copy_(resident.grad, non_blocking=self._locked)
                at += resident.numel()
            self._arrived()
            super().step()  # of this bucket: no other master has a gradient
            at = 0
            for master, resident in bucket:
                master.grad = None
                back = self._stage(at, resident.numel()).view(resident.dtype)[: resident.numel()].view_as(resident)
                resident.copy_(back.copy_(master), non_blocking=self._locked)
                at += resident.numel()
            self._arrived()  # before the next bucket writes there

    def state_dict(self) -> dict[str, Any]:
        """With the masters."""
        saved: dict[str, Any] = super().state_dict()
        kept = {i: {**saved["state"].get(i, {}), MASTER: master.detach()} for i, (master, _) in enumerate(self._pairs())}
        return {**saved, "state": kept}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """And the weights on the device, as they follow from the masters."""
        entries = {i: {k: v for k, v in entry.items() if k != MASTER} for i, entry in state_dict["state"].items()}
        # An entry without moments is of a parameter that never had a gradient: AdamW makes them where there is none.
        super().load_state_dict({**state_dict, "state": {i: entry for i, entry in entries.items() if entry}})
        for i, (master, resident) in enumerate(self._pairs()):
            master.copy_(state_dict["state"][i][MASTER])
            resident.copy_(master)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each master, and the weights on the device that follow it."""
        return zip((p for group in self.param_groups for p in group["params"]), self._resident, strict=True)

    def _buckets(self) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        bucket, filled = list[tuple[nn.Parameter, nn.Parameter]](), 0
        for master, resident in self._pairs():
            if resident.grad is None:
                continue
            if bucket and filled + resident.numel() > self._values:
                yield bucket
                bucket, filled = [], 0
            bucket.append((master, resident))
            filled += resident.numel()
        if bucket:
            yield bucket

    def _stage(self, at: int, size: int) -> Tensor:
        """float32 [size] of page-locked memory, which a GPU copies from and to at the bus's speed."""
        if self._staging is None:
            self._staging = torch.empty(self._values, dtype=torch.float32, pin_memory=self._locked)
        return self._staging[at : at + size]

    def _arrived(self) -> None:
        if self._locked:
            torch.cuda.synchronize(self._resident[0].device)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True))
