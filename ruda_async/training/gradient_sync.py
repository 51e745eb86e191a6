"""`GradientSync`: the gradients of replicated parameters, summed over ranks while backward still runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..autograd.passes import abandon_on_error
from ..communicator import AsyncCommunicator
from ..errors import CollectiveCancelledError, ConfigError, RudaError, TensorContractError
from .agreement import broadcast_tensors, describe, same_on_all_ranks
from .buckets import Bucket, make_buckets
from .lanes import await_here, channel_of, close_later, inner_of, refused, submit
from .members import Members, check_options
from .passes import Pass, Weakly, is_known, mark_known
from .reduced import Reduced
from .timeline import BucketTimes, SyncStats, covered

__all__ = ["GradientSync"]


class GradientSync:
    """Averages gradients over ranks, in buckets, each as soon as backward has filled it.

    A hook on each parameter notices when its gradient is there; the bucket whose gradients are all there is
    all-reduced on the communicator's event loop while backward computes the next ones. When
    ``loss.backward()`` returns, all gradients are reduced, equal to the bit on all ranks. Each bucket has a
    channel of its own, so ranks may fill buckets in any order, and need not use the same parameters: a rank
    without a gradient adds zeros, and a parameter without a gradient on every rank keeps None.

    Gradients are views of the buckets' memory: the next pass overwrites it. Collective: every rank makes one,
    and runs as many synchronised passes.

    Args:
        model: the module, or its parameters; all that require a gradient take part. The same on all ranks.
        comm: a `ruda_async.sync.Communicator` or an `AsyncCommunicator` (see `off_loop`), or a
            differentiable wrapper. The ranks that hold replicas.
        op: ``"mean"`` over the ranks of `comm`, or ``"sum"``.
        groups: pairs ``(parameters, group)`` of those that only the ranks of another communicator `group`
            replicate, such as experts in a grid of ranks; None where this rank alone has them. Their
            gradients are summed over `group`, and for ``"mean"`` divided by the size of `comm`: so that they
            too are those of the mean of all ranks' losses, as collectives in backward sum over ranks.
        bucket_bytes: the size of a bucket.
        compress: ``torch.bfloat16`` (or float16) sends gradients in that dtype. Sums accumulate in float32
            and are rounded once.
        overlap: False starts all buckets at the end of the pass.
        broadcast: give all ranks rank 0's parameters, frozen ones too, and buffers first; of `groups` each
            group's first.

    Raises:
        TensorContractError: a parameter cannot take part, or the ranks' parameters or arguments differ (then
            on all ranks, and the communicator still works).
        ConfigError: an argument is wrong; the other ranks' call fails too, naming this rank.
        BlockedLoopError: called on the loop of an `AsyncCommunicator`.
        RudaError: as collectives do, here and out of ``loss.backward()``.
    """

    def __init__(
        self,
        model: Module | Iterable[Parameter],
        comm: Any,
        *,
        op: str = "mean",
        groups: Sequence[tuple[Iterable[Parameter], Any]] = (),
        bucket_bytes: int = 4 * 1024 * 1024,
        compress: torch.dtype | None = None,
        overlap: bool = True,
        broadcast: bool = True,
    ) -> None:
        inner = inner_of(comm)
        self._comm = comm
        self._op = op
        self._overlap = overlap
        self._scale = 1 / inner.world_size if op == "mean" else None
        #: The communicators in use, this rank's main one first.
        self._comms = [comm, *(group for _, group in groups if group is not None)]
        self._members = Members(model, comm, groups)
        members = self._members.all
        self._alone = [m.parameter for m in members if m.comm is None]
        try:
            check_options(op, bucket_bytes, compress)
            self._members.check_initialised(untrained=broadcast)
            shared = [m for m in members if m.comm is not None]
            self._buckets = make_buckets(shared, bucket_bytes, compress)
        except (ConfigError, TensorContractError) as error:
            await_here(comm, refused(inner, "GradientSync", error))
        self._of = {m.parameter: bucket for bucket in self._buckets for m in bucket.members}
        self._names = self._members.names
        facts = [f"op={op} bucket_bytes={bucket_bytes} compress={compress}"]
        # What is broadcast beside the members: so all of a model is the same everywhere, frozen or not.
        frozen = self._members.frozen if broadcast else []
        buffers = self._members.buffers() if broadcast else []
        for each in self._comms:
            told = facts + [describe(m.name, m.parameter) for m in members if m.comm is each]
            told += [describe(f"frozen {m.name}", m.parameter) for m in frozen if m.comm is each]
            if each is comm:
                told += [describe(f"buffer {name}", value) for name, value in buffers]
            await_here(each, same_on_all_ranks(inner_of(each), "parameters to synchronise", told))
        self._channels = self._open_channels()
        if broadcast:
            for each in self._comms:
                tensors: list[Tensor] = [m.parameter for m in [*members, *frozen] if m.comm is each]
                if each is comm:
                    tensors += [value for _, value in buffers]
                await_here(each, broadcast_tensors(inner_of(each), tensors))
        self._syncing = True
        self._pass: Pass | None = None
        #: How the latest pass ended, until its step is known to be over: "ended", or "dropped" by torch.
        self._ended: str | None = None
        #: Whether `backward` sees errors itself, and can say what they are.
        self._guarded = False
        #: Calls of failed passes that may still be under way; their messages are not to be touched.
        self._left_over: list[Future[Any]] = []
        self._stats = SyncStats()
        self._times: list[BucketTimes] = []
        #: Gradients that must not be reduced again.
        self._reduced = Reduced()
        self._handles: list[Any] = []
        # Whoever forgets `remove` and the model shall not keep channels open.
        self._closing = weakref.finalize(self, close_later, self._channels)
        self._closing.atexit = False
        # The collector does not see into hooks after accumulation, so those hold this object weakly. It
        # does see into the others, which keep it alive as long as any of its parameters.
        arrived, keep = Weakly(self._on_gradient), partial(_nothing, self)
        for p in self._names:
            hook: Any = p.register_post_accumulate_grad_hook
            self._handles.append(hook(arrived))
            hook = p.register_hook
            guarded = self._scale_of(p) is not None or op == "sum"
            self._handles.append(hook(self._guard(p) if guarded else keep))

    # ------------------------------------------------------------------ for training loops

    def backward(self, loss: Tensor | None, **options: Any) -> None:
        """``loss.backward(**options)``, and this rank's part in the reduction whatever becomes of it.

        Better than ``loss.backward()`` in two cases: a loss that depends on no parameter here (or None: this
        rank has no batch), and a backward pass that raises: then the other ranks' passes fail at once too,
        also where they wait in collectives of the graph (see `autograd.abandon_on_error`).

        Raises:
            RudaError: a reduction failed, or another rank's backward did; gradients are then undefined.
        """
        self._ended = None
        self._guarded = True
        try:
            if loss is not None and loss.requires_grad:
                with abandon_on_error(loss):
                    loss.backward(**options)  # type: ignore[no-untyped-call]
            if self._syncing:
                self._finish()
        except Exception as error:
            self.abandon(error)
            raise
        finally:
            self._guarded = False
        self._ended = None

    def finish(self) -> None:
        """See that the gradients of this step are reduced.

        To be called after ``loss.backward()`` where on some rank the loss may reach no parameter at all;
        where the pass was synchronised already it does nothing.

        Raises:
            RudaError: a reduction failed.
        """
        try:
            self._finish()
        except Exception as error:
            self.abandon(error)
            raise
        self._ended = None

    def _finish(self) -> None:
        if self._ended is None:
            current = self._begin()
            self._start_rest(current)
            self._end(current)

    def abandon(self, error: Exception) -> None:
        """Give this step up on all ranks: their passes raise, naming this rank and `error`.

        To be called with whatever was caught: where `error` is why this step failed already, here or on
        another rank, it does nothing. Any other is taken to be that of a new step.
        """
        known = self._ended == "dropped" or is_known(error, self)
        if not known and (self._pass is not None or self._syncing):
            self._refuse(self._begin(check=False), f"{type(error).__name__}: {error}")
            mark_known(error, self)
        self._ended = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside add up gradients on this rank alone; the next pass outside reduces their sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def stats(self) -> SyncStats:
        """Bytes, and seconds of communication under way and waited for, over all passes so far."""
        return SyncStats(**vars(self._stats))

    def timeline(self) -> list[BucketTimes]:
        """When each bucket of the last pass was under way."""
        return list(self._times)

    def remove(self) -> None:
        """Take the hooks off and close the channels; gradients stay local from now on. Harmless twice."""
        for handle in self._handles:
            handle.remove()
        if self._closing.detach() is not None:
            for bucket, channel in zip(self._buckets, self._channels, strict=True):
                with contextlib.suppress(RudaError):  # the communicator may be closed already
                    await_here(bucket.comm, channel.close())
        self._handles = []

    # ------------------------------------------------------------------ one pass

    def _on_gradient(self, parameter: Parameter) -> None:
        """A gradient was accumulated; on the thread that runs backward."""
        if not self._syncing:
            return
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise TensorContractError(
                f"rank {self._rank}: the gradient of parameter {self._names[parameter]!r} is sparse; make it "
                "dense (sparse=False for embeddings), or leave the parameter out"
            )
        current = self._begin()
        current.watch()
        bucket = self._of.get(parameter)
        if bucket is None:
            return
        if current.started(bucket):
            raise TensorContractError(
                f"rank {self._rank}: parameter {self._names[parameter]!r} got a second gradient in one pass, "
                "after the first had been sent; pass overlap=False, or use_reentrant=False to checkpoint"
            )
        if current.arrived(bucket, parameter) and self._overlap:
            with self._telling(current):
                self._start(current, bucket, early=True)

    def _begin(self, check: bool = True) -> Pass:
        if self._pass is None:
            for call in self._left_over:
                self._result(call)  # waits; the reason was told when it mattered
            self._left_over = []
            self._ended = None
            current = self._pass = Pass(self._start_rest, self._end, self._dropped)
            if check:
                with self._telling(current):
                    self._members.check()
        return self._pass

    @contextlib.contextmanager
    def _telling(self, current: Pass) -> Iterator[None]:
        """What is raised inside fails the step on all ranks, which hear why."""
        try:
            yield
        except Exception as error:
            self._refuse(current, f"{type(error).__name__}: {error}")
            mark_known(error, self)
            self._ended = "ended"
            raise

    def _start(self, current: Pass, bucket: Bucket, early: bool) -> None:
        bucket.load()
        times = BucketTimes(bucket.number, bucket.nbytes, perf_counter(), early=early)
        call = self._reduce(self._channels[bucket.number], bucket, times)
        current.calls[bucket.number] = submit(bucket.comm, call)
        current.times.append(times)

    async def _reduce(self, channel: AsyncCommunicator, bucket: Bucket, times: BucketTimes) -> None:
        whole = bucket.comm is self._comm
        op = self._op if whole else "sum"
        try:
            await channel.all_reduce(bucket.message, op, out=bucket.message)
        finally:
            times.ended = perf_counter()

    def _start_rest(self, current: Pass) -> None:
        """Backward is over: start what lacks a gradient here. Waits for nothing."""
        with self._telling(current):
            for bucket in self._buckets:
                if not current.started(bucket):
                    self._start(current, bucket, early=False)

    def _end(self, current: Pass) -> None:
        """Wait for the reductions and hand the gradients out."""
        if current.over:
            return
        current.over = True
        self._pass = None
        self._ended = "ended"
        began = perf_counter()
        errors = [error for call in current.calls.values() if (error := self._result(call)) is not None]
        waited = perf_counter() - began
        if errors:
            likeliest = min(errors, key=lambda error: not isinstance(error, RudaError))
            mark_known(likeliest, self)
            raise likeliest
        for bucket in self._buckets:
            bucket.store(self._scale if bucket.comm is not self._comm else None)
        if self._scale is not None:
            _multiply(self._alone, self._scale)
        self._remember()
        stats, self._times = self._stats, current.times
        stats.passes += 1
        stats.nbytes += sum(each.nbytes for each in current.times)
        stats.in_flight += covered(current.times)
        stats.waiting += waited

    def _result(self, call: Future[Any]) -> BaseException | None:
        """Wait for a reduction; its error."""
        try:
            return call.exception()
        except CancelledError:
            rank = inner_of(self._comm).rank
            return CollectiveCancelledError(
                f"rank {self._rank}: this backward pass was cancelled, or its communicator closed", rank=rank
            )

    def _dropped(self, current: Pass) -> None:
        """Torch gave the pass up: something in it raised, and whoever called it is about to see what."""
        if not self._guarded:
            self._refuse(current, "an error was raised in it")
            self._ended = "dropped"

    def _refuse(self, current: Pass, reason: str) -> None:
        """Backward failed here: fail what was not started yet on the other ranks too."""
        if current.over:
            return
        current.over = True
        self._pass = None
        error = TensorContractError(f"the backward pass of this step failed: {reason}")
        name = "GradientSync"
        for bucket in self._buckets:
            call = current.calls.get(bucket.number)
            if call is None:
                with contextlib.suppress(RudaError):  # on the loop, or closed: then nobody can be told
                    channel = self._channels[bucket.number]
                    call = submit(bucket.comm, refused(channel, name, error, yields=True))
            if call is not None:
                self._left_over.append(call)

    # ------------------------------------------------------------------ what must not be reduced twice

    def _scale_of(self, parameter: Parameter) -> float | None:
        bucket = self._of.get(parameter)
        return None if bucket is not None and bucket.comm is self._comm else self._scale

    def _remember(self) -> None:
        """A mean of means is the mean, but a sum of sums is not the sum."""
        self._reduced.note(p for p in self._names if self._op == "sum" or self._scale_of(p) is not None)

    def _guard(self, parameter: Parameter) -> Any:
        def before(gradient: Tensor) -> None:
            if self._reduced.has(parameter):
                raise TensorContractError(
                    f"rank {self._rank}: the gradient of parameter {self._names[parameter]!r} was summed "
                    "over ranks already, and a second pass would sum it again; zero gradients between "
                    "passes, or accumulate under no_sync()"
                )

        return before

    # ------------------------------------------------------------------ facts

    @property
    def _rank(self) -> str:
        inner = inner_of(self._comm)
        return f"{inner.rank} of {inner.world_size}"

    def _open_channels(self) -> list[AsyncCommunicator]:
        """One for each bucket, named after the place in the order of calls, which is that of all ranks."""
        channels = []
        for bucket in self._buckets:
            inner = inner_of(bucket.comm)
            name = f"gradients {inner._channel.next}.{bucket.number}"
            channels.append(await_here(bucket.comm, channel_of(inner, name)))
        return channels

    def __repr__(self) -> str:
        return (
            f"<GradientSync of {len(self._names)} parameters in {len(self._buckets)} buckets, rank "
            f"{self._rank}>"
        )


def _nothing(kept: object, gradient: Tensor) -> None:
    """A hook that changes nothing."""


@torch.no_grad()
def _multiply(parameters: Iterable[Parameter], factor: float) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)
