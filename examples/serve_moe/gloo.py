"""For comparison: the same exchange over torch.distributed (Gloo), whose blocking calls run in threads.

Calls of one process group have to come in one order on all ranks, so each batch under way needs a group and a
thread of its own, and no more batches are under way than there are groups. No rank may be lost, and no batch
be cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ruda_async import AsyncCommunicator, moe

from .shard import Shard

__all__ = ["Gloo"]


class Gloo:
    """An `exchange.Exchange`. Batch *n* takes group *n* modulo the number of groups, in order of *n*."""

    def __init__(self, rank: int, groups: list[Any]) -> None:
        self._rank = rank
        self._lanes = [(group, ThreadPoolExecutor(1), asyncio.Lock()) for group in groups]

    @classmethod
    async def meet(cls, comm: AsyncCommunicator, groups: int, timeout: float) -> Gloo:
        """Make the process groups; collective."""
        store = Path(tempfile.mkdtemp(prefix="serve-moe-"), "store") if comm.rank == 0 else None
        path = await comm.channel("gloo").broadcast_object(None if store is None else str(store), 0)

        def make() -> list[Any]:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{path}",
                rank=comm.rank,
                world_size=comm.world_size,
                timeout=timedelta(seconds=timeout),
            )
            return [dist.new_group(backend="gloo") for _ in range(groups)]

        return cls(comm.rank, await asyncio.to_thread(make))

    async def run(self, shard: Shard, number: int, tokens: Tensor) -> Tensor:
        """See `exchange.Exchange`."""
        group, thread, lock = self._lanes[number % len(self._lanes)]
        async with lock:
            return await self._layer(shard, tokens, group, thread)

    async def _layer(self, shard: Shard, tokens: Tensor, group: Any, thread: ThreadPoolExecutor) -> Tensor:
        def blocking(call: Callable[..., Tensor], *args: Any) -> Any:
            return asyncio.get_running_loop().run_in_executor(thread, call, *args)

        layout = shard.layout
        routing = moe.route(shard.model.router(tokens), shard.model.sizes.chosen)
        sent = moe.dispatch(tokens, routing, layout)
        local, ranks = layout.counts[self._rank], layout.world_size
        told = await blocking(
            _exchange, torch.tensor(sent.expert_counts), list(layout.counts), [local] * ranks, group
        )
        table = told.view(ranks, local)
        received = table.sum(1).tolist()
        rows = await blocking(_exchange, sent.rows, list(sent.send_counts), received, group)
        order = torch.arange(local).repeat(ranks).repeat_interleave(table.reshape(-1)).argsort(stable=True)
        answers = shard.apply(rows[order], tuple(table.sum(0).tolist()))
        if inspect.isawaitable(answers):
            answers = await answers
        back = torch.empty_like(rows)
        back[order] = answers
        home = await blocking(_exchange, back, received, list(sent.send_counts), group)
        return moe.combine(home, sent)


def _exchange(value: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    result = value.new_empty((sum(receive), *value.shape[1:]))
    dist.all_to_all_single(result, value.contiguous(), receive, send, group=group)
    return result
