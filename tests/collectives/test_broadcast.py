from __future__ import annotations

import asyncio
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import DTYPES, LAYOUTS, Link, assert_same, group_of, run, run_links, torch_bits, values
from strict_link import Broken

from ruda_async import ProtocolError, TensorContractError
from ruda_async.collectives.broadcast import Broadcast, broadcast_bytes
from ruda_async.collectives.request import decode_fingerprint

ALGORITHMS = ("binomial", "scatter_all_gather")


@given(
    size=st.integers(1, 9),
    root=st.integers(0, 8),
    algorithm=st.sampled_from((None, *ALGORITHMS)),
    shape=st.sampled_from([(1,), (0,), (0, 4), (3, 0), (2, 3), (40, 5)]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    max_bytes=st.sampled_from([None, 3, 64]),
    segment=st.sampled_from([1, 16, 4096]),
    give_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_rank_gets_the_bits_of_the_root(
    size: int,
    root: int,
    algorithm: str | None,
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    max_bytes: int | None,
    segment: int,
    give_out: bool,
    seed: int,
) -> None:
    root %= size
    inputs = [values(rank + 100 * seed, shape, dtype, layout) for rank in range(size)]
    before = [value.tobytes() for value in inputs]
    outs = [np.empty_like(inputs[0], order="C", subok=False) if give_out else None for _ in inputs]
    group = group_of(size, algorithm=algorithm, max_bytes=max_bytes, segment_bytes=segment, seed=seed)
    results = run(group, lambda rank: Broadcast(inputs[rank], root, out=outs[rank]))
    for value, result, out, bits in zip(inputs, results, outs, before, strict=True):
        assert_same(result, inputs[root])
        assert value.tobytes() == bits
        assert not np.shares_memory(result, value)
        if give_out:
            assert result is out


@pytest.mark.parametrize("size", range(1, 10))
def test_a_small_broadcast_costs_no_more_than_its_barrier(size: int) -> None:
    group = group_of(size, algorithm="binomial")
    run(group, lambda rank: Broadcast(values(rank, (5,)), size // 2))
    assert group.messages == (size * ceil(log2(size)) if size > 1 else 0)
    assert group.payload_bytes == (size - 1) * 20


@pytest.mark.parametrize("size", range(2, 10))
def test_traffic_of_large_broadcasts(size: int) -> None:
    def nbytes(algorithm: str) -> int:
        group = group_of(size, algorithm=algorithm, segment_bytes=512)
        run(group, lambda rank: Broadcast(values(rank, (size * 64,)), 1))
        return group.payload_bytes

    whole = size * 256
    assert nbytes("binomial") == (size - 1) * whole
    # The root's parts, and then every rank but one forwards each part.
    assert nbytes("scatter_all_gather") == (size - 1) * 256 + (size - 1) * whole


@pytest.mark.parametrize("segment", [64, 100])
def test_segments_only_where_a_rank_in_the_middle_forwards(segment: int) -> None:
    for size, messages in ((2, 1), (3, 2), (4, 3 * -(-400 // segment))):
        group = group_of(size, algorithm="binomial", segment_bytes=segment)
        run(group, lambda rank: Broadcast(values(rank, (100,)), 0))
        barrier = {2: 1, 3: 4, 4: 8}[size]
        assert group.messages == messages + barrier


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(4,), (400,)])
async def test_nobody_is_done_while_one_rank_is_missing(algorithm: str, shape: tuple[int, ...]) -> None:
    group = group_of(6, algorithm=algorithm, segment_bytes=64)
    gate = asyncio.Event()
    done: list[int] = []

    async def body(link: Link) -> None:
        request = Broadcast(values(link.rank, shape), 1)
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


def test_scalars() -> None:
    results = run(group_of(3), lambda rank: Broadcast(np.float32(rank), 2))
    assert [result.tolist() for result in results] == [2.0] * 3
    assert all(result.shape == () for result in results)


def test_later_changes_of_the_input_do_not_reach_the_result() -> None:
    inputs = [values(rank, (4,)) for rank in range(3)]
    expected = inputs[1].copy()
    results = run(group_of(3), lambda rank: Broadcast(inputs[rank], 1))
    for value in inputs:
        value[:] = 7
    for result in results:
        assert_same(result, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_out_may_be_or_overlap_the_input(algorithm: str) -> None:
    memory = [values(rank, (12,)) for rank in range(4)]
    expected = memory[2][:8].copy()
    run(group_of(4, algorithm=algorithm), lambda rank: Broadcast(memory[rank][:8], 2, out=memory[rank][:8]))
    for array in memory:
        assert_same(array[:8], expected)
    memory[2][:8] = expected
    run(group_of(4, algorithm=algorithm), lambda rank: Broadcast(memory[rank][:8], 2, out=memory[rank][3:11]))
    for array in memory:
        assert_same(array[3:11], expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "bool", "uint16", "float16"])
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    width = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2, (3, 4, 6 * width), dtype=torch.uint8, generator=random)
    inputs = list(bits.view(dtype).transpose(1, 2))
    for result in run(group_of(3), lambda rank: Broadcast(inputs[rank], 1)):
        assert result.dtype == dtype
        assert result.shape == (6, 4)
        assert torch_bits(result) == torch_bits(inputs[1])


@given(
    size=st.integers(1, 9),
    root=st.integers(0, 8),
    data=st.binary(max_size=50),
    max_bytes=st.sampled_from([None, 1, 7]),
    seed=st.integers(0, 99),
)
def test_bytes_whose_number_only_the_root_knows(
    size: int, root: int, data: bytes, max_bytes: int | None, seed: int
) -> None:
    async def body(link: Link) -> bytes:
        mine = memoryview(data if link.rank == root % size else b"ignored")
        return bytes(await broadcast_bytes(link, root % size, mine, 50))

    assert asyncio.run(run_links(group_of(size, max_bytes=max_bytes, seed=seed), body)) == [data] * size


async def test_too_many_bytes_are_refused() -> None:
    async def body(link: Link) -> Any:
        return await broadcast_bytes(link, 0, memoryview(bytes(9)), 8)

    group = group_of(2)
    outcomes = await asyncio.gather(
        asyncio.wait_for(body(Link(group, 0)), 0.05), body(Link(group, 1)), return_exceptions=True
    )
    assert isinstance(outcomes[1], ProtocolError)
    assert "announced 9 bytes" in str(outcomes[1])


@pytest.mark.parametrize(
    ("value", "root", "arguments", "text"),
    [
        (np.zeros(2), 3, {}, "broadcast: root=3 is not a rank of this group; ranks are 0 to 1"),
        (np.zeros(2), -1, {}, "root=-1 is not a rank"),
        (np.zeros(2, np.int64), 0, {"kind": "float", "name": "broadcast_float"}, "int64; use broadcast,"),
        (np.zeros(2), 0, {"out": np.zeros(3)}, r"\[3\].*\[2\]"),
        ("text", 0, {}, "str"),
    ],
)
def test_refusals(value: Any, root: int, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        Broadcast(value, root, **arguments).prepare(0, 2, group_of(2).settings)


def test_the_fingerprint() -> None:
    head = Broadcast(values(0, (2, 3)), 1, kind="float", name="broadcast_float").prepare(
        0, 2, group_of(2).settings
    )
    assert decode_fingerprint(head) == ("broadcast", "float32", (2, 3), (("root", 1),))


def test_the_same_tensor_on_groups_of_two_sizes_is_not_taken_for_one_plan() -> None:
    # 2 ranks take the tree and 4 the ring for this many bytes, over one and the same transport.
    shape = (200_000,)
    for size in (2, 4, 2):
        inputs = [values(rank, shape) for rank in range(size)]
        for result in run(group_of(size, latency=1e-9), lambda rank: Broadcast(inputs[rank], 0)):  # noqa: B023
            assert_same(result, inputs[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("break_after", [0, 3, 11, 30])
async def test_a_broken_link_leaves_nothing_running(algorithm: str, break_after: int) -> None:
    group = group_of(6, algorithm=algorithm, break_after=break_after, segment_bytes=32)

    async def body(rank: int) -> Any:
        request = Broadcast(values(rank, (100,)), 2)
        link = Link(group, rank)
        request.prepare(rank, 6, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(6)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Broken, np.ndarray}
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
