"""Ranks compare what they are about to train, before the first gradient is sent."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..communicator import AsyncCommunicator
from ..errors import TensorContractError

__all__ = ["broadcast_tensors", "check_initialised", "describe", "same_on_all_ranks"]

#: Tensors of as many bytes are broadcast one by one, without a copy.
_LARGE = 1024 * 1024


def describe(name: str, value: Tensor) -> str:
    """What ranks have to agree on about one tensor."""
    return f"{name}: {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def check_initialised(name: str, value: Tensor) -> None:
    """See that a tensor is there, and no lazy module waits for its first input to make it.

    Raises:
        TensorContractError
    """
    if is_lazy(value):
        raise TensorContractError(
            f"{name} is not initialised, since its lazy module has had no input yet; run one forward pass on "
            "every rank first"
        )


async def same_on_all_ranks(comm: AsyncCommunicator, what: str, facts: Sequence[str]) -> None:
    """See that every rank has the same list of facts; collective.

    Raises:
        TensorContractError: on every rank, with the first difference.
    """
    digests = b"".join(zlib.crc32(fact.encode()).to_bytes(4, "little") for fact in facts)
    everyone = await comm.all_gather_object([len(facts), digests])
    if all(other == everyone[0] for other in everyone):
        return
    lists = [[d[i : i + 4] for i in range(0, len(d), 4)] for _, d in everyone]
    shortest = min(map(len, lists))
    place = next((i for i in range(shortest) if any(x[i] != lists[0][i] for x in lists)), shortest)
    told = await comm.all_gather_object(facts[place] if place < len(facts) else "nothing more")
    culprit = next(rank for rank, text in enumerate(told) if text != told[0])
    raise TensorContractError(
        f"rank {comm.rank} of {comm.world_size}: {what} are not the same on all ranks; number {place} is "
        f"{told[0]!r} on rank 0 and {told[culprit]!r} on rank {culprit}. Build the same model with the same "
        "arguments on every rank, or name what is not replicated",
        rank=culprit,
    )


@torch.no_grad()
async def broadcast_tensors(comm: AsyncCommunicator, tensors: Sequence[Tensor], root: int = 0) -> None:
    """Overwrite `tensors` by those of rank `root`; collective. Small ones of one kind travel together."""
    kinds: dict[object, list[Tensor]] = {}
    for number, value in enumerate(tensors):
        small = value.numel() * value.element_size() < _LARGE
        kinds.setdefault((value.dtype, value.device, -1 if small else number), []).append(value.detach())
    for group in kinds.values():
        flat = group[0].reshape(-1) if len(group) == 1 else torch.cat([value.reshape(-1) for value in group])
        await comm.broadcast(flat, root, out=flat)
        if comm.rank == root:
            continue
        parts = torch.split(flat, [value.numel() for value in group])
        for value, part in zip(group, parts, strict=True):
            if value.data_ptr() != part.data_ptr():
                value.copy_(part.view(value.shape))
