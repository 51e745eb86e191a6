"""How one batch passes through all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ruda_async import AsyncCommunicator, moe

from .shard import Shard

__all__ = ["Alone", "Exchange", "Ruda"]


class Exchange(Protocol):
    """What every rank of a generation does for batch `number`; the front has the rows, workers none."""

    async def run(self, shard: Shard, number: int, tokens: Tensor) -> Tensor:
        """What the experts add to `tokens`, ``[n, width]``; collective."""


class Ruda:
    """The library's layer of sharded experts, on a channel of its own for each batch."""

    def __init__(self, comm: AsyncCommunicator, timeout: float) -> None:
        self._comm = comm
        self._timeout = timeout

    async def run(self, shard: Shard, number: int, tokens: Tensor) -> Tensor:
        """See `Exchange`.

        Raises:
            RudaError: as every collective; on all ranks alike.
        """
        channel = self._comm.channel(f"batch {number}")
        try:
            return await moe.aio.moe_layer(
                channel,
                tokens,
                shard.model.router(tokens),
                shard.apply,
                shard.layout,
                shard.model.sizes.chosen,
                timeout=self._timeout,
            )
        finally:
            await channel.close()


class Alone:
    """One process that holds all experts, and no communication: what the sharded server must equal."""

    async def run(self, shard: Shard, number: int, tokens: Tensor) -> Tensor:
        """See `Exchange`."""
        shard.rows += len(tokens) * shard.model.sizes.chosen
        with torch.no_grad():
            return moe.reference(
                tokens,
                shard.model.router(tokens),
                list(shard.model.experts.values()),
                shard.model.sizes.chosen,
            )
