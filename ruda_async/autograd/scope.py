"""`CollectiveScope`: no deadlock where one rank's loss does not use what another's does.

A collective's backward is a collective: every rank has to enter it. A rank whose loss happens not to
depend on a collective's output (an expert that got no tokens, a branch not taken) never reaches
that node, and the others wait. A scope records the collectives of one communicator, and completes the loss:

    scope = CollectiveScope()
    comm = scope.bind(comm)
    loss = scope.complete(model(batch))
    loss.backward()
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from ..communicator import AsyncCommunicator
from ..errors import RudaError
from ..sync import Communicator
from .compiling import eager
from .completion import Ask, Steps, complete
from .engine import Call, scopes

__all__ = ["CollectiveScope", "complete_scopes", "complete_scopes_async"]

C = TypeVar("C")


class CollectiveScope:
    """Records the differentiable collectives of one communicator until a loss is completed.

    While bound, with grad mode on, every differentiable call of a floating tensor is part of the graph on
    every rank, whether this rank's input needs a gradient or not; `complete` then finds out, and
    leaves out of backward what needs a gradient nowhere. Ranks must make the same calls between two
    completions. Calls that reentrant checkpointing hides from the graph are not seen.

    As a context manager it is unbound at the end.
    """

    def __init__(self) -> None:
        self._comm: Communicator | AsyncCommunicator | None = None
        self._calls: list[Call] = []

    def bind(self, comm: C) -> Any:
        """Record the calls of `comm` from now on; returns its differentiable wrapper.

        Args:
            comm: a communicator, synchronous or asynchronous, or its wrapper. A scope that was bound to
                it before is replaced; subgroups and channels of it are not bound along.

        Raises:
            RudaError: this scope is bound to another communicator already.
            TypeError: not a communicator of this library.
        """
        from .adapters import differentiable

        wrapper = differentiable(comm)
        plain: Communicator | AsyncCommunicator = wrapper.plain
        if self._comm is not None and _inner(self._comm)._channel is not _inner(plain)._channel:
            raise RudaError(
                f"this scope is bound to {self._comm!r} and cannot record {plain!r} too; use a scope for "
                "each, and complete_scopes"
            )
        self._comm = plain
        scopes[_inner(plain)._channel] = self
        _inner(plain)._channel.recorded = True
        return wrapper

    def unbind(self) -> None:
        """Stop recording and forget what was recorded. Harmless twice."""
        if self._comm is not None:
            channel = _inner(self._comm)._channel
            if scopes.get(channel) is self:
                del scopes[channel]
                channel.recorded = False
        self._comm = None
        self._calls = []

    def __enter__(self) -> CollectiveScope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unbind()

    @property
    def rank(self) -> int:
        """This rank in the bound communicator."""
        return self._bound().rank

    def complete(self, loss: Tensor) -> Tensor:
        """The loss, equal to the bit, whose backward enters every collective that some rank's loss needs.

        Collective: every rank calls it, with its own `loss`, after forward and before ``backward()``. One
        small message exchange, and further ones only where some rank had something added. What was
        recorded is forgotten. For groups that overlap see `complete_scopes`.

        Raises:
            TensorContractError: the ranks did not record the same calls.
            RudaError: the scope is not bound, or its communicator is asynchronous; or as collectives do.
        """
        self._bound()
        return _blocking(complete(loss, [self], alone=True))

    async def complete_async(self, loss: Tensor) -> Tensor:
        """As `complete`, for an `AsyncCommunicator`."""
        self._bound()
        return await _awaited(complete(loss, [self], alone=True))

    # ------------------------------------------------------------------ for the protocol

    def _record(self, call: Call) -> None:
        self._calls.append(call)

    def _take(self) -> list[Call]:
        calls, self._calls = self._calls, []
        return calls

    def _bound(self) -> Communicator | AsyncCommunicator:
        if self._comm is None:
            raise RudaError("this CollectiveScope is not bound; call scope.bind(comm) before forward")
        return self._comm

    @property
    def _members(self) -> tuple[int, ...]:
        return _inner(self._bound())._channel.members

    @property
    def _member(self) -> int:
        """This rank in the whole job."""
        return self._members[self.rank]

    @property
    def _order(self) -> int:
        return _inner(self._bound())._channel.id


def _inner(comm: Communicator | AsyncCommunicator) -> AsyncCommunicator:
    return comm._inner if isinstance(comm, Communicator) else comm


def _sorted(given: Iterable[CollectiveScope]) -> list[CollectiveScope]:
    """In an order that all ranks share, so that votes of overlapping groups never wait in a circle."""
    result = sorted(given, key=lambda scope: scope._order)
    if not result:
        raise RudaError("complete_scopes needs at least one scope")
    if len({scope._order for scope in result}) != len(result):
        raise RudaError("complete_scopes was given two scopes of one communicator; give each once")
    return result


@eager
def complete_scopes(loss: Tensor, given: Iterable[CollectiveScope]) -> Tensor:
    """`CollectiveScope.complete` for several scopes whose groups overlap, such as a grid's rows and columns.

    A collective of one group can depend on one of another, so votes go round until no group adds anything.

    Args:
        loss: this rank's loss.
        given: this rank's scopes, all of one job (made by ``connect`` once and `split`); every
            rank of these groups has to call it too.

    Raises:
        RudaError, TensorContractError: as `CollectiveScope.complete`.
    """
    return _blocking(complete(loss, _sorted(given), alone=False))


async def complete_scopes_async(loss: Tensor, given: Iterable[CollectiveScope]) -> Tensor:
    """As `complete_scopes`, for scopes bound to asynchronous communicators."""
    return await _awaited(complete(loss, _sorted(given), alone=False))


def _blocking(steps: Steps) -> Tensor:
    answer: Any = None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration as stop:
            loss: Tensor = stop.value
            return loss
        answer = None if ask is None else _ask(steps, ask, Communicator)


async def _awaited(steps: Steps) -> Tensor:
    answer: Any = None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration as stop:
            loss: Tensor = stop.value
            return loss
        if ask is None:
            answer = None
            await asyncio.sleep(0)
        else:
            call: Awaitable[list[Any]] = _ask(steps, ask, AsyncCommunicator)
            answer = await call


def _ask(steps: Steps, ask: Ask, kind: type) -> Any:
    comm = ask.scope._bound()
    if not isinstance(comm, kind):
        steps.close()
        way = "await scope.complete_async(loss)" if kind is Communicator else "scope.complete(loss)"
        raise RudaError(f"this scope is bound to {comm!r}; complete it by `{way}`")
    return comm.all_gather_object(ask.payload)
