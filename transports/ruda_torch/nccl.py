"""NCCL's collectives: on GPUs, whatever memory the tensors are in.

The links hand over host memory, to which CUDA tensors were copied; so inputs go to this rank's GPU, and
results come back. All of that happens on a thread, since it waits for the GPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ruda_async.transport import NativeCall, NativeGroup, in_thread

from .calls import start, tensor
from .groups import in_background, inside
from .provider import TorchProvider

__all__ = ["NcclProvider", "StagedProvider"]

R = TypeVar("R")

#: Operations whose result is made in place, so that the memory of the result has the input to begin with.
_IN_PLACE = ("all_reduce", "reduce", "broadcast")
#: torch ends the whole process when a collective of NCCL takes longer; here deadlines are kept by aborting.
_NEVER = timedelta(days=7)


class StagedProvider(TorchProvider):
    """Runs collectives on a device, and copies there and back.

    A call that is given up has its process group aborted, which ends the wait for it, and its result is not
    copied back.
    """

    #: Where collectives run.
    device: torch.device

    async def execute(
        self,
        process_group: Any,
        group: NativeGroup,
        call: NativeCall,
        source: memoryview,
        work: memoryview,
        stop: asyncio.Future[None],
    ) -> None:
        """See `TorchProvider.execute`."""
        host = tensor(work, call)

        def stage() -> tuple[torch.Tensor, torch.Tensor]:
            given = torch.empty(0) if call.operation in _IN_PLACE else tensor(source, call).to(self.device)
            return given, host.to(self.device)

        given, result = await _unbroken(stage)

        def run() -> torch.Tensor:
            with inside():
                handle = start(process_group, group, call, given, result)
                handle.wait()
                return result.to("cpu")  # waits for the device

        running = asyncio.ensure_future(in_thread(run))
        try:
            await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running.done():
                in_background(process_group.abort)
                running.cancel()
        if stop.done():
            stop.result()
        fetched = running.result()
        await _unbroken(lambda: host.copy_(fetched))


async def _unbroken(work: Callable[[], R]) -> R:
    """Do it on a thread. A cancellation waits until it is done: it uses the caller's memory."""
    task = asyncio.ensure_future(in_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


class NcclProvider(StagedProvider):
    """See `TorchProvider`."""

    name = "nccl"
    virtue = "many bytes: NCCL moves them between GPUs"
    lacking = ("band", "bor", "bxor")

    def __init__(self, dial: Callable[[timedelta], Any], least: int) -> None:
        super().__init__(dial, least)
        local = int(os.environ.get("LOCAL_RANK") or torch.cuda.current_device())
        self.device = torch.device("cuda", local % torch.cuda.device_count())

    def make(self, store: Any, rank: int, size: int, wait: timedelta) -> Any:
        """See `TorchProvider.make`."""
        nccl: Any = dist
        options = nccl.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        with torch.cuda.device(self.device):
            return nccl.ProcessGroupNCCL(store, rank, size, options)
