"""The collective calls of the blocking communicator, each one line over its asynchronous twin.

What they mean, take and raise is written at the twin in `ruda_async.operations`; a test holds the two
files' signatures against each other.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from .operations import AsyncOperations
from .traits import VariableTensorExchange

__all__ = ["Operations"]

T = TypeVar("T")
R = TypeVar("R")


class Operations:
    """The calls; `Communicator` adds identity, life and point-to-point."""

    _inner: AsyncOperations

    def _wait(self, call: Coroutine[Any, Any, R]) -> R:
        raise NotImplementedError

    def all_reduce(
        self,
        value: T,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """As `AsyncOperations.all_reduce`, blocking."""
        return self._wait(self._inner.all_reduce(value, op, out=out, order=order, timeout=timeout))

    def all_reduce_sum(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.all_reduce_sum`, blocking."""
        return self._wait(self._inner.all_reduce_sum(value, out=out, timeout=timeout))

    def reduce(
        self,
        value: T,
        root: int,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T | None:
        """As `AsyncOperations.reduce`, blocking."""
        return self._wait(self._inner.reduce(value, root, op, out=out, order=order, timeout=timeout))

    def reduce_scatter(
        self,
        value: T,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """As `AsyncOperations.reduce_scatter`, blocking."""
        return self._wait(self._inner.reduce_scatter(value, op, out=out, order=order, timeout=timeout))

    def reduce_scatter_sum(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.reduce_scatter_sum`, blocking."""
        return self._wait(self._inner.reduce_scatter_sum(value, out=out, timeout=timeout))

    def reduce_scatter_dim(
        self,
        value: T,
        dim: int,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """As `AsyncOperations.reduce_scatter_dim`, blocking."""
        return self._wait(
            self._inner.reduce_scatter_dim(value, dim, op, out=out, order=order, timeout=timeout)
        )

    def all_gather(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.all_gather`, blocking."""
        return self._wait(self._inner.all_gather(value, out=out, timeout=timeout))

    def all_gather_float(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.all_gather_float`, blocking."""
        return self._wait(self._inner.all_gather_float(value, out=out, timeout=timeout))

    def all_gather_int(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.all_gather_int`, blocking."""
        return self._wait(self._inner.all_gather_int(value, out=out, timeout=timeout))

    def all_gather_dim(self, value: T, dim: int, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.all_gather_dim`, blocking."""
        return self._wait(self._inner.all_gather_dim(value, dim, out=out, timeout=timeout))

    def all_gather_v(
        self, value: T, *, out: T | None = None, timeout: float | None = None
    ) -> VariableTensorExchange[T]:
        """As `AsyncOperations.all_gather_v`, blocking."""
        return self._wait(self._inner.all_gather_v(value, out=out, timeout=timeout))

    def gather(self, value: T, root: int, *, out: T | None = None, timeout: float | None = None) -> T | None:
        """As `AsyncOperations.gather`, blocking."""
        return self._wait(self._inner.gather(value, root, out=out, timeout=timeout))

    def broadcast(self, value: T, root: int, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.broadcast`, blocking."""
        return self._wait(self._inner.broadcast(value, root, out=out, timeout=timeout))

    def broadcast_float(
        self, value: T, root: int, *, out: T | None = None, timeout: float | None = None
    ) -> T:
        """As `AsyncOperations.broadcast_float`, blocking."""
        return self._wait(self._inner.broadcast_float(value, root, out=out, timeout=timeout))

    def scatter(
        self,
        value: T | None,
        root: int,
        *,
        like: T | None = None,
        out: T | None = None,
        timeout: float | None = None,
    ) -> T:
        """As `AsyncOperations.scatter`, blocking."""
        return self._wait(self._inner.scatter(value, root, like=like, out=out, timeout=timeout))

    def all_to_all(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """As `AsyncOperations.all_to_all`, blocking."""
        return self._wait(self._inner.all_to_all(value, out=out, timeout=timeout))

    def all_to_all_dim(
        self, value: T, split_dim: int, concat_dim: int, *, out: T | None = None, timeout: float | None = None
    ) -> T:
        """As `AsyncOperations.all_to_all_dim`, blocking."""
        return self._wait(self._inner.all_to_all_dim(value, split_dim, concat_dim, out=out, timeout=timeout))

    def all_to_all_v(
        self, value: T, send_counts: Sequence[int], *, out: T | None = None, timeout: float | None = None
    ) -> VariableTensorExchange[T]:
        """As `AsyncOperations.all_to_all_v`, blocking."""
        return self._wait(self._inner.all_to_all_v(value, send_counts, out=out, timeout=timeout))

    def all_to_all_v_float(
        self, value: T, send_counts: Sequence[int], *, out: T | None = None, timeout: float | None = None
    ) -> VariableTensorExchange[T]:
        """As `AsyncOperations.all_to_all_v_float`, blocking."""
        return self._wait(self._inner.all_to_all_v_float(value, send_counts, out=out, timeout=timeout))

    def all_to_all_v_int(
        self, value: T, send_counts: Sequence[int], *, out: T | None = None, timeout: float | None = None
    ) -> VariableTensorExchange[T]:
        """As `AsyncOperations.all_to_all_v_int`, blocking."""
        return self._wait(self._inner.all_to_all_v_int(value, send_counts, out=out, timeout=timeout))

    def barrier(self, *, timeout: float | None = None) -> None:
        """As `AsyncOperations.barrier`, blocking."""
        return self._wait(self._inner.barrier(timeout=timeout))

    def broadcast_object(self, value: Any, root: int, *, timeout: float | None = None) -> Any:
        """As `AsyncOperations.broadcast_object`, blocking."""
        return self._wait(self._inner.broadcast_object(value, root, timeout=timeout))

    def gather_object(self, value: Any, root: int, *, timeout: float | None = None) -> list[Any] | None:
        """As `AsyncOperations.gather_object`, blocking."""
        return self._wait(self._inner.gather_object(value, root, timeout=timeout))

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """As `AsyncOperations.all_gather_object`, blocking."""
        return self._wait(self._inner.all_gather_object(value, timeout=timeout))
