"""Measuring a transport between two ranks of this machine: what ``ruda-async tune`` runs on each.

Costs are those of the messages that algorithms send, below collectives and their checks. Each is the median
over many rounds, so that a machine that does other things now and then gives much the same numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..connecting import connect
from ..errors import ConfigError
from ..launch import spawn
from ..launch.plan import fresh_url
from ..tags import channel_id, tag_of
from ..transport.registry import get_plugin
from ..url import split_url
from .numbers import Numbers

if TYPE_CHECKING:
    from ..transport.base import Transport

__all__ = ["measure"]

#: Messages under way at once, to see what each further one costs.
_BURST = 16
_LONG = 4 * 1024 * 1024
#: Bytes that are added at once, and of which so many follow each other that no cache holds them.
_BLOCK, _BLOCKS = 256 * 1024, 64


def measure(url: str, rounds: int = 300, timeout: float = 60.0) -> Numbers:
    """The numbers of the transport that `url` names, measured between two ranks of this machine.

    Args:
        url: a scheme and its parameters; where it names no place, a fresh one is taken.
        rounds: of short messages, from 1 on; a tenth as many long ones.
        timeout: seconds for all of it.

    Raises:
        ConfigError, TransportUnavailableError: the URL cannot be used here.
        SpawnError: a rank failed.
    """
    parts = split_url(url)
    if not parts.scheme:
        raise ConfigError(f"the URL {parts.text!r} names no transport; write scheme://")
    plugin = get_plugin(parts.scheme)
    if not parts.host and not parts.path:
        url = fresh_url(plugin) + (f"?{url.partition('?')[2]}" if parts.query else "")
    found: list[Numbers] = spawn(
        _rank, 2, url, args=(rounds, timeout), timeout=timeout, threads=plugin.rank_per == "task"
    )
    return found[0]


async def _rank(rounds: int, timeout: float) -> Numbers:
    async with connect(timeout=timeout, tuning="off") as comm:
        link = _Pair(comm._node.transport)
        for _ in range(rounds // 10):
            await link.there_and_back(1)  # caches, buffers and windows find their sizes
        latency = await link.median(rounds, lambda: link.there_and_back(1)) / 2
        burst = await link.median(rounds, lambda: link.there_and_back(_BURST)) - latency
        swap = await link.median(max(rounds // 10, 5), link.swap)
        await comm.barrier()
        return Numbers(
            latency,
            max((burst - latency) / (_BURST - 1), 0.0),
            _LONG / max(swap - latency, 1e-9),
            _reduction(),
        ).check()


class _Pair:
    """Two ranks and the messages between them."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.first = transport.rank == 0
        self.peer = 1 - transport.rank
        self.tag = tag_of(channel_id(0, "tuning"), 0)
        self.outgoing = memoryview(bytearray(_LONG))
        self.incoming = memoryview(bytearray(_LONG))

    async def median(self, rounds: int, step: Callable[[], object]) -> float:
        """Seconds of a step."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            await step()  # type: ignore[misc]
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    async def there_and_back(self, count: int) -> None:
        """`count` empty messages from the first rank at once, and one back when all are there."""
        if self.first:
            await self._send(count)
            await self._receive(1)
        else:
            await self._receive(count)
            await self._send(1)

    async def swap(self) -> None:
        """A long message each way at once, as in every step of a collective."""
        receiving = self.transport.recv_into(self.peer, self.tag, (self.incoming,))
        await self.transport.send(self.peer, self.tag, (self.outgoing,))
        await receiving

    async def _send(self, count: int) -> None:
        for sent in [self.transport.send(self.peer, self.tag, ()) for _ in range(count)]:
            await sent

    async def _receive(self, count: int) -> None:
        for message in [self.transport.recv_into(self.peer, self.tag, ()) for _ in range(count)]:
            await message


def _reduction() -> float:
    """Bytes per second of float32 sums."""
    a = np.ones((_BLOCKS, _BLOCK // 4), np.float32)
    b, out = a.copy(), a.copy()
    times = []
    for left, right, result in zip(a, b, out, strict=True):
        start = time.perf_counter()
        np.add(left, right, out=result)
        times.append(time.perf_counter() - start)
    return _BLOCK / statistics.median(times)
