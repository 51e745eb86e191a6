"""The layer on one process, written another way: what `moe_layer` must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import TensorContractError
from .routing import route

__all__ = ["reference"]


def reference(
    tokens: Tensor, logits: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], k: int, **routing: Any
) -> Tensor:
    """Run every expert over the tokens that chose it, in one process and without any communication.

    With the tokens and logits of all ranks concatenated in rank order, values and all gradients are those of
    `moe_layer` with ``per_expert``.

    Args:
        tokens: floating ``[tokens, features]``.
        logits: floating ``[tokens, experts]``.
        experts: all experts, each from ``[n, features]`` to ``[n, out]``.
        k, routing: as in `moe_layer`.

    Returns:
        ``[tokens, out]``.

    Raises:
        TensorContractError: the number of experts is not that of the logits; or as `route`.
    """
    chosen, weights = route(logits, k, **routing)
    if len(experts) != logits.shape[1]:
        raise TensorContractError(f"{len(experts)} experts do not fit logits of shape {list(logits.shape)}")
    total: Tensor | None = None
    dtype = tokens.dtype
    for number, expert in enumerate(experts):
        token, slot = torch.nonzero(chosen == number, as_tuple=True)
        output = expert(tokens[token])
        dtype = output.dtype
        part = output.to(weights.dtype) * weights[token, slot].view(-1, *(1,) * (output.dim() - 1))
        if total is None:
            total = part.new_zeros((len(tokens), *output.shape[1:]))
        total = total.index_add(0, token, part)
    assert total is not None  # route refuses k without experts
    return total.to(dtype)
