"""The public model that a run began with, read from this node's disk: then only what was learned since has to be downloaded.

Must not know versions, peers or engines. Whether it is the right model shows in the state's digest alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from p2p.errors import UsageError
from p2p.layout import WORD, TensorSpec
from p2p.weights.state import FlatState


class BaseModel:
    """A folder as Hugging Face has them, with one or more .safetensors files."""

    def __init__(self, folder: Path) -> None:
        """UsageError when there is nothing to read."""
        self.folder = folder
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise UsageError(f"--base-model {folder}: no .safetensors file there")

    def write(self, state: FlatState) -> None:
        """Fill `state`: each tensor by its name, floating ones cast to what the layout says; an adapter stays all zero.
        UsageError when one is not there, or has another shape, or a file cannot be read."""
        from safetensors import SafetensorError, safe_open

        lacking = {name: spec for name, spec in state.layout.by_name.items() if name not in state.layout.adapter}
        try:
            for path in self._files:
                with safe_open(str(path), "pt") as file:
                    for name in sorted(lacking.keys() & set(file.keys())):
                        state.write_tensor(name, self._bits(file.get_tensor(name), lacking.pop(name)))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"--base-model {self.folder}: {error}") from None
        if lacking:
            raise UsageError(f"--base-model {self.folder}: no tensor {next(iter(lacking))!r} there ({len(lacking)} lacking)")

    def _bits(self, tensor: Any, spec: TensorSpec) -> np.ndarray:
        import torch

        if tuple(tensor.shape) != spec.shape:
            raise UsageError(f"--base-model {self.folder}: {spec.name!r} is {tuple(tensor.shape)}, the run's is {spec.shape}")
        wanted = getattr(torch, spec.dtype)
        if tensor.dtype != wanted:
            if not (tensor.is_floating_point() and wanted.is_floating_point):
                raise UsageError(f"--base-model {self.folder}: {spec.name!r} is {tensor.dtype}, the run's is {spec.dtype}")
            tensor = tensor.to(wanted)
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return np.asarray(flat.view(WORD[spec.itemsize]).reshape(spec.shape))
