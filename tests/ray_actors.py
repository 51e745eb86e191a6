"""What the actors of the Ray tests are: a module of its own, since Ray's workers import it."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import numpy as np
import ray

import ruda_async.connecting
import ruda_async.ray
from ruda_async import RudaError, TransportUnavailableError


def told(error: RudaError) -> tuple[str, int | None, str]:
    """An error as facts: its type, whom it is about, and its text."""
    return type(error).__name__, error.rank, str(error)


def writable(value: Any) -> Any:
    """Copies of all arrays: those that come out of Ray's object store are read-only."""
    if isinstance(value, list | tuple):
        return type(value)(map(writable, value))
    return value.copy() if isinstance(value, np.ndarray) else value


class Worker:
    """A blocking actor."""

    def total(self, value: Any, group: str = "default") -> Any:
        comm = ruda_async.ray.communicator(group)
        return comm.rank, comm.all_reduce_sum(value)

    def outcome(self, value: Any, group: str = "default") -> Any:
        try:
            return self.total(value, group)
        except RudaError as error:
            return told(error)

    def facts(self, group: str = "default") -> dict[str, Any]:
        transport = ruda_async.ray.communicator(group).describe()["transport"]
        return {"pid": os.getpid(), **transport}

    def wrong_kind(self) -> Any:
        try:
            return ruda_async.ray.async_communicator()
        except RudaError as error:
            return told(error)

    def wait(self) -> None:
        threading.Event().wait()


def disable(actor: object) -> None:
    """Let an actor be on a node where the transport's package is not installed."""

    def connect(**options: Any) -> Any:
        raise TransportUnavailableError("install the package that this test takes away")

    ruda_async.connecting.connect = connect  # type: ignore[assignment]


class Mortal(Worker):
    """A blocking actor that dies when it should join."""

    def __init__(self) -> None:
        ruda_async.ray.actors.join = lambda *_: os._exit(1)


class AsyncWorker(ruda_async.ray.AsyncRank):
    """An asyncio actor."""

    async def total(self, value: Any, group: str = "default") -> Any:
        comm = ruda_async.ray.async_communicator(group)
        return comm.rank, await comm.all_reduce_sum(value)

    async def at_once(self, values: list[Any]) -> list[Any]:
        """One sum a channel, all in flight together; entered in an order that depends on the rank."""
        comm = ruda_async.ray.async_communicator()
        order = np.roll(np.arange(len(values)), comm.rank)
        tasks = {
            int(i): asyncio.ensure_future(comm.channel(f"request {i}").all_reduce_sum(values[i]))
            for i in order
        }
        return [await tasks[i] for i in range(len(values))]


class Stranger:
    """An asyncio actor that is no rank."""

    async def hello(self) -> str:
        return "hello"


class Commander:
    """An asyncio actor that connects others."""

    async def connect(self, actors: list[Any], values: list[Any]) -> list[Any]:
        group = await ruda_async.ray.connect_actors_async(actors, group="commanded", timeout=30)
        calls = [a.total.remote(v, "commanded") for a, v in zip(actors, values, strict=True)]
        sums = await asyncio.gather(*calls)
        await group.aclose()
        return sums


class Collective:
    """An actor that knows Ray's own collectives alone."""

    def __init__(self) -> None:
        ruda_async.ray.register_backend()

    def init(self, world_size: int, rank: int, group: str) -> None:
        ray.util.collective.init_collective_group(world_size, rank, "ruda", group)

    def destroy(self, group: str) -> None:
        ray.util.collective.destroy_collective_group(group)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make one of Ray's calls; what it left in its arguments, or the error."""
        args = writable(args)
        try:
            getattr(ray.util.collective, name)(*args, **options)
        except RudaError as error:
            return told(error)
        return args
