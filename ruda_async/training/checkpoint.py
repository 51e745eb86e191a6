"""A sharded optimizer's state, made whole and cut again.

The whole has the form of `torch.optim.Optimizer.state_dict`, so it fits any number of ranks, and the
optimizer of a single process too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from .shards import Flat, Piece

__all__ = ["cut_state", "whole_state"]

#: What optimizers call their count of steps: a scalar also where the parameter is one.
_STEP = "step"


async def whole_state(
    comm: AsyncCommunicator, optimizer: Optimizer, flats: Sequence[Flat], root: int | None
) -> dict[int, dict[str, Any]] | None:
    """The state of every parameter; collective.

    Raises:
        TensorContractError: some state is not one number for each element of its parameter; on all ranks.
    """
    mine = [[piece.number, _facts(piece, optimizer.state[piece.part])] for f in flats for piece in f.pieces]
    known: dict[int, dict[str, list[Any]]] = {}
    for each in await comm.all_gather_object(mine):
        for index, facts in each:
            known.setdefault(index, facts)
    bad = next(((i, k) for i, facts in known.items() for k, f in facts.items() if f[0] == "other"), None)
    if bad is not None:
        raise TensorContractError(
            f"rank {comm.rank} of {comm.world_size}: the state {bad[1]!r} of parameter {bad[0]} is not one "
            "number for each element, so it cannot be sharded; use an elementwise optimizer such as AdamW"
        )
    result: dict[int, dict[str, Any]] = {index: {} for index in sorted(known) if known[index]}
    for index, facts in known.items():
        for key, (kind, dtype, value) in facts.items():
            if kind == "scalar":
                result[index][key] = torch.tensor(value, dtype=getattr(torch, dtype))
            elif kind == "value":
                result[index][key] = value
    for flat in flats:
        keys = sorted(
            {(k, f[1]) for i in flat.indices for k, f in known.get(i, {}).items() if f[0] == "each"}
        )
        for key, name in keys:
            values = [optimizer.state[piece.part].get(key) for piece in flat.pieces]
            shard = flat.joined(values, getattr(torch, name))
            whole = await (comm.all_gather(shard) if root is None else comm.gather(shard, root))
            if whole is not None:
                for index, value in flat.separated(whole).items():
                    if known.get(index, {}).get(key, ("", ""))[:2] == ["each", name]:
                        result[index][key] = value
    return result if root is None or comm.rank == root else None


def _facts(piece: Piece, state: dict[str, Any]) -> dict[str, list[Any]]:
    """For each entry, of what kind it is, its dtype, and its value where that is small."""
    found: dict[str, list[Any]] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            found[key] = ["value", "", value]
        elif value.dim() == 0:
            found[key] = ["scalar", str(value.dtype).removeprefix("torch."), value.item()]
        else:
            kind = "each" if value.shape == piece.part.shape else "other"
            found[key] = [kind, str(value.dtype).removeprefix("torch."), None]
    return found


def cut_state(piece: Piece, shape: torch.Size, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of one parameter's whole state."""
    result = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and key != _STEP and value.shape == shape:
            result[key] = value.reshape(-1)[piece.start : piece.stop].clone()
        else:
            result[key] = value.clone() if isinstance(value, Tensor) else value
    return result
