"""Running a blocking body on several ranks, each in a thread with a communicator of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from support import fresh_url

from ruda_async import sync

Body = Callable[[sync.Communicator], Any]


def in_threads(
    world_size: int, body: Body, url: str | None = None, *, limit: float = 30, timeout: float = 10
) -> list[Any]:
    """The results in rank order. The first error of any rank fails the test, and so does a hang."""
    url = url or fresh_url("memory")
    results: list[Any] = [None] * world_size
    errors: list[tuple[float, int, BaseException]] = []

    def rank_main(rank: int) -> None:
        try:
            with sync.connect(url, rank=rank, world_size=world_size, timeout=timeout) as comm:
                try:
                    results[rank] = body(comm)
                except BaseException as error:
                    errors.append((time.monotonic(), rank, error))
                    raise
        except BaseException as error:
            errors.append((time.monotonic(), rank, error))

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if errors:
        raise min(errors, key=lambda item: item[0])[2]
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang"
    return results
