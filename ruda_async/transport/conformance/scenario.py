"""What scenarios are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base import Transport

__all__ = ["SCENARIOS", "Scenario", "awaited", "meet", "pattern", "room", "scenario"]

Body = Callable[[Transport], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One promise.

    Attributes:
        name: the key in `SCENARIOS`.
        world_size: the ranks it takes.
        body: what every rank runs, given its transport.
    """

    name: str
    world_size: int
    body: Body


#: All scenarios by name.
SCENARIOS: dict[str, Scenario] = {}


def scenario(world_size: int) -> Callable[[Body], Body]:
    """Enter a coroutine into `SCENARIOS`."""

    def enter(body: Body) -> Body:
        name = getattr(body, "__name__", "scenario")
        SCENARIOS[name] = Scenario(name, world_size, body)
        return body

    return enter


def pattern(seed: int, nbytes: int) -> memoryview:
    """Bytes that differ from place to place and from seed to seed."""
    words = np.arange(nbytes // 4 + 1, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)
    return memoryview(bytearray(words.tobytes()[:nbytes]))


def room(nbytes: int) -> memoryview:
    """Writable bytes, all 0xAA."""
    return memoryview(bytearray(b"\xaa") * nbytes)


async def meet(t: Transport, tag: int = 1 << 40) -> None:
    """All ranks reach this line before any goes on."""
    others = [p for p in range(t.world_size) if p != t.rank]
    receives = [t.recv_into(p, tag, (room(0),), b"meet") for p in others]
    for peer in others:
        await t.send(peer, tag, (room(0),), b"meet")
    for receive in receives:
        await receive


async def awaited(waiting: Awaitable[Any]) -> Any:
    """An awaitable as a coroutine, for tasks."""
    return await waiting
