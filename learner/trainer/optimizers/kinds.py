"""What each optimizer takes a parameter, in bytes. Pure; must not know torch: forecasts read it."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from learner.trainer.settings import OptimizerName
from p2p.errors import UsageError

NO_PACKAGE = (
    'trainer.optimizer = "adamw_8bit" needs the package bitsandbytes, which is not installed: '
    "pip install '.[bitsandbytes]' from Shoal's checkout"
)
"""What is said where it is missing."""

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a value."""

BLOCK_8BIT = 256
"""Values of a moment in 8 bits that share one scale in float32."""


def check_package(kind: OptimizerName) -> None:
    """UsageError where the optimizer needs a package that is not installed."""
    if kind == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(NO_PACKAGE)


class ParameterBytes(NamedTuple):
    """Bytes a parameter, as an average over a large tensor."""

    device: float
    """weights, their gradient, and the optimizer's state, on the trainer's device"""
    host: float
    """masters and state in the machine's memory, beside what is on a device that has its own"""
    disk: float
    """of a checkpoint"""


def bytes_per_parameter(kind: OptimizerName, *, bfloat16: bool = False, hidden_matrix: bool = True) -> ParameterBytes:
    """What training with an optimizer takes a trained parameter; activations and published states are beside it.

    `bfloat16`: the model computes in it on a device with memory of its own. Then "adamw_host" keeps matrices in bfloat16 there,
    and their float32 masters on the host; the gradient is float32 in any case. `hidden_matrix`: the parameter is one that "muon"
    treats as a matrix (`learner.trainer.optimizers.parts`); for the other kinds it does not count.
    """
    weight = gradient = FLOAT32
    moments: float = 2 * FLOAT32
    if kind == "adamw_host":
        resident = BFLOAT16 if bfloat16 else FLOAT32
        # The checkpoint keeps the model as it is on the device, and the masters with the moments.
        return ParameterBytes(resident + gradient, FLOAT32 + moments, resident + FLOAT32 + moments)
    if kind == "adamw_8bit":
        moments = 2 * (1 + FLOAT32 / BLOCK_8BIT)
    elif kind == "muon" and hidden_matrix:
        moments = FLOAT32
    return ParameterBytes(weight + gradient + moments, 0, weight + moments)
