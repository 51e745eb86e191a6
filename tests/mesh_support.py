"""Running ranks that differ in their options."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from support import Body

import ruda_async


async def run_each(options: Sequence[dict[str, Any]], body: Body, url: str, timeout: float = 10) -> list[Any]:
    """Run `body(comm)` on a rank for each of `options`; results and errors in rank order."""

    async def rank_main(rank: int) -> Any:
        known = {"rank": rank, "world_size": len(options), "timeout": timeout} | options[rank]
        async with ruda_async.connect(url, **known) as comm:
            return await body(comm)

    async with asyncio.timeout(30):
        ranks = [rank_main(rank) for rank in range(len(options))]
        return await asyncio.gather(*ranks, return_exceptions=True)
