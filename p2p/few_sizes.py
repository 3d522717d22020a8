"""Lengths of forwards rounded up, so that few occur. Pure; must not know torch or what is forwarded.

oneDNN compiles kernels for each size of a product or an attention in bfloat16 on a processor, and torch never lets go of those of
attention: a trainer grew by 140 MiB a step, an engine by 1 GiB in 240 prefills (bench/trainer.md).
"""

from __future__ import annotations

FEW_SIZES = 32
"""Tokens of whose multiples forwards in bfloat16 on processors are."""


def multiple_on(device: str, dtype: str) -> int:
    """What forwards' lengths are filled up to on a device ("cpu", "cuda") in a type ("bfloat16", also as "torch.bfloat16")."""
    return FEW_SIZES if device == "cpu" and dtype.removeprefix("torch.") == "bfloat16" else 1


def filled_up(tokens: int, multiple: int) -> int:
    """Tokens of a forward with those that fill it up to a `multiple`, coarser where it is long, so that few sizes occur: eight
    from one power of two to the next, of an eighth more at most, or less than `multiple` more. 1: as it is."""
    if multiple == 1:
        return tokens
    return rounded_up(tokens, max(multiple, 1 << tokens.bit_length() - 1 >> 3))


def sizes_up_to(tokens: int) -> int:
    """How many lengths forwards of up to `tokens` tokens have, where they are of few sizes."""
    return len({filled_up(n, FEW_SIZES) for n in range(FEW_SIZES, tokens + 1, FEW_SIZES)})


def rounded_up(size: int, multiple: int) -> int:
    """To the next multiple."""
    return -(-size // multiple) * multiple
