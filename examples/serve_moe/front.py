"""The front: makes batches, sends them through the ranks, lets new ranks in, and counts."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

import numpy as np
from torch import Tensor

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveTimeoutError,
    PeerLostError,
    RudaError,
)

from .batching import Batcher, RefusedError, Slice, Work
from .generation import AGREE_SECONDS, Generation
from .metrics import Metrics
from .options import Options

__all__ = ["Front"]

log = logging.getLogger("serve_moe")

_TICK = 0.5
#: How long one `grow` waits for a rank; then the next one begins.
_GROW_SECONDS = 20.0


class Front:
    """What outlives generations: the queue, the requests that are open, the numbers.

    Attributes:
        generation: the present one; None while ranks find together.
        ranks: numbers of every rank, as of the last half second.
        losses, joins: how many generations ended by a lost rank, and by a new one.
    """

    def __init__(self, options: Options, experts: int) -> None:
        self.options = options
        self.batcher = Batcher(options.max_batch, options.max_queue, options.linger_ms / 1000)
        self.generation: Generation | None = None
        self.draining = False
        self.expert_rows = np.zeros(experts, dtype=np.int64)
        self.ranks: list[dict[str, Any]] = []
        self.losses = 0
        self.joins = 0
        self.target = 0
        self.metrics = Metrics(self)
        self._open: set[Work] = set()
        self._idle = asyncio.Event()
        self._stop = asyncio.Event()
        self._slots = asyncio.Semaphore(options.in_flight)
        self._flying: dict[asyncio.Task[Any], tuple[int, list[Slice]]] = {}
        self._numbers = 0  # of batches and reports; no channel's name comes twice

    # ------------------------------------------------------------------ requests

    @property
    def ready(self) -> bool:
        """Whether new requests would be answered."""
        return self.generation is not None and not self.draining

    @property
    def in_flight(self) -> int:
        """Batches under way."""
        return len(self._flying)

    def submit(self, pixels: np.ndarray) -> Work:
        """Accept a request of ``[n, 64]`` pixels.

        Raises:
            RefusedError: the server stops, or is full.
        """
        if self.draining:
            raise RefusedError(503, "draining", "this server is stopping", 1)
        work = Work(pixels, self.options.request_timeout)
        work.on_cancel = self._forget
        self.batcher.submit(work)
        self._open.add(work)
        return work

    def finish(self, work: Work) -> None:
        """The request has been answered, or nobody waits for it."""
        work.cancel()
        self._open.discard(work)
        if not self._open:
            self._idle.set()

    def _forget(self, work: Work) -> None:
        """Nobody waits for `work` any more; a batch without any other request ends on all ranks."""
        self.batcher.drop(work)
        for task, (number, slices) in list(self._flying.items()):
            if not all(piece.work.over for piece in slices):
                continue
            task.cancel()
            if self.generation is not None and self.options.exchange == "ruda":
                # Workers that have left the exchange in which it was cancelled would wait in the next one.
                told = {"do": "forget", "number": number}
                self.generation.spawn(self._tell(self.generation, told, self.options.batch_timeout))

    async def stopped(self) -> None:
        """Returns when the server has drained."""
        await self._stop.wait()

    async def drain(self) -> None:
        """Accept nothing more, answer what was accepted, and end."""
        self.draining = True
        log.info("draining: %d requests are open", len(self._open))
        try:
            async with asyncio.timeout(self.options.drain_timeout):
                while self._open:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests were not answered in time", len(self._open))
            for work in list(self._open):
                work.fail(RefusedError(503, "draining", "this server is stopping", 1))
        self._stop.set()

    # ------------------------------------------------------------------ one generation

    async def lead(self, generation: Generation) -> AsyncCommunicator | None:
        """Serve until a rank is lost, a new one has come, or the server has drained.

        Raises:
            PeerLostError: a rank was lost.
        """
        self.target = max(self.target, generation.comm.world_size)
        self.metrics.watch(generation.comm)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        dispatching = generation.spawn(self._dispatch(generation, lost))
        ticking = generation.spawn(self._tick(generation))
        stopping = generation.spawn(self._stop.wait())
        waits: set[asyncio.Future[Any]] = {lost, dispatching, ticking, stopping}
        growing = None
        if generation.comm.world_size < self.target:
            growing = generation.spawn(self._grow(generation))
            waits.add(growing)
        self.generation = generation
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for future in (lost, dispatching, ticking):
                if future.done():
                    future.result()
            dispatching.cancel()
            if growing is not None and growing.done():
                growing.result()
                return await self._switch(generation)
            await self._tell(generation, {"do": "stop"})
            return None
        except PeerLostError:
            self.losses += 1
            raise
        finally:
            self.generation = None
            if lost.done():
                lost.exception()

    async def _tell(
        self, generation: Generation, what: dict[str, Any], seconds: float = AGREE_SECONDS
    ) -> None:
        await generation.control.broadcast_object(what, 0, timeout=seconds)

    async def _tick(self, generation: Generation) -> None:
        """Ask all ranks for their numbers, and so notice lost ones also while there is nothing to do."""
        while True:
            self._numbers += 1
            number = self._numbers
            try:
                await self._tell(generation, {"do": "report", "number": number})
                self.ranks = await generation.report(number) or []
            except (CollectiveTimeoutError, CollectiveCancelledError) as error:
                log.warning("%s", error)
            await asyncio.sleep(_TICK)

    async def _grow(self, generation: Generation) -> None:
        """Ends when a new rank is in."""
        while True:
            await self._tell(generation, {"do": "grow", "seconds": _GROW_SECONDS})
            growing = generation.grow(_GROW_SECONDS)
            try:
                await asyncio.shield(growing)
                return
            except CollectiveTimeoutError:
                pass  # nobody came
            except RudaError as error:
                log.warning("a rank did not get in: %s", error)
                await asyncio.sleep(_TICK)

    async def _switch(self, generation: Generation) -> AsyncCommunicator | None:
        """Let batches finish, and go on with the new rank."""
        self.generation = None
        if self._flying:
            await asyncio.wait(list(self._flying), timeout=self.options.batch_timeout + 1)
        try:
            await self._tell(generation, {"do": "switch"})
        except RudaError as error:  # whoever did not hear it goes on with the new ranks all the same
            log.warning("%s", error)
        self.joins += 1
        return await generation.grown()

    # ------------------------------------------------------------------ batches

    async def _dispatch(self, generation: Generation, lost: asyncio.Future[None]) -> None:
        while True:
            await self._slots.acquire()
            try:
                slices = await self.batcher.next()
            except BaseException:
                self._slots.release()
                raise
            if lost.done():  # these ranks answer nothing more: a try here would be wasted
                self._slots.release()
                self.batcher.put_back(slices)
                return
            batch = generation.spawn(self._batch(generation, slices, lost))
            batch.add_done_callback(lambda task, slices=slices: self._batch_over(task, slices))

    def _batch_over(self, task: asyncio.Task[Any], slices: list[Slice]) -> None:
        self._slots.release()
        if task.cancelled():
            self.batcher.put_back(slices)  # those of clients that still wait: this generation has ended

    async def _batch(self, generation: Generation, slices: list[Slice], lost: asyncio.Future[None]) -> None:
        """One batch, from rows to answers."""
        begun = monotonic()
        try:
            await self._pass(generation, slices)
        except PeerLostError as error:
            if not lost.done():  # first, so that the second try waits for the ranks that are left
                lost.set_exception(error)
            self._again(slices, "rank_lost")
        except (CollectiveTimeoutError, CollectiveCancelledError) as error:
            log.warning("%s", error)
            self._again(slices, "batch_timeout")
        except Exception as error:
            log.exception("a batch failed")
            for piece in slices:
                piece.work.fail(RefusedError(500, "internal", f"the model failed: {type(error).__name__}"))
        finally:
            self.metrics.batch(sum(piece.rows for piece in slices), monotonic() - begun)

    async def _pass(self, generation: Generation, slices: list[Slice]) -> None:
        shard = generation.shard
        pixels = np.concatenate([piece.work.pixels[piece.start : piece.stop] for piece in slices])
        tokens = shard.model.tokens(shard.images(pixels))
        chosen = shard.choices(tokens)
        if shard.absent:
            slices, tokens, chosen = self._without_absent(shard.absent, slices, tokens, chosen)
            if not slices:
                return
        self._numbers += 1
        number = self._numbers
        task = asyncio.current_task()
        assert task is not None
        self._flying[task] = number, slices
        try:
            told = {"do": "batch", "number": number}
            generation.spawn(self._tell(generation, told, self.options.batch_timeout))
            mixed = await generation.exchange.run(shard, number, tokens)
        finally:
            del self._flying[task]
        scores = shard.model.output(tokens + mixed).numpy()
        self.expert_rows += np.bincount(chosen.flatten().numpy(), minlength=len(self.expert_rows))
        at = 0
        for piece in slices:
            piece.work.deliver(piece.start, scores[at : at + piece.rows])
            at += piece.rows
        self.batcher.answered(at)

    def _without_absent(
        self, absent: frozenset[int], slices: list[Slice], tokens: Tensor, chosen: Tensor
    ) -> tuple[list[Slice], Tensor, Tensor]:
        """The batch less the requests that need an expert that nobody holds."""
        kept: list[Slice] = []
        rows: list[int] = []
        at = 0
        for piece in slices:
            needed = absent.intersection(chosen[at : at + piece.rows].flatten().tolist())
            if needed:
                text = f"expert {', '.join(map(str, sorted(needed)))} is lost; a new rank may bring it back"
                piece.work.fail(RefusedError(503, "expert_lost", text, 5))
            else:
                kept.append(piece)
                rows += range(at, at + piece.rows)
            at += piece.rows
        return kept, tokens[rows], chosen[rows]

    def _again(self, slices: list[Slice], code: str) -> None:
        """Try the rows of a failed batch once more, as often as is allowed."""
        again = [
            piece._replace(tries=piece.tries + 1) for piece in slices if piece.tries < self.options.retries
        ]
        for piece in slices:
            if piece.tries >= self.options.retries:
                text = "a rank was lost or too slow while it worked on this request"
                piece.work.fail(RefusedError(503, code, text, self.batcher.retry_after()))
        self.batcher.put_back(again)
