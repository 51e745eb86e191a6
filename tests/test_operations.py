"""Every operation over every transport against a plain numpy model, on random input."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SCHEMES, fresh_url, run_ranks

from ruda_async import (
    AsyncCommunicator,
    AsyncVariableTensorCollective,
    TensorContractError,
    VariableTensorExchange,
    sync,
    traits,
)
from ruda_async.tensors import order

torch = pytest.importorskip("torch")

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
MOVED = [*FLOATS, *INTEGERS, np.bool_, ml_dtypes.float8_e4m3fn]


def distinct(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Values that differ from place to place and rank to rank, small enough to be added."""
    rng = np.random.default_rng([rank, *shape, np.dtype(dtype).itemsize])
    if np.dtype(dtype).kind in "iub":
        return rng.integers(0, 2 if np.dtype(dtype) == np.bool_ else 20, shape).astype(dtype)
    return (rng.standard_normal(shape) * 3).astype(dtype)


def restride(value: np.ndarray, how: str) -> np.ndarray:
    """The same values in another memory layout."""
    if value.ndim == 0 or how == "plain":
        return value
    if how == "reversed":
        return value[::-1].copy()[::-1]
    if how == "strided":
        wide = np.zeros((*value.shape[:-1], value.shape[-1] * 3), value.dtype)
        wide[..., ::3] = value
        return wide[..., ::3]
    if how == "transposed":
        return np.asfortranarray(value)
    frozen = value.copy()
    frozen.flags.writeable = False
    return frozen


def tree_sum(values: list[np.ndarray], tree: Any) -> np.ndarray:
    """Add in the documented order."""
    if isinstance(tree, int):
        return values[tree]
    left, right = tree
    return tree_sum(values, left) + tree_sum(values, right)


def summed(values: list[np.ndarray]) -> np.ndarray:
    """The documented sum: half precision in float32, rounded once."""
    dtype = values[0].dtype
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    with np.errstate(all="ignore"):
        return tree_sum([v.astype(wide) for v in values], order(len(values))).astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


worlds = st.integers(1, 5)
schemes = st.sampled_from(SCHEMES)
layouts = st.sampled_from(["plain", "reversed", "strided", "transposed", "frozen"])
shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)


@given(worlds, schemes, st.sampled_from(FLOATS + INTEGERS), shapes, layouts, st.integers(0, 3))
def test_all_reduce(
    world: int, scheme: str, dtype: Any, shape: tuple[int, ...], layout: str, big: int
) -> None:
    if big == 3:
        shape = (50_000 * world, *shape[1:])
    inputs = [distinct(r, shape, dtype) for r in range(world)]

    async def body(comm: AsyncCommunicator) -> np.ndarray:
        mine = restride(inputs[comm.rank], layout)
        before = mine.tobytes()
        result = await comm.all_reduce_sum(mine)
        assert mine.tobytes() == before
        assert not np.shares_memory(result, mine)
        return result

    expected = summed(inputs)
    for result in asyncio.run(run_ranks(world, body, url=fresh_url(scheme))):
        assert same_bits(np.asarray(result), np.asarray(expected))


@given(worlds, schemes, st.sampled_from(MOVED), st.integers(0, 5), shapes, layouts)
def test_movement(world: int, scheme: str, dtype: Any, rows: int, tail: tuple[int, ...], layout: str) -> None:
    shape = (rows, *tail)
    inputs = [distinct(r, shape, dtype) for r in range(world)]
    whole = [distinct(r, (world * rows, *tail), dtype) for r in range(world)]
    root = rows % world

    async def body(comm: AsyncCommunicator) -> None:
        mine = restride(inputs[comm.rank], layout)
        all_mine = restride(whole[comm.rank], layout)
        assert same_bits(await comm.all_gather(mine), np.concatenate(inputs))
        assert same_bits(await comm.broadcast(mine, root), inputs[root])
        gathered = await comm.gather(mine, root)
        assert (gathered is None) == (comm.rank != root)
        if gathered is not None:
            assert same_bits(gathered, np.concatenate(inputs))
        shard = await comm.scatter(all_mine if comm.rank == root else None, root)
        assert same_bits(shard, whole[root][rows * comm.rank : rows * (comm.rank + 1)])
        exchanged = await comm.all_to_all(all_mine)
        assert same_bits(
            exchanged, np.concatenate([w[rows * comm.rank : rows * (comm.rank + 1)] for w in whole])
        )

    asyncio.run(run_ranks(world, body, url=fresh_url(scheme)))


@given(worlds, schemes, st.sampled_from(FLOATS + INTEGERS), st.integers(0, 4), st.integers(0, 3))
def test_reduce_scatter(world: int, scheme: str, dtype: Any, rows: int, columns: int) -> None:
    inputs = [distinct(r, (world * rows, columns), dtype) for r in range(world)]
    total = summed(inputs)

    async def body(comm: AsyncCommunicator) -> None:
        shard = await comm.reduce_scatter_sum(inputs[comm.rank])
        assert same_bits(shard, total[rows * comm.rank : rows * (comm.rank + 1)])
        root = world - 1
        reduced = await comm.reduce(inputs[comm.rank], root)
        assert (reduced is None) == (comm.rank != root)
        if reduced is not None:
            assert same_bits(reduced, total)

    asyncio.run(run_ranks(world, body, url=fresh_url(scheme)))


@given(worlds, schemes, st.sampled_from(MOVED), st.data(), st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_all_to_all_v(
    world: int, scheme: str, dtype: Any, data: st.DataObject, tail: tuple[int, ...]
) -> None:
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 6), min_size=world, max_size=world), min_size=world, max_size=world)
    )
    budget = data.draw(st.sampled_from([None, 100]))
    inputs = [distinct(r, (sum(counts[r]), *tail), dtype) for r in range(world)]

    async def body(comm: AsyncCommunicator) -> None:
        me = comm.rank
        group = comm if budget is None else comm.bounded(budget)
        value, received = await group.all_to_all_v(inputs[me], counts[me])
        assert received == tuple(counts[s][me] for s in range(world))
        pieces = [
            inputs[s][sum(counts[s][:me]) : sum(counts[s][: me + 1])] for s in range(world)
        ]  # fmt: skip
        assert same_bits(value, np.concatenate(pieces))
        gathered, lengths = await group.all_gather_v(inputs[me])
        assert lengths == tuple(len(i) for i in inputs)
        assert same_bits(gathered, np.concatenate(inputs))

    asyncio.run(run_ranks(world, body, url=fresh_url(scheme)))


OPERATORS = {
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "prod": np.multiply.reduce,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("operator", sorted(OPERATORS))
async def test_operators(url: str, operator: str) -> None:
    inputs = [distinct(r, (6, 5), np.int64) for r in range(3)]

    async def body(comm: AsyncCommunicator) -> None:
        result = await comm.all_reduce(inputs[comm.rank], operator)
        np.testing.assert_array_equal(result, OPERATORS[operator](inputs))
        shard = await comm.reduce_scatter(inputs[comm.rank], operator)
        np.testing.assert_array_equal(shard, OPERATORS[operator](inputs)[2 * comm.rank : 2 * comm.rank + 2])

    await run_ranks(3, body, url=url)


async def test_mean_divides_by_the_world_size(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        result = await comm.all_reduce(np.full(7, comm.rank + 1.0), "mean")
        assert result.tolist() == [2.0] * 7
        with pytest.raises(TensorContractError, match="mean"):
            await comm.all_reduce(np.ones(7, np.int64), "mean")

    await run_ranks(3, body, url=url)


async def test_nan_wins_over_max_and_min(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        value = np.array([np.nan if comm.rank == 1 else 5.0, float(comm.rank)], np.float32)
        assert np.isnan((await comm.all_reduce(value, "max"))[0])
        assert np.isnan((await comm.all_reduce(value, "min"))[0])

    await run_ranks(3, body, url=url)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
async def test_dims(url: str, dim: int) -> None:
    inputs = [distinct(r, (4, 6, 2), np.float32) for r in range(2)]

    async def body(comm: AsyncCommunicator) -> None:
        mine = inputs[comm.rank]
        np.testing.assert_array_equal(await comm.all_gather_dim(mine, dim), np.concatenate(inputs, dim))
        np.testing.assert_array_equal(
            await comm.reduce_scatter_dim(mine, dim), np.split(summed(inputs), 2, dim)[comm.rank]
        )
        np.testing.assert_array_equal(
            await comm.all_to_all_dim(mine, dim, 0),
            np.concatenate([np.split(i, 2, dim)[comm.rank] for i in inputs], 0),
        )

    await run_ranks(2, body, url=url)


async def test_torch(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        leaf = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
        total = await comm.all_reduce_sum(leaf.t())
        assert isinstance(total, torch.Tensor)
        assert not total.requires_grad
        assert torch.equal(total, 3 * leaf.detach().t())
        half = torch.full((3,), 1 + comm.rank / 128, dtype=torch.bfloat16)
        gathered = await comm.all_gather_float(half)
        assert gathered.dtype == torch.bfloat16
        assert torch.equal(
            gathered, torch.cat([torch.full((3,), 1 + r / 128, dtype=torch.bfloat16) for r in range(3)])
        )
        eight = torch.tensor([1.0, -2.0], dtype=torch.float8_e4m3fn)
        assert torch.equal((await comm.broadcast(eight, 2)).float(), eight.float())
        with pytest.raises(TensorContractError, match="float8"):
            await comm.all_reduce_sum(eight)
        flags = torch.tensor([True, False]).expand(3, 2)
        assert torch.equal(await comm.all_gather_int(flags), flags.repeat(3, 1))
        value, counts = await comm.all_to_all_v_int(torch.arange(6).to(torch.uint16).reshape(3, 2), [1, 1, 1])
        assert value.dtype == torch.uint16
        assert counts == (1, 1, 1)
        scalar = await comm.all_reduce_sum(torch.tensor(2.0))
        assert scalar.shape == ()
        assert scalar.item() == 6
        out = torch.empty(3, 2)
        assert await comm.all_reduce_sum(leaf.t(), out=out) is out
        assert torch.equal(out, total)

    await run_ranks(3, body, url=url)


async def test_numpy_and_torch_ranks_meet(url: str) -> None:
    values = distinct(0, (1000,), np.float32), distinct(1, (1000,), np.float32)

    async def body(comm: AsyncCommunicator) -> bytes:
        mine = values[comm.rank]
        result = await comm.all_reduce_sum(torch.from_numpy(mine) if comm.rank else mine)
        return np.asarray(result).tobytes()

    first, second = await run_ranks(2, body, url=url)
    assert first == second == (values[0] + values[1]).tobytes()


async def test_broadcast_is_detached_from_its_input(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        mine = np.full(4, float(comm.rank))
        result = await comm.broadcast_float(mine, 1)
        mine[:] = 99
        assert result.tolist() == [1.0] * 4

    await run_ranks(2, body, url=url)


async def test_objects(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        thing = {"rank": comm.rank, "list": [1, 2.5, None, True, b"bytes", "text"], 3: {"deep": []}}
        assert (await comm.broadcast_object(thing, 1))["rank"] == 1
        everything = await comm.all_gather_object(thing)
        assert [t["rank"] for t in everything] == [0, 1, 2]
        assert everything[2] == {**thing, "rank": 2}
        gathered = await comm.gather_object(thing, 2)
        assert (gathered is None) == (comm.rank != 2)

    await run_ranks(3, body, url=url)


async def test_empty_ranks_in_a_long_loop(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        mine = np.ones((0 if comm.rank == 1 else 2, 3), np.float32)
        counts = [0] * 3 if comm.rank == 1 else [1, 0, 1]
        for _ in range(1000):
            value, received = await comm.all_to_all_v_float(mine, counts)
            assert len(value) == sum(received)

    await run_ranks(3, body, url=url, limit=55)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling", "rabenseifner", "pairwise"])
async def test_bits_do_not_depend_on_the_algorithm(url: str, algorithm: str) -> None:
    inputs = [distinct(r, (40_003,), np.float32) for r in range(5)]
    expected = summed(inputs)

    async def body(comm: AsyncCommunicator) -> None:
        assert same_bits(await comm.all_reduce_sum(inputs[comm.rank]), expected)
        assert same_bits(await comm.bounded(1000).all_reduce_sum(inputs[comm.rank]), expected)
        anyhow = await comm.all_reduce(inputs[comm.rank], order="any")
        np.testing.assert_allclose(anyhow, expected, rtol=1e-4, atol=1e-4)

    await run_ranks(5, body, url=url, algorithm=algorithm)


async def test_bounded_cuts_every_message() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        before = comm.stats()["peers"]
        await comm.bounded(4096).all_reduce_sum(np.ones(100_000, np.float32))
        after = comm.stats()["peers"]
        for peer, counters in after.items():
            sent = counters["bytes_sent"] - before[peer]["bytes_sent"]
            messages = counters["messages_sent"] - before[peer]["messages_sent"]
            assert sent / messages <= 4096
            assert sent > 100_000

    await run_ranks(2, body)


async def test_eight_ranks_in_memory() -> None:
    inputs = [distinct(r, (8, 1000), np.float32) for r in range(8)]

    async def body(comm: AsyncCommunicator) -> None:
        assert same_bits(await comm.all_reduce_sum(inputs[comm.rank]), summed(inputs))
        assert same_bits(
            await comm.reduce_scatter_sum(inputs[comm.rank]), summed(inputs)[comm.rank : comm.rank + 1]
        )
        assert same_bits(await comm.all_gather(inputs[comm.rank]), np.concatenate(inputs))
        await comm.all_to_all(inputs[comm.rank])

    await run_ranks(8, body)


def test_traits() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for name in traits.__all__:
            if name.startswith("Async"):
                assert isinstance(comm, getattr(traits, name)), name
        assert isinstance(comm, AsyncVariableTensorCollective)
        assert comm.autodiff_context is None

    asyncio.run(run_ranks(1, body))
    with sync.connect(fresh_url("memory"), rank=0, world_size=1) as comm:
        for name in traits.__all__:
            if name not in ("VariableTensorExchange",) and not name.startswith("Async"):
                assert isinstance(comm, getattr(traits, name)), name
    assert VariableTensorExchange(1, (1,)).receive_counts == (1,)


@settings(max_examples=15)
@given(st.integers(1, 5), st.lists(st.integers(0, 400), min_size=3, max_size=3))
def test_same_bits_on_all_ranks_and_transports(world: int, sizes: list[int]) -> None:
    inputs = [[distinct(r, (s * 97,), np.float32) for s in sizes] for r in range(world)]

    async def body(comm: AsyncCommunicator) -> list[bytes]:
        return [(await comm.all_reduce_sum(value)).tobytes() for value in inputs[comm.rank]]

    results = [r for scheme in SCHEMES for r in asyncio.run(run_ranks(world, body, url=fresh_url(scheme)))]
    assert all(r == results[0] for r in results)
