"""A trained model as an ordinary Hugging Face folder. Must not know checkpoints, versions or the network."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from learner.model import SERVED_DTYPES
from p2p.errors import UsageError


def export_model(model: nn.Module, tokenizer: Any, folder: Path, dtype: str = "bfloat16") -> Path:
    """save_pretrained of model and tokenizer under `folder`, weights cast to `dtype`; the model itself is unchanged."""
    if dtype not in SERVED_DTYPES:
        raise UsageError(f"export dtype {dtype!r} is not one of {', '.join(SERVED_DTYPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    target = SERVED_DTYPES[dtype]
    cast: Any = model if next(model.parameters()).dtype == target else copy.deepcopy(model).to(target)
    cast.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
