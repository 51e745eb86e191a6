from __future__ import annotations

import asyncio
from math import ceil, log2
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import DTYPES, LAYOUTS, Link, assert_same, group_of, run, run_links, torch_bits, values
from strict_link import Broken

from ruda_async import ProtocolError, TensorContractError
from ruda_async.collectives.gather import Gather
from ruda_async.collectives.scatter import Scatter

ALGORITHMS = ("direct", "binomial")

cases = given(
    size=st.integers(1, 12),
    root=st.integers(0, 11),
    algorithm=st.sampled_from((None, *ALGORITHMS)),
    shape=st.sampled_from([(1,), (0,), (0, 4), (3, 0), (2, 3), (5, 1, 2)]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    max_bytes=st.sampled_from([None, 3, 64]),
    give_out=st.booleans(),
    seed=st.integers(0, 99),
)


@cases
def test_gather(
    size: int,
    root: int,
    algorithm: str | None,
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    max_bytes: int | None,
    give_out: bool,
    seed: int,
) -> None:
    root %= size
    shards = [values(rank + 100 * seed, shape, dtype, layout) for rank in range(size)]
    expected = np.concatenate(shards)
    out = np.empty_like(expected) if give_out else None
    group = group_of(size, algorithm=algorithm, max_bytes=max_bytes, seed=seed)
    results = run(group, lambda rank: Gather(shards[rank], root, out=out if rank == root else None))
    for rank, result in enumerate(results):
        if rank == root:
            assert_same(result, expected)
            assert not np.shares_memory(result, shards[rank])
            assert out is None or result is out
        else:
            assert result is None


@cases
def test_scatter(
    size: int,
    root: int,
    algorithm: str | None,
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    max_bytes: int | None,
    give_out: bool,
    seed: int,
) -> None:
    root %= size
    value = values(seed, (size * shape[0], *shape[1:]), dtype, layout)
    expected = np.split(value, size)
    outs = [np.empty(shape, value.dtype) if give_out else None for _ in range(size)]
    given = [value if rank == root else None for rank in range(size)]
    group = group_of(size, algorithm=algorithm, max_bytes=max_bytes, seed=seed)
    results = run(group, lambda rank: Scatter(given[rank], root, out=outs[rank]))
    for result, shard, out in zip(results, expected, outs, strict=True):
        assert_same(result, shard)
        assert not np.shares_memory(result, value)
        assert out is None or result is out


@pytest.mark.parametrize("size", range(1, 10))
def test_counts_of_messages(size: int) -> None:
    rounds = ceil(log2(size)) if size > 1 else 0

    def count(request: Any, algorithm: str) -> int:
        group = group_of(size, algorithm=algorithm)
        run(group, request)
        return group.messages

    def gather(rank: int) -> Any:
        return Gather(values(rank, (3,)), 0)

    def scatter(rank: int) -> Any:
        return Scatter(values(rank, (3 * size,)) if rank == 0 else None, 0)

    assert count(gather, "direct") == 2 * (size - 1)
    assert count(gather, "binomial") == size * rounds
    assert count(scatter, "direct") == 2 * (size - 1) + size * rounds
    assert count(scatter, "binomial") == 2 * size * rounds


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", [Gather, Scatter])
async def test_nobody_is_done_while_one_rank_is_missing(algorithm: str, operation: Any) -> None:
    group = group_of(6, algorithm=algorithm)
    gate = asyncio.Event()
    done: list[int] = []

    async def body(link: Link) -> None:
        value = values(link.rank, (6,)) if operation is Gather or link.rank == 1 else None
        request = operation(value, 1)
        request.prepare(link.rank, link.size, link.settings)
        if link.rank == 4:
            await gate.wait()
        await request.run(link)
        done.append(link.rank)

    running = asyncio.ensure_future(run_links(group, body))
    for _ in range(500):
        await asyncio.sleep(0)
    assert not done
    gate.set()
    await running


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_nobody_is_done_when_one_rank_expects_another_shard(algorithm: str) -> None:
    group = group_of(5, algorithm=algorithm)
    done: list[int] = []

    async def body(rank: int) -> None:
        value = values(0, (10, 2)) if rank == 0 else values(0, (2, 3)) if rank == 3 else None
        request = Scatter(value, 0)
        request.prepare(rank, 5, group.settings)
        await request.run(Link(group, rank))
        done.append(rank)

    tasks = [asyncio.ensure_future(body(rank)) for rank in range(5)]
    text = r"rank 0 scatters shards of float32 \[2, 2\], and value here is float32 \[2, 3\]; pass None"
    with pytest.raises(TensorContractError, match=text):
        await tasks[3]
    for _ in range(200):
        await asyncio.sleep(0)
    assert not done
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_what_other_ranks_pass_to_scatter() -> None:
    torch = pytest.importorskip("torch")
    value = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)
    given = [
        Scatter(value, 0),
        Scatter(torch.empty(1, 2, dtype=torch.bfloat16), 0),
        Scatter(None, 0, like=torch.empty(0)),
        Scatter(None, 0),
    ]
    results = run(group_of(4), lambda rank: given[rank])
    for rank, result in enumerate(results[:3]):
        assert torch.equal(result, value[rank : rank + 1])
        assert torch_bits(result) == torch_bits(value[rank : rank + 1])
    assert results[3].dtype.name == "bfloat16"
    assert results[3].tolist() == [[6.0, 7.0]]


def test_out_may_be_part_of_the_input() -> None:
    memory = [values(rank, (3, 2)) for rank in range(3)]
    value = memory[1].copy()
    for at in range(3):
        memory[1][:] = value
        run(
            group_of(3),
            lambda rank: Scatter(
                memory[1] if rank == 1 else None,
                1,
                out=memory[rank][at : at + 1],  # noqa: B023
            ),
        )
        for rank in range(3):
            assert_same(memory[rank][at : at + 1], value[rank : rank + 1])


def test_gather_into_the_memory_of_the_shard() -> None:
    for at in range(3):
        out = values(9, (3, 2))
        shards = [values(0, (1, 2)), out[at : at + 1], values(2, (1, 2))]
        expected = np.concatenate(shards)
        run(group_of(3), lambda rank: Gather(shards[rank], 1, out=out if rank == 1 else None))  # noqa: B023
        assert_same(out, expected)


@pytest.mark.parametrize(
    ("request_", "rank", "text"),
    [
        (Gather(np.float64(1), 0), 0, r"gather works along the leading axis .* value.reshape\(1\)"),
        (Gather(np.zeros(2), 5), 1, "gather: root=5 is not a rank of this group; ranks are 0 to 2"),
        (Gather(np.zeros(2), 0, out=np.zeros(5)), 0, r"\[5\].*\[6\]"),
        (Scatter(np.zeros(4), 0), 0, "has length 4, which the world size 3 does not divide; pad it to 6"),
        (Scatter(np.float64(1), 0), 0, "scatter works along the leading axis"),
        (Scatter(None, 0), 0, "value is None on the root"),
        (Scatter(None, 0, like=np.zeros(3)), 0, "the root passes the tensor as its first argument"),
        (Scatter(np.zeros(3), 3), 0, "root=3"),
        (Scatter(np.zeros(3), 0, out=np.zeros(2)), 0, r"\[2\].*\[1\]"),
        (Scatter(np.zeros(1), 0, out=np.zeros(2)), 1, r"\[2\].*\[1\]"),
    ],
)
def test_refusals(request_: Any, rank: int, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        request_.prepare(rank, 3, group_of(3).settings)


async def test_an_out_that_does_not_fit_the_shard_that_comes() -> None:
    group = group_of(2)
    requests = [Scatter(values(0, (4,)), 0), Scatter(None, 0, out=np.zeros(3, np.float32))]

    async def body(rank: int) -> None:
        requests[rank].prepare(rank, 2, group.settings)
        await requests[rank].run(Link(group, rank))

    root = asyncio.ensure_future(body(0))
    with pytest.raises(TensorContractError, match=r"\[3\].*\[2\]"):
        await body(1)
    assert not root.done()
    root.cancel()


@pytest.mark.parametrize(
    "description",
    [b"", b"\xc1", msgpack.packb(["float32"]), msgpack.packb(["float32", [-1]]), msgpack.packb(["x", [1]]),
     msgpack.packb(["float32", []]), msgpack.packb(["float32", [1.5]]), msgpack.packb(["float32", [True]])],
)  # fmt: skip
async def test_a_description_that_is_none(description: bytes) -> None:
    group = group_of(2)
    sent = Link(group, 0).send(1, memoryview(description))
    request = Scatter(None, 0)
    request.prepare(1, 2, group.settings)
    with pytest.raises(ProtocolError, match=r"rank 0 sent .* that do not describe a tensor"):
        await request.run(Link(group, 1))
    await sent


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", [Gather, Scatter])
@pytest.mark.parametrize("break_after", [0, 4, 12])
async def test_a_broken_link_leaves_nothing_running(algorithm: str, operation: Any, break_after: int) -> None:
    group = group_of(12, algorithm=algorithm, break_after=break_after)

    async def body(rank: int) -> Any:
        request = operation(values(rank, (12,)) if operation is Gather or rank == 2 else None, 2)
        link = Link(group, rank)
        request.prepare(rank, 12, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(12)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Broken, np.ndarray, type(None)}
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
