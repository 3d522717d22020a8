"""What of a model is trained, kept in checkpoints and published: the `Trained` port. Must not know losses or the network.

`WholeModel` is full training on one device, `learner.trainer.adapter.adapted.AdaptedModel` an adapter on a frozen base. Another
kind (shards of several processes) is another implementation: the trainer's loop knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from learner.client.port import Weights
from learner.trainer.device_weights import DeviceWeights
from learner.trainer.model import named_state, served_tensors


class Trained(Protocol):
    """A model, and which part of it changes."""

    module: nn.Module
    """runs forward and backward"""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer changes, by name."""

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint keeps of the weights, by name: what `parameters` are, and whatever else the training changes."""

    @property
    def base(self) -> Callable[[], AbstractContextManager[None]] | None:
        """A context within which `module` is the model that the run began with, without gradients; None where it is not kept."""

    def weights(self) -> Weights:
        """What is published, as it is now; arrays are valid until the next optimizer step."""


class WholeModel:
    """Every parameter is trained, and every tensor of the state is published in `served_dtype`."""

    base = None

    def __init__(self, module: nn.Module, served_dtype: str = "bfloat16") -> None:
        self.module, self._dtype = module, served_dtype
        on_gpu = next(module.parameters()).is_cuda
        self._on_device = DeviceWeights(module, served_dtype) if on_gpu else None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters(remove_duplicate=True)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        yield from named_state(self.module)

    def weights(self) -> Weights:
        return self._on_device or served_tensors(self.module, self._dtype)
