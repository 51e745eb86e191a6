"""What ranks count and measure: for the page, for Prometheus, and for tests."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Any

from ruda_async import AsyncCommunicator

from .shard import Shard

__all__ = ["StallMeter", "of_rank", "percentiles"]

_SAMPLE = 0.01


class StallMeter:
    """How late the event loop runs what is due: a timer every 10 ms, and its lateness.

    Where there are more busy processes than cores, most of that is waiting for a core. Linux counts that, so
    what the loop's own work makes late is told apart as ``own``; elsewhere the two are the same.

    Attributes:
        worst: since the start or the last `reset`, in seconds.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self._late: deque[float] = deque(maxlen=1000)
        self._own: deque[float] = deque(maxlen=1000)
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            due = monotonic() + _SAMPLE
            waited = _waited_for_core()
            await asyncio.sleep(_SAMPLE)
            late = max(monotonic() - due, 0.0)
            self._late.append(late)
            self._own.append(max(late - (_waited_for_core() - waited), 0.0))
            self.worst = max(self.worst, late)

    def describe(self) -> dict[str, float]:
        """In milliseconds, over the last ten seconds."""
        late = {f"{name}_ms": 1000 * value for name, value in percentiles(self._late).items()}
        return late | {"own_p99_ms": 1000 * percentiles(self._own)["p99"]}

    def stop(self) -> None:
        self._task.cancel()


def percentiles(values: deque[float]) -> dict[str, float]:
    """``p50 p90 p99 max``; zeros where there are no values."""
    found = sorted(values) or [0.0]
    last = len(found) - 1
    return {f"p{n}": found[round(last * n / 100)] for n in (50, 90, 99)} | {"max": found[-1]}


def _waited_for_core() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def of_rank(comm: AsyncCommunicator, shard: Shard, meter: StallMeter) -> dict[str, Any]:
    """This rank's numbers, in what msgpack carries."""
    stats = comm.stats()
    members = comm.describe()["members"]
    peers = {
        str(members.index(peer)): {key: traffic[key] for key in ("bytes_sent", "bytes_received")}
        for peer, traffic in stats["peers"].items()
        if peer in members
    }
    return {
        "rank": comm.rank,
        "pid": os.getpid(),
        "experts": list(shard.held),
        "rows": shard.rows,
        "stall": meter.describe(),
        "memory": _resident(),
        "descriptors": len(os.listdir("/dev/fd")),
        "tasks": len(asyncio.all_tasks()),
        "channels": stats["channels"],
        "peers": peers,
    }


def _resident() -> int:
    """Bytes of memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
