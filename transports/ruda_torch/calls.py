"""The calls of this library as those of a process group of torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ruda_async.transport import NativeCall, NativeGroup, RudaError

from .groups import seconds_left

__all__ = ["OPERATORS", "TYPES", "start", "tensor"]

#: Where torch keeps the options of collectives.
_c10d: Any = dist.distributed_c10d

#: The dtypes that torch's backends compute with as documented.
TYPES = {name: getattr(torch, name) for name in ("int8", "uint8", "int32", "int64", "float32", "float64")}
OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def start(group_: Any, group: NativeGroup, call: NativeCall, given: Tensor, result: Tensor) -> Any:
    """Begin the collective on flat tensors; torch's handle on it."""
    at_root = group.rank == call.root
    size = group.size
    match call.operation:
        case "all_reduce":
            return group_.allreduce([result], _options(_c10d.AllreduceOptions, group, call))
        case "reduce":
            return group_.reduce([result], _options(_c10d.ReduceOptions, group, call))
        case "reduce_scatter":
            return group_._reduce_scatter_base(
                result, given, _options(_c10d.ReduceScatterOptions, group, call)
            )
        case "all_gather":
            return group_._allgather_base(result, given, _options(_c10d.AllgatherOptions, group, call))
        case "gather":
            blocks = [list(result.chunk(size))] if at_root else []
            return group_.gather(blocks, [given], _options(_c10d.GatherOptions, group, call))
        case "scatter":
            blocks = [list(given.chunk(size))] if at_root else []
            return group_.scatter([result], blocks, _options(_c10d.ScatterOptions, group, call))
        case "broadcast":
            return group_.broadcast([result], _options(_c10d.BroadcastOptions, group, call))
        case "all_to_all":
            return group_.alltoall_base(result, given, [], [], _options(_c10d.AllToAllOptions, group, call))
        case "all_to_all_v":
            lengths = list(call.receive_lengths), list(call.send_lengths)
            return group_.alltoall_base(result, given, *lengths, _options(_c10d.AllToAllOptions, group, call))
    raise RudaError(f"no provider of torch has {call.operation}; report this")


def _options(kind: Any, group: NativeGroup, call: NativeCall) -> Any:
    options = kind()
    options.timeout = seconds_left(group)
    if call.operator is not None:
        options.reduceOp = OPERATORS[call.operator]
    if call.root is not None:
        options.rootRank = call.root
    return options


def tensor(view: memoryview, call: NativeCall) -> Tensor:
    """The bytes as a flat tensor, without a copy; of the call's dtype where that matters."""
    kind = torch.uint8 if call.operator is None else TYPES[call.dtype]
    if not len(view):
        return torch.empty(0, dtype=kind)
    if view.readonly:  # torch has no tensors that are only read, and would warn
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return torch.frombuffer((ctypes.c_char * len(view)).from_address(address), dtype=kind)
    return torch.frombuffer(view, dtype=kind)
