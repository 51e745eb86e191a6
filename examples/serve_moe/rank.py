"""The life of a rank: generation after generation."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import ruda_async
from ruda_async import AsyncCommunicator, RudaError

from .front import Front
from .generation import AGREE_SECONDS, Generation, follow
from .measures import StallMeter
from .options import Options, parse
from .placement import FrontLostError, OtherModelError
from .shard import Saved, Shard, describe
from .turns import make_loop

__all__ = ["Rank", "main", "one_signal_ignored"]

log = logging.getLogger("serve_moe")


class Rank:
    """One rank; with a `Front`, the one that speaks HTTP."""

    def __init__(self, options: Options, saved: Saved, front: Front | None, meter: StallMeter) -> None:
        self._options = options
        self._saved = saved
        self._front = front
        self._meter = meter
        self._held = range(0)
        self._shard: Shard | None = None
        self._root: AsyncCommunicator | None = None

    async def live(self) -> None:
        """Serve until the front is told to stop.

        Raises:
            RudaError, FrontLostError: this rank cannot go on.
        """
        first = await self._first()
        if first is None:
            return
        comm, even = first, True
        try:
            while True:
                generation = None
                try:
                    generation = await Generation.begin(
                        comm,
                        self._options,
                        self._saved,
                        self._front is not None,
                        self._held,
                        self._shard,
                        even,
                        self._meter,
                    )
                    self._shard = generation.shard
                    self._held = self._shard.held
                    lead = follow if self._front is None else self._front.lead
                    following = await lead(generation)
                    if following is None:
                        return
                    await generation.close()
                    comm, even = await self._adopt(following), True
                except (RudaError, FrontLostError) as error:
                    log.warning("rank %d of %d: %s", comm.rank, comm.world_size, error)
                    comm, even = await self._recover(comm, generation, error)
                finally:
                    if generation is not None:
                        await generation.end()
        finally:
            await self._drop()

    @property
    def joined(self) -> bool:
        """Whether this rank is in the job; otherwise it knocks, and nobody misses it."""
        return self._root is not None

    async def _first(self) -> AsyncCommunicator | None:
        """The ranks that begin; None where the front is told to stop before all of them are there."""
        if self._front is None:
            return await self._connect(self._options.join)
        connecting = asyncio.ensure_future(self._connect(join=False))
        stopping = asyncio.ensure_future(self._front.stopped())
        try:
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return connecting.result() if connecting.done() else None
        finally:
            for task in (connecting, stopping):
                task.cancel()
            await asyncio.wait({connecting, stopping})

    async def _recover(
        self, comm: AsyncCommunicator, generation: Generation | None, error: Exception
    ) -> tuple[AsyncCommunicator, bool]:
        """The ranks to go on with, and whether experts are spread anew.

        Those that are left agree; who is not among them, or cannot reach them, comes anew.
        """
        if generation is not None:
            await generation.close()
            if (grown := await generation.grown()) is not None:
                return await self._adopt(grown), True
        even = self._options.on_loss == "replicate"
        if not isinstance(error, FrontLostError):
            try:
                return await comm.shrink(timeout=AGREE_SECONDS), even
            except RudaError as worse:
                log.warning("rank %d of %d: %s", comm.rank, comm.world_size, worse)
        await self._drop()
        self._held = range(0)
        if self._front is not None:  # the others join again
            self._root = await ruda_async.connect(rank=0, world_size=1)
            return self._root, even
        if not self._options.rejoin_timeout:
            raise error
        return await self._connect(join=True), True

    async def _connect(self, join: bool) -> AsyncCommunicator:
        if join:
            self._root = await ruda_async.connect(join=True, timeout=self._options.rejoin_timeout or None)
        else:
            self._root = await ruda_async.connect()
        return self._root

    async def _adopt(self, grown: AsyncCommunicator) -> AsyncCommunicator:
        """Leave the links of the former generation."""
        await self._drop()
        self._root = grown
        return grown

    async def _drop(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            await root.close()


async def _serve(options: Options, saved: Saved, front: bool) -> None:
    torch.set_grad_enabled(False)  # for the loop's thread, before any task is there
    meter = StallMeter()
    try:
        if front:
            from .web import serving

            speaker = Front(options, saved.experts)
            async with serving(speaker, options):
                await Rank(options, saved, speaker, meter).live()
        else:
            # The launcher signals all ranks at once, and workers are needed until the front has drained. A
            # second signal ends a worker.
            rank = Rank(options, saved, None, meter)
            with one_signal_ignored(lambda: rank.joined):
                await rank.live()
    finally:
        meter.stop()


@contextmanager
def one_signal_ignored(needed: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """The first SIGTERM and the first SIGINT do nothing; a second one does what it did before.

    While the rank is not `needed`, the first one does so too.

    After the block both are ignored: a front that had little to drain may have ended the workers before the
    launcher came to signal them, and it should not find that they fell by its signal.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = {number: signal.getsignal(number) for number in numbers}

    def first(number: int, frame: object) -> None:
        signal.signal(number, former[signal.Signals(number)])
        if not needed():
            signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, first)  # not by the loop, which takes its handlers away when it closes
    yield
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def main(argv: list[str] | None = None) -> int:
    """One rank's program; the launcher's environment says who it is."""
    options = parse(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    saved = describe(options.model)
    ranks = int(os.environ.get("RUDA_WORLD_SIZE", "1"))
    if options.exchange == "none" and ranks != 1:
        print("serve_moe: --exchange none is for one rank; run it with -n 1", file=sys.stderr)
        return 2
    front = not options.join and os.environ.get("RUDA_RANK", "0") == "0"
    if front:
        from . import web  # noqa: F401
    # What torch and the web server made when they were loaded stays. Looking through it for garbage, again
    # and again, would hold up the event loop for tens of milliseconds.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(_serve(options, saved, front))
    except (RudaError, FrontLostError, OtherModelError, OSError, ValueError) as error:
        print(f"serve_moe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # a second SIGINT
        return 130
    return 0
