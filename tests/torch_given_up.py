"""One rank of two, of which rank 0 gives up a call that Gloo has, and ends. Run by `test_torch_gloo`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
from ruda_torch import gloo

import ruda_async
from ruda_async import CollectiveCancelledError, CollectiveTimeoutError


async def never(*arguments: Any) -> None:
    """In the place of `GlooProvider.execute`, on a rank that never comes to Gloo with the call."""
    stop: asyncio.Future[None] = arguments[-1]
    await asyncio.wait((stop,))
    stop.result()


async def main(operation: str, how: str) -> None:
    async with ruda_async.connect(algorithm="gloo", order="any", timeout=60) as comm:
        given: tuple[Any, ...] = (np.ones(1000), 1) if operation == "broadcast" else (np.ones(1000),)
        call = getattr(comm, operation)
        await call(*given)  # makes the process group
        entered = asyncio.Event()
        if comm.rank == 1:
            gloo.GlooProvider.execute = never  # type: ignore[method-assign]
        else:
            start = gloo.start

            def started(*arguments: Any) -> Any:
                entered.set()
                return start(*arguments)

            gloo.start = started  # type: ignore[assignment]
        running = asyncio.ensure_future(call(*given, timeout=0.5 if how == "timed out" else 60))
        if comm.rank == 0:
            await entered.wait()
            if how == "cancelled":
                running.cancel()
        try:
            await running
            raise AssertionError("nothing was given up")
        except (asyncio.CancelledError, CollectiveCancelledError, CollectiveTimeoutError):
            pass


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
