"""Cutting, pairing and checking, apart from any family."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import Link, group_of, run_links
from strict_link import Broken

from ruda_async import ProtocolError, TensorContractError
from ruda_async.collectives.messages import (
    cut,
    pairwise,
    receive_bytes,
    same_memory,
    scratch,
    send_bytes,
    separate,
    split,
    uneven,
)
from ruda_async.collectives.movement import axis_of, check_kind, check_root


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 12))
def test_cuts_lie_at_the_same_places_however_the_bytes_are_split(lengths: list[int], limit: int) -> None:
    total = sum(lengths)
    data = memoryview(bytes(range(total)))
    messages = [b"".join(message) for message in cut(split(data, lengths), limit)]
    assert messages == [b"".join(message) for message in cut((data,), limit)]
    assert b"".join(messages) == bytes(data)
    assert len(messages) == max(-(-total // limit), 1)
    assert all(len(message) <= limit for message in messages)


@given(
    st.integers(1, 12),
    st.sampled_from([None, 1, 3, 7]),
    st.integers(0, 1000),
    st.data(),
)
def test_pairwise_of_any_lengths(size: int, max_bytes: int | None, seed: int, data: st.DataObject) -> None:
    length = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    lengths = data.draw(st.lists(length, min_size=size, max_size=size))
    blocks = [
        [memoryview(bytes([16 * a + b % 16] * n)) for b, n in enumerate(row)] for a, row in enumerate(lengths)
    ]

    async def body(link: Link) -> list[bytes]:
        incoming = [scratch(lengths[peer][link.rank]) for peer in range(size)]
        own = (incoming[link.rank], blocks[link.rank][link.rank])
        await pairwise(link, blocks[link.rank], incoming, own)
        return [bytes(block) for block in incoming]

    results = asyncio.run(run_links(group_of(size, max_bytes=max_bytes, seed=seed), body))
    for rank, received in enumerate(results):
        assert received == [bytes(blocks[peer][rank]) for peer in range(size)]


async def test_pairwise_posts_only_a_few_large_messages_at_once() -> None:
    group = group_of(40)
    deepest = 0

    async def body(link: Link) -> None:
        nonlocal deepest
        blocks = [scratch(8)] * 40
        future = group.future

        def watch() -> Any:
            nonlocal deepest
            deepest = max(deepest, len(group.pending))
            return future()

        group.future = watch  # type: ignore[method-assign]
        await pairwise(link, blocks, [scratch(8) for _ in blocks])

    await run_links(group, body)
    assert deepest <= 40 * 2 * 8


@given(st.binary(max_size=40), st.sampled_from([None, 1, 5, 64]))
def test_bytes_of_unknown_length(data: bytes, max_bytes: int | None) -> None:
    async def body(link: Link) -> bytes | None:
        if link.rank == 0:
            await send_bytes(link, 1, memoryview(data))
            return None
        return bytes(await receive_bytes(link, 0, 40))

    assert asyncio.run(run_links(group_of(2, max_bytes=max_bytes), body)) == [None, data]


@pytest.mark.parametrize("max_bytes", [None, 16])
async def test_more_bytes_than_allowed_are_refused_before_room_is_made(max_bytes: int | None) -> None:
    group = group_of(2, max_bytes=max_bytes)
    sending = asyncio.ensure_future(send_bytes(Link(group, 0), 1, memoryview(bytes(41))))
    with pytest.raises(ProtocolError, match=r"rank 0 announced 41 bytes .* more than the 40 allowed") as info:
        await receive_bytes(Link(group, 1), 0, 40)
    assert info.value.rank == 0
    sending.cancel()


async def test_a_length_that_is_no_whole_number_of_rows() -> None:
    group = group_of(2)
    sent = Link(group, 0).send(1, memoryview(bytes(10)))
    blocks = [memoryview(b"")] * 2
    with pytest.raises(ProtocolError, match=r"rank 0 sent 10 bytes to rank 1, .* rows of 4"):
        await uneven(Link(group, 1), blocks, 4, lambda lengths: scratch(sum(lengths)))
    assert not sent.done()  # type: ignore[attr-defined]


async def test_separate_copies_only_what_overlaps() -> None:
    link = Link(group_of(1), 0)
    memory = np.arange(64, dtype=np.uint8)
    view = memory.data
    assert await separate(link, view[:32], view[32:]) is not None
    untouched = view[:32]
    assert await separate(link, untouched, view[32:]) is untouched
    copied = await separate(link, view[:33], view[32:])
    memory[32] = 99
    assert bytes(copied) == bytes(range(33))
    assert same_memory(view[3:5], view[3:5])
    assert not same_memory(view[3:5], view[3:6])


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "text"),
    [
        ("all_gather_float", "float", "int64", "this one is int64; use all_gather_int"),
        ("all_gather_float", "float", "bool", "this one is bool; use all_gather_int"),
        ("all_gather_int", "int", "bfloat16", "this one is bfloat16; use all_gather_float"),
        ("all_to_all_v_int", "int", "float8_e5m2", "this one is float8_e5m2; use all_to_all_v_float"),
        ("broadcast_float", "float", "uint8", "this one is uint8; use broadcast,"),
    ],
)
def test_kinds(name: str, kind: str, dtype: str, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        check_kind(name, kind, dtype)
    check_kind(name, None, dtype)
    check_kind(name, "int" if kind == "float" else "float", dtype)


@pytest.mark.parametrize("root", [-1, 4, True, 1.0, "0", None])
def test_roots_that_are_none(root: Any) -> None:
    with pytest.raises(TensorContractError, match=r"gather: root.*0 to 3"):
        check_root("gather", root, 4)


def test_roots_and_axes_of_numpy() -> None:
    assert check_root("gather", np.int64(3), 4) == 3
    assert axis_of("all_gather_dim", "dim", np.int8(-1), (2, 3)) == 1
    for dim in (2, -3, 1.0, True, "x"):
        with pytest.raises(TensorContractError, match="dim"):
            axis_of("all_gather_dim", "dim", dim, (2, 3))


@pytest.mark.parametrize("break_after", [0, 1, 5, 20])
async def test_the_error_of_a_broken_link_comes_out_as_it_is(break_after: int) -> None:
    group = group_of(12, break_after=break_after)
    blocks = [memoryview(bytes(4))] * 12
    bodies = [pairwise(Link(group, rank), blocks, [scratch(4) for _ in blocks]) for rank in range(12)]
    outcomes = await asyncio.gather(*bodies, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Broken, type(None)}
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
