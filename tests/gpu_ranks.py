"""One rank of a job over NCCL, with a GPU of its own. Run by `test_gpu`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from torch_calls import CALLS, MEANS, same, values

import ruda_async
from ruda_async import AsyncCommunicator

ROWS = 5040  # what up to ten ranks divide


def nccl() -> int:
    """Every collective natively, against this library's own algorithms on the host; how many there were."""
    local = int(os.environ["RUDA_LOCAL_RANK"])
    os.environ["LOCAL_RANK"] = str(local)
    torch.cuda.set_device(local)
    return asyncio.run(_nccl(torch.device("cuda", local)))


async def _nccl(device: torch.device) -> int:
    calls = 0
    async with ruda_async.connect(order="any", native_bytes=0, timeout=100) as comm:
        exact = comm.channel("exact")
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            for name, call in CALLS.items():
                if name in MEANS and not dtype.is_floating_point:
                    continue
                await _compare(comm, exact, call, values(comm.rank, ROWS, dtype), device)
                calls += 1
    return calls


async def _compare(
    comm: AsyncCommunicator, exact: AsyncCommunicator, call: Any, host: torch.Tensor, device: torch.device
) -> None:
    if host.is_floating_point():
        host = host.sign()  # whose sums and products are exact in every order and every precision
    expected = await call(exact, host)
    given = host.to(device)
    result = await call(comm, given)
    same(result, expected)
    tensor = getattr(result, "value", result)
    assert tensor is None or tensor.device == device
    assert torch.equal(given.cpu(), host)
