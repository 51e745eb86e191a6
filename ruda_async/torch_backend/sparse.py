"""Sums of sparse tensors: every rank gathers all entries, and adds those of one place.

An entry travels as one row of bytes, its indices before its values, so that one call moves both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import TensorContractError
from .calls import Call

__all__ = ["all_reduce"]

_INDEX_BYTES = 8
_KINDS = (ReduceOp.SUM, ReduceOp.AVG)


def all_reduce(tensor: Tensor, op: Any) -> Call:
    """Sum sparse COO tensors of one shape in place; any number of entries on each rank.

    Entries are added in the order of ranks, in the tensor's dtype.

    Raises:
        TensorContractError: another layout than COO, or another operator than SUM and AVG.
    """
    kind = getattr(op, "op", op)
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise TensorContractError(
            f"a tensor of layout {tensor.layout} on {tensor.device}; the backend adds dense and sparse COO "
            "tensors on the CPU: pass .to_sparse_coo()"
        )
    if kind not in _KINDS:
        raise TensorContractError(f"the reduction {kind.name} of a sparse tensor; there are SUM and AVG")
    packed = _pack(tensor.detach().coalesce())

    def finish(exchange: Any) -> None:
        total = _unpack(exchange.value, tensor)
        if kind == ReduceOp.AVG:
            total = total / len(exchange.receive_counts)
        with torch.no_grad():
            tensor.copy_(total)

    return Call(lambda comm, seconds: comm.all_gather_v(packed, timeout=seconds), finish, packed.numel() * 8)


def _pack(tensor: Tensor) -> Tensor:
    """``[entries, bytes]`` of a coalesced tensor."""
    entries = tensor.indices().shape[1]
    width = math.prod(tensor.shape[tensor.sparse_dim() :])
    if not width:
        raise TensorContractError(f"a sparse tensor of shape {list(tensor.shape)} has no elements to add")
    indices = tensor.indices().t().reshape(-1).view(torch.uint8)
    values = tensor.values().reshape(-1).view(torch.uint8)
    return torch.cat(
        [
            indices.view(entries, tensor.sparse_dim() * _INDEX_BYTES),
            values.view(entries, width * tensor.element_size()),
        ],
        dim=1,
    )


def _unpack(rows: Tensor, like: Tensor) -> Tensor:
    """The sum of all entries, of the shape and dtype of `like`."""
    split = like.sparse_dim() * _INDEX_BYTES
    indices = rows[:, :split].reshape(-1).view(torch.int64).view(len(rows), like.sparse_dim())
    values = rows[:, split:].reshape(-1).view(like.dtype).view(len(rows), *like.shape[like.sparse_dim() :])
    try:
        return torch.sparse_coo_tensor(indices.t(), values, like.shape, check_invariants=True).coalesce()
    except RuntimeError as error:
        raise TensorContractError(
            f"other ranks sent entries that a sparse tensor of shape {list(like.shape)} does not have "
            f"({error}); pass tensors of one shape"
        ) from None
