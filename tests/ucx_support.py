"""What the tests of ``ucx://`` share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support import fresh_url

from ruda_async.communicator import open_transport
from ruda_async.config import resolve
from ruda_async.transport import Transport

pytest.importorskip("ucxx", reason="pip install 'ruda-async[ucx]'")


async def run_transports(
    body: Callable[[Transport], Awaitable[Any]], world_size: int = 2, *, query: str = "", limit: float = 30
) -> list[Any]:
    """Run `body(transport)` on every rank, as tasks of this loop."""
    url = fresh_url("ucx") + query

    async def rank_main(rank: int) -> Any:
        transport = await open_transport(resolve(url, rank=rank, world_size=world_size, timeout=limit))
        try:
            return await body(transport)
        finally:
            await transport.close()

    async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
        tasks = [group.create_task(rank_main(rank)) for rank in range(world_size)]
    return [task.result() for task in tasks]
