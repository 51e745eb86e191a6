"""Every collective once, on a torch tensor of ``[rows, 5]`` whose rows the world size divides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from ruda_async import AsyncCommunicator

Call = Callable[[AsyncCommunicator, Any], Any]


def _last(comm: AsyncCommunicator) -> int:
    return comm.world_size - 1


def _counts(comm: AsyncCommunicator, x: Any) -> list[int]:
    """Uneven ones, and none for most ranks."""
    counts = [0] * comm.world_size
    counts[-1] += 2
    counts[0] += len(x) - 2
    return counts


async def _pass_round(comm: AsyncCommunicator, x: Any) -> Any:
    """Point to point: to the next rank, from the one before."""
    if comm.world_size == 1:
        return x.clone()
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    sending = asyncio.ensure_future(comm.send(x, right))
    received = await comm.recv(left, like=x)
    await sending
    return received


#: Those that only move elements.
MOVES: dict[str, Call] = {
    "all_gather": lambda c, x: c.all_gather(x),
    "all_gather_dim": lambda c, x: c.all_gather_dim(x, 1),
    "all_gather_v": lambda c, x: c.all_gather_v(x[: c.rank + 1]),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "all_to_all_dim": lambda c, x: c.all_to_all_dim(x, 0, 1),
    "all_to_all_v": lambda c, x: c.all_to_all_v(x, _counts(c, x)),
    "broadcast": lambda c, x: c.broadcast(x, _last(c)),
    "gather": lambda c, x: c.gather(x, 0),
    "scatter": lambda c, x: c.scatter(x if c.rank == 0 else None, 0, like=x),
    "send and recv": _pass_round,
}
#: Those that add, or compare.
REDUCTIONS: dict[str, Call] = {
    "all_reduce": lambda c, x: c.all_reduce_sum(x),
    "all_reduce max": lambda c, x: c.all_reduce(x, "max"),
    "all_reduce prod": lambda c, x: c.all_reduce(x, "prod"),
    "bounded": lambda c, x: c.bounded(4096).all_reduce_sum(x),
    "reduce": lambda c, x: c.reduce(x, _last(c), "min"),
    "reduce_scatter": lambda c, x: c.reduce_scatter_sum(x),
}
#: Means, of floats alone.
MEANS: dict[str, Call] = {
    "all_reduce mean": lambda c, x: c.all_reduce(x, "mean"),
    "reduce_scatter mean": lambda c, x: c.reduce_scatter(x, "mean"),
}
CALLS: dict[str, Call] = MOVES | REDUCTIONS | MEANS


def values(rank: int, rows: int, dtype: Any) -> Any:
    """Random numbers on the host."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn((rows, 5), generator=generator).to(dtype)
    return torch.randint(-50, 50, (rows, 5), generator=generator).to(dtype)


def same(result: Any, expected: Any) -> None:
    """Two results of one call, wherever they lie, are equal to the bit."""
    if expected is None:
        assert result is None
        return
    counts = getattr(expected, "receive_counts", None)
    if counts is not None:
        assert tuple(result.receive_counts) == tuple(counts)
        result, expected = result.value, expected.value
    assert result.dtype == expected.dtype
    assert torch.equal(result.cpu(), expected.cpu())
