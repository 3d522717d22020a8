"""What a model takes beside its weights, as it was counted. Pure values; must not know torch."""

from __future__ import annotations

from dataclasses import dataclass

REFUSED = "refused"
"""Key of what the counting process answers instead, where a setting is wrong: one line for each problem."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model as it is trained, counted without its values (`learner.trainer.forecast.count`)."""

    parameters: int
    """values of all weights, tied ones once"""
    trained: int
    """those of them that the optimizer changes"""
    matrices: int = 0
    """of the trained: values in the matrices of hidden layers, which some optimizers treat apart"""
    head: int = 0
    """values of the output projection"""
    activations: int = 0
    """bytes at the most crowded moment of a forward and backward pass, beside weights and their gradients; 0: not known"""
    tokens: int = 0
    """tokens of that pass"""
    layers: int = 0
    """layers that are run again in the backward, each of which keeps its input alone; 0: none is"""
    layer_bytes: int = 0
    """bytes that such a layer takes more where it is not run again"""
    bfloat16: bool = False
    """the pass computes in bfloat16"""
    unknown: str = ""
    """why `activations` is not known"""
