from __future__ import annotations

import asyncio
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import DTYPES, LAYOUTS, Link, assert_same, group_of, run, torch_bits, values
from strict_link import Broken

from ruda_async import ProtocolError, TensorContractError, VariableTensorExchange
from ruda_async.collectives.all_gather_v import AllGatherV, gather_blocks
from ruda_async.collectives.messages import scratch
from ruda_async.collectives.request import decode_fingerprint

ALGORITHMS = ("direct", "ring")


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    algorithm=st.sampled_from((None, *ALGORITHMS)),
    trailing=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    max_bytes=st.sampled_from([None, 1, 5, 64]),
    segment=st.sampled_from([1, 7, 4096]),
    give_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_concatenation(
    lengths: list[int],
    algorithm: str | None,
    trailing: tuple[int, ...],
    dtype: str,
    layout: str,
    max_bytes: int | None,
    segment: int,
    give_out: bool,
    seed: int,
) -> None:
    size = len(lengths)
    shards = [values(r + 100 * seed, (length, *trailing), dtype, layout) for r, length in enumerate(lengths)]
    before = [shard.tobytes() for shard in shards]
    expected = np.concatenate(shards)
    give_out = give_out and expected.size > 0
    outs = [np.empty(expected.shape, expected.dtype) if give_out else None for _ in shards]
    group = group_of(size, algorithm=algorithm, max_bytes=max_bytes, segment_bytes=segment, seed=seed)
    results = run(group, lambda rank: AllGatherV(shards[rank], out=outs[rank]))
    for shard, result, out, bits in zip(shards, results, outs, before, strict=True):
        assert type(result) is VariableTensorExchange
        assert_same(result.value, expected)
        assert result.receive_counts == tuple(lengths)
        assert shard.tobytes() == bits
        assert not np.shares_memory(result.value, shard)
        if give_out:
            assert result.value is out


@pytest.mark.parametrize("size", range(1, 10))
def test_counts_of_messages(size: int) -> None:
    def count(algorithm: str) -> int:
        group = group_of(size, algorithm=algorithm)
        run(group, lambda rank: AllGatherV(values(rank, (rank, 2))))
        return group.messages

    rounds = ceil(log2(size)) if size > 1 else 0
    assert count("direct") == size * (size - 1)
    assert count("ring") == size * rounds + size * (size - 1)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "bool", "uint16"])
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    width = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2, (3, 5, 3 * width), dtype=torch.uint8, generator=random)
    shards = [bits.view(dtype)[rank, ::2][rank:] for rank in range(3)]
    for result in run(group_of(3), lambda rank: AllGatherV(shards[rank])):
        assert result.value.dtype == dtype
        assert result.receive_counts == (3, 2, 1)
        assert torch_bits(result.value) == b"".join(torch_bits(shard) for shard in shards)


def test_out_may_hold_the_input() -> None:
    lengths = [1, 2, 3]
    shards = [values(rank, (length, 2)) for rank, length in enumerate(lengths)]
    for algorithm in ALGORITHMS:
        outs = [values(9, (6, 2)) for _ in lengths]
        for out, shard in zip(outs, shards, strict=True):
            out[: len(shard)] = shard
        run(
            group_of(3, algorithm=algorithm),
            lambda rank: AllGatherV(outs[rank][: lengths[rank]], out=outs[rank]),  # noqa: B023
        )
        for out in outs:
            assert_same(out, np.concatenate(shards))


@pytest.mark.parametrize(
    ("value", "arguments", "text"),
    [
        (np.float32(1), {}, "all_gather_v works along the leading axis"),
        (np.zeros((2, 0)), {}, "trailing axis of length 0"),
        (np.zeros((2, 3)), {"out": np.zeros((4, 2))}, r"\[4, 2\].*\[4, 3\]"),
        (np.zeros((2, 3)), {"kind": "int", "name": "all_gather_v_int"}, "float64; use all_gather_v_float"),
        (3, {}, "int"),
    ],
)
def test_refusals(value: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        AllGatherV(value, **arguments).prepare(0, 3, group_of(3).settings)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_an_out_of_another_length(algorithm: str) -> None:
    group = group_of(2, algorithm=algorithm)

    async def body(rank: int) -> Any:
        request = AllGatherV(values(rank, (2,)), out=np.zeros(5, np.float32) if rank else None)
        request.prepare(rank, 2, group.settings)
        return await request.run(Link(group, rank))

    other = asyncio.ensure_future(body(0))
    with pytest.raises(TensorContractError, match=r"out has 5 rows and 4 were received \(\[2, 2\]"):
        await body(1)
    other.cancel()


async def test_an_announced_length_that_is_no_whole_number_of_rows() -> None:
    group = group_of(2)

    async def place(lengths: list[int]) -> memoryview:
        return scratch(sum(lengths))

    bodies = [gather_blocks(Link(group, rank), memoryview(bytes(10)), 4, "ring", place) for rank in range(2)]
    for outcome in await asyncio.gather(*bodies, return_exceptions=True):
        assert isinstance(outcome, ProtocolError)
        assert "announced 10 bytes, which is no whole number of rows of 4" in str(outcome)


def test_the_fingerprint_has_the_trailing_shape_alone() -> None:
    settings = group_of(3).settings
    heads = {AllGatherV(np.zeros((n, 2))).prepare(0, 3, settings) for n in range(4)}
    assert [decode_fingerprint(head) for head in heads] == [("all_gather_v", "float64", (2,), ())]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("break_after", [0, 4, 12])
async def test_a_broken_link_leaves_nothing_running(algorithm: str, break_after: int) -> None:
    group = group_of(5, algorithm=algorithm, break_after=break_after)

    async def body(rank: int) -> Any:
        request = AllGatherV(values(rank, (rank, 2)))
        link = Link(group, rank)
        request.prepare(rank, 5, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(5)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Broken, VariableTensorExchange}
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
