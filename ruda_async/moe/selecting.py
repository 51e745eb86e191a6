"""Rows in another order, written to where their next exchange reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors.pool import POOLED

__all__ = ["Empty", "select"]

#: ``empty(shape, dtype)``, as a communicator's.
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]


def select(rows: Tensor, index: Tensor, empty: Empty | None = None) -> Tensor:
    """``rows.index_select(0, index)``, differentiable, large ones in memory from `empty`.

    There an exchange finds them without staging, and the memory is used again from layer to layer: fresh
    pages cost more than the rows that are written to them.
    """
    shape = torch.Size((len(index), *rows.shape[1:]))
    if empty is None or rows.device.type != "cpu" or shape.numel() * rows.element_size() < POOLED:
        return rows.index_select(0, index)
    memory = empty(shape, rows.dtype)
    if torch.is_grad_enabled() and rows.requires_grad:
        selected: Tensor = _Select.apply(rows, index, [memory])  # type: ignore[no-untyped-call]
        return selected
    return torch.index_select(rows.detach(), 0, index, out=memory)


class _Select(torch.autograd.Function):
    """``out=`` is not differentiable by itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, box: list[Tensor]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        # Fresh memory, though it is a view of a block: editing it is harmless.
        return torch.index_select(rows, 0, index, out=box.pop()).data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        zeros = gradient.new_zeros((ctx.rows, *gradient.shape[1:]))
        return zeros.index_add(0, index, gradient), None, None
