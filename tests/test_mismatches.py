"""Ranks that differ in a call: every operation, every field, and both sides in the error of every rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from support import outcome, run_ranks

from ruda_async import AsyncCommunicator, CollectiveMismatchError, TensorContractError

Call = Callable[[AsyncCommunicator, Any], Awaitable[Any]]

#: Operations, with a tensor of 12 rows.
CALLS: dict[str, Call] = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "reduce": lambda c, x: c.reduce(x, 0),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "all_gather": lambda c, x: c.all_gather(x),
    "all_gather_v": lambda c, x: c.all_gather_v(x),
    "gather": lambda c, x: c.gather(x, 0),
    "broadcast": lambda c, x: c.broadcast(x, 0),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "all_to_all_v": lambda c, x: c.all_to_all_v(x, [len(x) // c.world_size] * c.world_size),
}
ROOTED: dict[str, Callable[[AsyncCommunicator, int], Awaitable[Any]]] = {
    "reduce": lambda c, root: c.reduce(np.ones(4), root),
    "gather": lambda c, root: c.gather(np.ones(4), root),
    "scatter": lambda c, root: c.scatter(np.ones(6) if c.rank == root else None, root),
    "broadcast": lambda c, root: c.broadcast(np.ones(4), root),
    "broadcast_object": lambda c, root: c.broadcast_object([1], root),
    "gather_object": lambda c, root: c.gather_object([1], root),
}
SUMS: dict[str, Callable[[AsyncCommunicator, str], Awaitable[Any]]] = {
    "all_reduce": lambda c, op: c.all_reduce(np.ones(6), op),
    "reduce": lambda c, op: c.reduce(np.ones(6), op=op, root=0),
    "reduce_scatter": lambda c, op: c.reduce_scatter(np.ones(6), op),
}


async def differs(
    url: str, call: Callable[[AsyncCommunicator, bool], Awaitable[Any]], field: str, *sides: str
) -> None:
    """Both sides are told to every rank, the rank that differs among them, and the next call works."""

    async def body(comm: AsyncCommunicator) -> None:
        odd = comm.rank == 2
        error = await outcome(call(comm, odd))
        assert isinstance(error, CollectiveMismatchError), error
        assert error.field == field, error
        assert {error.ours, error.theirs} == set(sides), error
        assert all(side in str(error) for side in sides)
        if odd:
            assert error.ours == sides[1]
        assert (await comm.all_reduce(np.ones(2))).tolist() == [3.0, 3.0]

    await run_ranks(3, body, url=url)


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_dtypes(url: str, name: str) -> None:
    call = CALLS[name]
    tensors = np.ones((12, 2), np.float32), np.ones((12, 2), np.float64)
    await differs(url, lambda c, odd: call(c, tensors[odd]), "dtype", "float32", "float64")


@pytest.mark.parametrize("columns", [2, 60_000], ids=["small", "large"])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_trailing_shapes_of_as_many_bytes(url: str, name: str, columns: int) -> None:
    call = CALLS[name]
    tensors = np.ones((12, columns, 3), np.uint8), np.ones((12, 3, columns), np.uint8)
    uneven = name.endswith("_v")
    sides = [str([*x.shape[uneven:]]) for x in tensors]
    await differs(url, lambda c, odd: call(c, tensors[odd]), "shape", *sides)


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"all_gather_v", "all_to_all_v"}))
async def test_lengths(url: str, name: str) -> None:
    call = CALLS[name]
    tensors = np.ones(12), np.ones(15)
    await differs(url, lambda c, odd: call(c, tensors[odd]), "shape", "[12]", "[15]")


@pytest.mark.parametrize("name", sorted(ROOTED))
async def test_roots(url: str, name: str) -> None:
    call = ROOTED[name]
    await differs(url, lambda c, odd: call(c, int(odd)), "root", "0", "1")


@pytest.mark.parametrize("name", sorted(SUMS))
async def test_operators(url: str, name: str) -> None:
    call = SUMS[name]
    await differs(url, lambda c, odd: call(c, "max" if odd else "sum"), "operator", "sum", "max")


@pytest.mark.parametrize("first", sorted(CALLS))
async def test_operations(url: str, first: str) -> None:
    names = sorted(CALLS)
    second = names[names.index(first) - 1]
    value = np.ones(12)
    await differs(url, lambda c, odd: CALLS[second if odd else first](c, value), "operation", first, second)


@pytest.mark.parametrize("rows", [0, 3])
async def test_an_exchange_brings_what_was_sent_and_says_how_much(url: str, rows: int) -> None:
    """Whatever a receiver was told before, and so expects: counts are those of the senders."""

    async def body(comm: AsyncCommunicator) -> None:
        announced = np.array([[2, 2, 2]] * 3)
        told = (await comm.all_to_all(announced[comm.rank])).tolist()
        assert told == [2, 2, 2]
        counts = [rows, 2, 2] if comm.rank == 2 else [2, 2, 2]  # rank 2 changes its mind for rank 0
        value = np.full((sum(counts), 4), float(comm.rank))
        expected = np.empty((sum(told), 4)) if comm.rank == 0 else None  # memory for what was announced
        error = await outcome(comm.all_to_all_v(value, counts, out=expected))
        if comm.rank == 0:
            assert isinstance(error, TensorContractError), error
            assert f"{4 + rows} were received ([2, 2, {rows}]" in str(error)
        elif isinstance(error, Exception):  # else it had all its rows before rank 0 found out
            assert isinstance(error, TensorContractError), error
            assert error.rank == 0
        else:
            assert list(error.receive_counts) == [2, 2, 2]
        found, received = await comm.all_to_all_v(value, counts)
        assert list(received) == ([2, 2, rows] if comm.rank == 0 else [2, 2, 2])
        assert found[:, 0].tolist() == np.repeat(np.arange(3.0), received).tolist()

    await run_ranks(3, body, url=url)
