from __future__ import annotations

import asyncio
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from fake_link import FakeGroup, FakeSettings, run_group
from hypothesis import given
from hypothesis import strategies as st
from movement_model import DTYPES, LAYOUTS, Link, assert_same, group_of, run, run_links, torch_bits, values

from ruda_async import TensorContractError
from ruda_async.collectives.all_gather import AllGather, bruck, direct, recursive_doubling, ring, ring_blocks
from ruda_async.collectives.messages import scratch
from ruda_async.collectives.request import decode_fingerprint
from ruda_async.transport.base import Capabilities

ALGORITHMS = ("direct", "ring", "recursive_doubling")


@given(
    size=st.integers(1, 9),
    algorithm=st.sampled_from((None, *ALGORITHMS)),
    shape=st.sampled_from([(1,), (3,), (0,), (0, 4), (3, 0), (2, 3), (4, 1, 2)]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    dim=st.integers(-3, 2),
    max_bytes=st.sampled_from([None, 1, 5, 64]),
    segment=st.sampled_from([1, 7, 4096]),
    give_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_concatenation(
    size: int,
    algorithm: str | None,
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    dim: int,
    max_bytes: int | None,
    segment: int,
    give_out: bool,
    seed: int,
) -> None:
    if not -len(shape) <= dim < len(shape):
        dim = 0
    shards = [values(rank + 100 * seed, shape, dtype, layout) for rank in range(size)]
    before = [shard.tobytes() for shard in shards]
    expected = np.concatenate(shards, axis=dim)
    outs = [np.empty_like(expected) if give_out else None for _ in range(size)]
    group = group_of(size, algorithm=algorithm, max_bytes=max_bytes, segment_bytes=segment, seed=seed)
    results = run(group, lambda rank: AllGather(shards[rank], dim=dim, out=outs[rank]))
    for shard, result, out, bits in zip(shards, results, outs, before, strict=True):
        assert_same(result, expected)
        assert shard.tobytes() == bits
        assert not np.shares_memory(result, shard)
        if give_out:
            assert result is out


@pytest.mark.parametrize("size", range(1, 10))
def test_counts_of_messages_and_bytes(size: int) -> None:
    shard = 24

    def count(algorithm: str) -> tuple[int, int]:
        group = group_of(size, algorithm=algorithm)
        run(group, lambda rank: AllGather(values(rank, (6,))))
        return group.messages, group.payload_bytes

    rounds = ceil(log2(size)) if size > 1 else 0
    assert count("direct") == (size * (size - 1), size * (size - 1) * shard)
    assert count("ring") == (size * (size - 1), size * (size - 1) * shard)
    assert count("recursive_doubling") == (size * rounds, size * (size - 1) * shard)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=9),
    segment=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_a_ring_of_any_lengths(lengths: list[int], segment: int, seed: int) -> None:
    size = len(lengths)

    async def body(link: Link) -> list[bytes]:
        blocks = [scratch(length) for length in lengths]
        blocks[link.rank][:] = bytes([link.rank + 1]) * lengths[link.rank]
        await ring_blocks(link, blocks)
        return [bytes(block) for block in blocks]

    group = group_of(size, segment_bytes=segment, seed=seed)
    for result in asyncio.run(run_links(group, body)):
        assert result == [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
    cuts = sum(max(ceil(length / segment), 1) for length in lengths)
    assert group.messages == (size - 1) * cuts
    assert group.largest <= segment


@pytest.mark.parametrize("algorithm", [direct, ring, recursive_doubling, bruck])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
async def test_in_place_for_other_families(algorithm: Any, size: int) -> None:
    async def body(link: Link) -> bytes:
        out = scratch(size * 4)
        out[link.rank * 4 : link.rank * 4 + 4] = bytes([link.rank] * 4)
        await algorithm(link, out, 4)
        return bytes(out)

    for result in await run_links(group_of(size), body):
        assert result == b"".join(bytes([rank] * 4) for rank in range(size))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_over_queues(algorithm: str) -> None:
    group = FakeGroup(6, Capabilities(segment_bytes=64), FakeSettings(algorithm=algorithm, max_bytes=48))
    shards = [values(rank, (10, 5)) for rank in range(6)]

    async def body(link: Any) -> Any:
        request = AllGather(shards[link.rank])
        request.prepare(link.rank, link.size, link.settings)
        return await request.run(link)

    for result in await run_group(6, body, group):
        assert_same(result, np.concatenate(shards))
    assert group.largest <= 48


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_out_may_be_where_the_shard_is(algorithm: str, at: int) -> None:
    shards = [values(rank, (2, 3)) for rank in range(3)]
    outs = [np.zeros((6, 3), np.float32) for _ in shards]
    for rank, out in enumerate(outs):
        out[2 * at : 2 * at + 2] = shards[rank]
    run(
        group_of(3, algorithm=algorithm),
        lambda rank: AllGather(outs[rank][2 * at : 2 * at + 2], out=outs[rank]),
    )
    for out in outs:
        assert_same(out, np.concatenate(shards))


def test_expanded_inputs_are_distinct_between_ranks() -> None:
    shards = [np.broadcast_to(values(rank, (1, 4)), (3, 4)) for rank in range(4)]
    for result in run(group_of(4), lambda rank: AllGather(shards[rank])):
        assert_same(result, np.concatenate(shards))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "bool", "uint16", "float16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_torch(name: str, dim: int) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    random = torch.Generator().manual_seed(1)
    width = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2, (3, 4, 6 * width), dtype=torch.uint8, generator=random)
    shards = list(bits.view(dtype).transpose(1, 2))  # not contiguous
    for result in run(group_of(3), lambda rank: AllGather(shards[rank], dim=dim)):
        assert result.dtype == dtype
        expected = torch.cat([shard.contiguous().view(torch.uint8) for shard in shards], dim=0)
        if dim:
            expected = torch.cat(
                [shard.contiguous().view(torch.uint8).reshape(6, 4, width) for shard in shards], dim=1
            )
        assert torch_bits(result) == expected.numpy().tobytes()


def head(value: Any, **arguments: Any) -> Any:
    return decode_fingerprint(AllGather(value, **arguments).prepare(0, 2, group_of(2).settings))


def test_the_fingerprint_names_the_operation_and_not_the_method() -> None:
    value = values(0, (2, 3))
    assert head(value) == head(value, kind="float", name="all_gather_float")
    assert head(value) == head(value, dim=0, name="all_gather_dim") == head(value, dim=-2)
    assert head(value, dim=1).detail == (("dim", 1),)
    assert head(value)[:3] == ("all_gather", "float32", (2, 3))
    settings = group_of(2, algorithm="ring", max_bytes=9).settings
    detail = decode_fingerprint(AllGather(value).prepare(0, 2, settings)).detail  # type: ignore[union-attr]
    assert detail == (("algorithm", "ring"), ("max_bytes", 9))


@pytest.mark.parametrize(
    ("value", "arguments", "text"),
    [
        (np.float32(1), {}, r"all_gather works along the leading axis and a scalar .* value.reshape\(1\)"),
        (np.zeros(2, np.int64), {"kind": "float", "name": "all_gather_float"}, "int64; use all_gather_int"),
        (np.zeros(2), {"kind": "int", "name": "all_gather_int"}, "float64; use all_gather_float"),
        (np.zeros((2, 3)), {"dim": 2}, r"dim=2 is not an axis of shape \[2, 3\]"),
        (np.zeros((2, 3)), {"dim": 1.0}, "dim is the number of an axis, not 1.0"),
        (np.zeros((2, 3)), {"dim": [0]}, r"dim is the number of an axis, not \[0\]"),
        (np.zeros((2, 3)), {"out": np.zeros((5, 3))}, r"\[5, 3\].*\[4, 3\]"),
        (np.zeros((2, 3)), {"out": np.zeros((4, 3), np.float32)}, "float32.*float64"),
        ([1, 2], {}, "list"),
    ],
)
def test_refusals(value: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        head(value, **arguments)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("break_after", [0, 3, 11])
async def test_a_broken_link_leaves_nothing_running(algorithm: str, break_after: int) -> None:
    group = group_of(5, algorithm=algorithm, break_after=break_after, segment_bytes=8)

    async def body(rank: int) -> Any:
        request = AllGather(values(rank, (20,)))
        link = Link(group, rank)
        request.prepare(rank, 5, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(5)), return_exceptions=True)
    assert {type(outcome).__name__ for outcome in outcomes} <= {"Broken", "ndarray"}
    assert "Broken" in {type(outcome).__name__ for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
