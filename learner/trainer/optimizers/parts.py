"""Which parameters are treated alike by an optimizer. Must not know optimizers, losses or settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

PART_OF = "shoal_part_of"
"""Attribute of a trained tensor that is one rank's part of a parameter of the model: that parameter."""


class Named(NamedTuple):
    """A parameter by its name, as torch's optimizers take it: they keep the names, and checkpoints with them."""

    name: str
    parameter: nn.Parameter


class ParameterParts(NamedTuple):
    """The trained parameters of a model, each in one part, in their order.

    The rule: what has fewer than two dimensions (norms, biases) is a vector. A matrix of an embedding, by token or by position,
    or one that the output head shares with it, is an embedding. The head's own matrix is the head. Any other is a hidden matrix
    where it has two dimensions, and else (convolutions, experts in one block) a stack.
    Weight decay is for hidden matrices, stacks and the head. It would pull norms to zero, which only undoes what the next layer
    makes of them, and embeddings of tokens that a task never has.
    """

    hidden: list[Named]
    stacks: list[Named]
    head: list[Named]
    embeddings: list[Named]
    vectors: list[Named]


def parts_of(parameters: Iterable[tuple[str, nn.Parameter]], model: nn.Module) -> ParameterParts:
    """The named parameters by the rule of `ParameterParts`; `model` is the one that has them."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = _head(model)
    parts = ParameterParts([], [], [], [], [])
    for name, parameter in parameters:
        of = getattr(parameter, PART_OF, parameter)
        if parameter.ndim < 2:
            part = parts.vectors
        elif id(of) in embeddings:
            part = parts.embeddings
        elif of is head:
            part = parts.head
        else:
            part = parts.hidden if parameter.ndim == 2 else parts.stacks
        part.append(Named(name, parameter))
    return parts


def _head(model: nn.Module) -> Tensor | None:
    """The output projection's matrix, where the model can tell."""
    find = getattr(model, "get_output_embeddings", None)
    module = find() if callable(find) else None
    return getattr(module, "weight", None)
