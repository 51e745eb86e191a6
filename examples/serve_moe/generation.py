"""The ranks that work together, until one is lost or a new one comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveTimeoutError,
    PeerLostError,
    RudaError,
)

from . import measures
from .exchange import Alone, Exchange, Ruda
from .options import Options
from .placement import Placement, agree
from .shard import Saved, Shard

__all__ = ["AGREE_SECONDS", "Generation", "follow"]

log = logging.getLogger("serve_moe")

#: For steps that take milliseconds on a host that has time; a rank may have to read the model meanwhile.
AGREE_SECONDS = 15.0
#: How long a worker waits for the front's next word; the front says something twice a second.
_CONTROL_SECONDS = 120.0


class Generation:
    """One rank's part of it.

    Attributes:
        comm: of all ranks of this generation.
        control: on which the front tells the workers what to do.
        growing: `comm.grow`, while the front lets a new rank in.
    """

    def __init__(
        self, comm: AsyncCommunicator, placement: Placement, shard: Shard, exchange: Exchange, meter: Any
    ) -> None:
        self.comm = comm
        self.placement = placement
        self.shard = shard
        self.exchange = exchange
        self.meter = meter
        self.control = comm.channel("control")
        self.growing: asyncio.Task[AsyncCommunicator] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def begin(
        cls,
        comm: AsyncCommunicator,
        options: Options,
        saved: Saved,
        front: bool,
        held: range,
        former: Shard | None,
        even: bool,
        meter: measures.StallMeter,
    ) -> Generation:
        """Agree on who holds what, and load this rank's part; every rank of `comm` calls it.

        Raises:
            FrontLostError: there is no front among these ranks.
            OtherModelError: the front serves another model.
            RudaError: as collectives.
        """
        placement = await agree(comm, saved, front, held, even, AGREE_SECONDS)
        shard = await Shard.load(saved, placement, comm.rank, former)
        exchange: Exchange
        if options.exchange == "gloo":
            from .gloo import Gloo

            exchange = await Gloo.meet(comm, options.in_flight, options.batch_timeout)
        elif options.exchange == "none":
            exchange = Alone()
        else:
            exchange = Ruda(comm, options.batch_timeout)
        log.info(
            "rank %d of %d holds experts %s", comm.rank, comm.world_size, list(placement.held[comm.rank])
        )
        return cls(comm, placement, shard, exchange, meter)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that ends with this generation at the latest."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(
            error, PeerLostError
        ):  # that ends the generation, and is said then
            log.info("%s", error)

    def grow(self, seconds: float) -> asyncio.Task[AsyncCommunicator]:
        """Let one rank in; every rank calls it."""
        self.growing = asyncio.ensure_future(self.comm.grow(1, timeout=seconds))
        self.growing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.growing

    async def grown(self) -> AsyncCommunicator | None:
        """The larger communicator, where growing has succeeded; otherwise growing ends.

        All ranks go by it, whatever they were told last; so they go on together.
        """
        growing, self.growing = self.growing, None
        if growing is None:
            return None
        # A lost member makes it fail at once.
        await asyncio.wait([growing], timeout=AGREE_SECONDS)
        growing.cancel()
        await asyncio.wait([growing])
        if growing.cancelled() or growing.exception() is not None:
            return None
        return growing.result()

    async def report(self, number: int) -> list[Any] | None:
        """Numbers of all ranks, on the front."""
        channel = self.comm.channel(f"numbers {number}")
        try:
            own = measures.of_rank(self.comm, self.shard, self.meter)
            return await channel.gather_object(own, 0, timeout=AGREE_SECONDS)
        finally:
            await channel.close()

    async def close(self) -> None:
        """End all that is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.control.close()

    async def end(self) -> None:
        """`close`, and let no rank in any more."""
        await self.close()
        growing, self.growing = self.growing, None
        if growing is not None:
            growing.cancel()
            await asyncio.wait([growing])
            if not growing.cancelled() and growing.exception() is None:
                await growing.result().close()


async def follow(generation: Generation) -> AsyncCommunicator | None:
    """A worker: do what the front says. Returns the ranks of the next generation, or None at the end.

    Raises:
        PeerLostError: a rank was lost.
    """
    width = generation.shard.model.sizes.width
    none = generation.shard.model.router.weight.new_zeros((0, width))
    batches: dict[int, asyncio.Task[None]] = {}
    while True:
        try:
            told = await generation.control.broadcast_object(None, 0, timeout=_CONTROL_SECONDS)
        except (CollectiveTimeoutError, CollectiveCancelledError) as error:
            log.warning("%s", error)
            continue
        match told:
            case {"do": "batch", "number": int(number)}:
                batches[number] = generation.spawn(_take_part(generation, number, none))
                batches[number].add_done_callback(lambda task, number=number: batches.pop(number))
            case {"do": "forget", "number": int(number)}:
                if number in batches:
                    batches[number].cancel()
            case {"do": "report", "number": int(number)}:
                generation.spawn(generation.report(number))
            case {"do": "grow", "seconds": float(seconds)}:
                generation.grow(seconds)
            case {"do": "switch"}:
                grown = await generation.grown()
                if grown is None:
                    raise RudaError("the front has let a rank in that did not arrive here")
                return grown
            case {"do": "stop"}:
                return None
            case _:
                log.error("the front said %r, which this worker does not know", told)


async def _take_part(generation: Generation, number: int, none: Any) -> None:
    try:
        await generation.exchange.run(generation.shard, number, none)
    except CollectiveCancelledError:
        pass  # the clients have gone
