from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_link import FakeGroup, run_group
from hypothesis import given
from hypothesis import strategies as st
from movement_model import DTYPES, LAYOUTS, Link, assert_same, group_of, run, torch_bits, values
from strict_link import Broken

from ruda_async import ProtocolError, TensorContractError, VariableTensorExchange
from ruda_async.collectives.all_to_all_v import AllToAllV
from ruda_async.collectives.request import decode_fingerprint


def model(inputs: list[Any], counts: list[list[int]]) -> list[Any]:
    size = len(inputs)
    parts = [np.split(value, np.cumsum(row)[:-1]) for value, row in zip(inputs, counts, strict=True)]
    return [np.concatenate([parts[s][r] for s in range(size)]) for r in range(size)]


@given(
    size=st.integers(1, 12),
    trailing=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    budget=st.sampled_from([None, 0, 1, 50]),
    give_out=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_against_split_and_concatenate(
    size: int,
    trailing: tuple[int, ...],
    dtype: str,
    layout: str,
    budget: int | None,
    give_out: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    counts = data.draw(st.lists(row, min_size=size, max_size=size))
    inputs = [values(r + 100 * seed, (sum(counts[r]), *trailing), dtype, layout) for r in range(size)]
    before = [value.tobytes() for value in inputs]
    expected = model(inputs, counts)
    outs = [np.empty(value.shape, value.dtype) if give_out and value.size else None for value in expected]
    row_bytes = inputs[0].itemsize * int(np.prod(trailing, dtype=int))
    max_bytes = None if budget is None else row_bytes + budget
    group = group_of(size, max_bytes=max_bytes, seed=seed)
    results = run(group, lambda rank: AllToAllV(inputs[rank], counts[rank], out=outs[rank]))
    for rank, result in enumerate(results):
        assert type(result) is VariableTensorExchange
        assert_same(result.value, expected[rank])
        assert result.receive_counts == tuple(row[rank] for row in counts)
        assert inputs[rank].tobytes() == before[rank]
        assert not np.shares_memory(result.value, inputs[rank])
        if outs[rank] is not None:
            assert result.value is outs[rank]


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_one_message_a_pair_with_zero_rows_too(size: int) -> None:
    group = group_of(size)
    results = run(group, lambda rank: AllToAllV(np.empty((0, 4), np.float32), [0] * size))
    assert group.messages == size * (size - 1)
    assert group.payload_bytes == 0
    for result in results:
        assert result.value.shape == (0, 4)
        assert result.receive_counts == (0,) * size


def test_idle_ranks_join_all_rounds_of_a_budget() -> None:
    # Rows of 8 bytes, two to a message: rank 0 needs three rounds for its five rows to rank 1.
    counts = [[0, 5, 0], [0, 0, 0], [0, 0, 0]]
    inputs = [values(rank, (sum(row), 2)) for rank, row in enumerate(counts)]
    group = group_of(3, max_bytes=20)
    results = run(group, lambda rank: AllToAllV(inputs[rank], counts[rank]))
    assert_same(results[1].value, inputs[0])
    assert group.largest == 16
    assert group.messages == 6 * (1 + 3)


async def test_over_queues_a_thousand_times_with_an_idle_rank() -> None:
    counts = [[1, 0, 2], [0, 0, 0], [2, 0, 1]]
    inputs = [values(rank, (3 if rank != 1 else 0, 2)) for rank in range(3)]
    expected = model(inputs, counts)
    group = FakeGroup(3)

    async def body(link: Any) -> None:
        for _ in range(1000):
            request = AllToAllV(inputs[link.rank], counts[link.rank])
            request.prepare(link.rank, 3, link.settings)
            result = await request.run(link)
            assert result.value.tobytes() == expected[link.rank].tobytes()

    await run_group(3, body, group)
    assert group.messages == 6000


@pytest.mark.parametrize(
    "convert", [list, tuple, np.array, lambda c: np.array(c, np.uint8), lambda c: [np.int32(n) for n in c]]
)
def test_kinds_of_counts(convert: Any) -> None:
    inputs = [values(rank, (3, 2)) for rank in range(2)]
    results = run(group_of(2), lambda rank: AllToAllV(inputs[rank], convert([1, 2])))
    assert results[0].receive_counts == (1, 1)
    assert_same(results[1].value, model(inputs, [[1, 2], [1, 2]])[1])


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "bool", "uint16", "float32"])
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    width = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2, (3, 4, 6 * width), dtype=torch.uint8, generator=random)
    inputs = list(bits.view(dtype).transpose(1, 2))
    counts = torch.tensor([1, 2, 3])
    carrier = {1: np.uint8, 2: np.uint16, 4: np.uint32}[width]
    plain = [np.frombuffer(torch_bits(value), carrier).reshape(6, 4) for value in inputs]
    results = run(group_of(3), lambda rank: AllToAllV(inputs[rank], counts))
    for rank, wanted in enumerate(model(plain, [[1, 2, 3]] * 3)):
        assert results[rank].value.dtype == dtype
        assert results[rank].receive_counts == (rank + 1,) * 3
        assert torch_bits(results[rank].value) == wanted.tobytes()


def test_in_place() -> None:
    inputs = [values(rank, (4, 2)) for rank in range(2)]
    counts = [[1, 3], [3, 1]]
    expected = model([value.copy() for value in inputs], counts)
    for max_bytes in (None, 8):
        memory = [value.copy() for value in inputs]
        run(
            group_of(2, max_bytes=max_bytes),
            lambda rank: AllToAllV(memory[rank], counts[rank], out=memory[rank]),  # noqa: B023
        )
        for value, wanted in zip(memory, expected, strict=True):
            assert_same(value, wanted)


TABLE = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("value", "counts", "text"),
    [
        (TABLE, [1, 1, 2], r"send_counts=\[1, 1, 2\] sum to 4 and the tensor has 3 rows; counts are rows"),
        (TABLE, [2, 2, 2], "sum to 6"),
        (TABLE, [1, 2], r"send_counts=\[1, 2\] has 2 entries for 3 ranks"),
        (TABLE, [], "has 0 entries for 3 ranks"),
        (TABLE, [-1, 2, 2], r"\[-1, 2, 2\] has a negative count \(-1 for rank 0\)"),
        (TABLE, [True, 1, 1], r"True \(bool\) in it"),
        (TABLE, [1.0, 1, 1], r"1.0 \(float\) in it"),
        (TABLE, np.ones(3), r"1.0 \(float\) in it"),
        (TABLE, np.ones(3, bool), r"True \(bool\) in it"),
        (TABLE, np.ones((3, 1), int), r"\[1\] \(list\) in it"),
        (TABLE, np.int64(3), "send_counts is a sequence of 3 row counts"),
        (TABLE, 3, "send_counts is a sequence of 3 row counts, one for each rank, not 3"),
        (TABLE, None, "not None"),
        (TABLE, "111", r"'1' \(str\) in it"),
        (np.float32(3), [1, 1, 1], r"a scalar \(shape \[\]\) has none; pass value.reshape\(1\)"),
        (np.zeros((3, 0)), [1, 1, 1], r"shape \[0, 0\] has a trailing axis of length 0"),
        (np.zeros((3, 2, 0)), [1, 1, 1], "trailing axis of length 0"),
    ],
)
def test_refusals(value: Any, counts: Any, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        AllToAllV(value, counts).prepare(0, 3, group_of(3).settings)


def test_refusals_of_arguments() -> None:
    settings = group_of(3).settings
    integers = np.zeros((3, 2), np.int32)
    with pytest.raises(TensorContractError, match="int32; use all_to_all_v_int"):
        AllToAllV(integers, [1, 1, 1], kind="float", name="all_to_all_v_float").prepare(0, 3, settings)
    with pytest.raises(TensorContractError, match="float32; use all_to_all_v_float"):
        AllToAllV(TABLE, [1, 1, 1], kind="int", name="all_to_all_v_int").prepare(0, 3, settings)
    with pytest.raises(TensorContractError, match=r"\[3, 3\].*\[3, 2\]"):
        AllToAllV(TABLE, [1, 1, 1], out=np.zeros((3, 3), np.float32)).prepare(0, 3, settings)
    with pytest.raises(TensorContractError, match=r"one row of float32 \[2\] has 8 bytes, .* max_bytes=7"):
        AllToAllV(TABLE, [1, 1, 1]).prepare(0, 3, group_of(3, max_bytes=7).settings)


@pytest.mark.parametrize("max_bytes", [None, 8])
async def test_an_out_of_another_length_than_was_received(max_bytes: int | None) -> None:
    group = group_of(2, max_bytes=max_bytes)

    async def body(rank: int) -> Any:
        request = AllToAllV(TABLE, [1, 2], out=np.zeros((3, 2), np.float32) if rank == 1 else None)
        request.prepare(rank, 2, group.settings)
        return await request.run(Link(group, rank))

    other = asyncio.ensure_future(body(0))
    text = r"out has 3 rows and 4 were received \(\[2, 2\] from the ranks in turn\); .* shape \[4, 2\]"
    with pytest.raises(TensorContractError, match=text):
        await body(1)
    other.cancel()


async def test_a_message_that_is_no_whole_number_of_rows() -> None:
    group = group_of(2)
    sent = Link(group, 0).send(1, memoryview(bytes(12)))
    request = AllToAllV(TABLE, [1, 2])
    request.prepare(1, 2, group.settings)
    with pytest.raises(ProtocolError, match=r"rank 0 sent 12 bytes .* no whole number of rows of 8"):
        await request.run(Link(group, 1))
    assert not sent.done()  # type: ignore[attr-defined]


def test_the_fingerprint_has_the_trailing_shape_alone() -> None:
    settings = group_of(3).settings
    heads = {AllToAllV(np.zeros((n, 2)), [n, 0, 0]).prepare(0, 3, settings) for n in range(4)}
    floating = AllToAllV(np.zeros((1, 2)), [1, 0, 0], kind="float", name="all_to_all_v_float")
    heads.add(floating.prepare(0, 3, settings))
    assert [decode_fingerprint(head) for head in heads] == [("all_to_all_v", "float64", (2,), ())]


@pytest.mark.parametrize("max_bytes", [None, 8])
@pytest.mark.parametrize("break_after", [0, 4, 12])
async def test_a_broken_link_leaves_nothing_running(max_bytes: int | None, break_after: int) -> None:
    group = group_of(5, max_bytes=max_bytes, break_after=break_after)

    async def body(rank: int) -> Any:
        request = AllToAllV(values(rank, (10, 2)), [2] * 5)
        link = Link(group, rank)
        request.prepare(rank, 5, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(5)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Broken, VariableTensorExchange}
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
