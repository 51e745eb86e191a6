from __future__ import annotations

import asyncio
import datetime
import enum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import Link, group_of, run
from strict_link import Broken
from support import counting_turns

from ruda_async import ProtocolError, TensorContractError
from ruda_async.collectives import objects
from ruda_async.collectives.objects import AllGatherObject, BroadcastObject, GatherObject, decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
keys = st.text(max_size=3) | st.integers(-(2**63), 2**64 - 1)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all through: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return repr(a) == repr(b)


@given(
    values=st.lists(anything, min_size=1, max_size=12),
    root=st.integers(0, 11),
    max_bytes=st.sampled_from([None, 1, 7, 64]),
    seed=st.integers(0, 99),
)
def test_objects_come_out_as_they_went_in(
    values: list[Any], root: int, max_bytes: int | None, seed: int
) -> None:
    size = len(values)
    root %= size

    def group() -> Any:
        return group_of(size, max_bytes=max_bytes, seed=seed)

    for result in run(group(), lambda rank: BroadcastObject(values[rank], root)):
        assert same(result, values[root])
    gathered = run(group(), lambda rank: GatherObject(values[rank], root))
    assert same(gathered, [values if rank == root else None for rank in range(size)])
    for result in run(group(), lambda rank: AllGatherObject(values[rank])):
        assert same(result, values)


@pytest.mark.parametrize("size", [1, 3])
def test_results_are_new_objects(size: int) -> None:
    value = {"a": [1]}
    for result in run(group_of(size), lambda rank: BroadcastObject(value, 0)):
        assert result == value
        assert result is not value
        assert result["a"] is not value["a"]


@pytest.mark.parametrize("operation", [BroadcastObject, GatherObject])
async def test_nobody_is_done_while_one_rank_is_missing(operation: Any) -> None:
    group = group_of(6)
    gate = asyncio.Event()
    done: list[int] = []

    async def body(rank: int) -> None:
        request = operation("text", 1)
        request.prepare(rank, 6, group.settings)
        if rank == 4:
            await gate.wait()
        await request.run(Link(group, rank))
        done.append(rank)

    running = asyncio.gather(*(body(rank) for rank in range(6)))
    for _ in range(300):
        await asyncio.sleep(0)
    assert not done
    gate.set()
    await running


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


loop: list[Any] = []
loop.append(loop)
wide_loop: dict[str, Any] = {}
wide_loop.update({"a": wide_loop, "b": wide_loop})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, 2), "type tuple cannot be sent; accepted are None, bool, .*; make it a list"),
        ([{"a": (1,)}], "type tuple"),
        ({1, 2}, "type set .* make it a sorted list"),
        (frozenset({1}), "type frozenset"),
        (bytearray(b"x"), "type bytearray .* make it bytes"),
        (memoryview(b"x"), "type memoryview"),
        (object(), "type object cannot be sent"),
        (1j, "type complex"),
        (np.float64(1), r"type numpy.float64 .* use .item\(\)"),
        (np.zeros(2), r"type numpy.ndarray .* or a tensor collective"),
        (datetime.datetime.now(), "type datetime.datetime"),
        (Color.RED, "type .*Color cannot be sent"),
        (Text("x"), "type .*Text cannot be sent"),
        ({1.5: 0}, "key 1.5 of type float; keys are str or int"),
        ({None: 0}, "key None of type NoneType"),
        ({True: 0}, "key True of type bool"),
        ({b"x": 0}, "key b'x' of type bytes"),
        ({(1, 2): 0}, "type tuple; keys are"),
        (2**64, "an integer of 65 bits does not fit into 64; pass a str or bytes"),
        ([-(2**63) - 1], "does not fit into 64"),
        ({2**70: 1}, "an integer of 71 bits"),
        ("\ud800", "a lone surrogate at position 0, which is no Unicode text"),
        ({"a\udfff": 1}, "position 1"),
        (loop, "nested more than 128 levels or contains itself"),
        (wide_loop, "nested more than 128 levels"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_refused(value: Any, text: str, rank: int) -> None:
    settings = group_of(2).settings
    for request in (BroadcastObject(value, 0), GatherObject(value, 0), AllGatherObject(value)):
        with pytest.raises(TensorContractError, match=f"{request.operation}: .*{text}"):
            request.prepare(rank, 2, settings)


@pytest.mark.parametrize("operation", [BroadcastObject, GatherObject])
def test_roots_that_are_none(operation: Any) -> None:
    with pytest.raises(TensorContractError, match=r"_object: root=2 is not a rank .* 0 to 1"):
        operation(1, 2).prepare(0, 2, group_of(2).settings)


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_OBJECT", 100)
    encode("gather_object", bytes(98))
    with pytest.raises(TensorContractError, match=r"gather_object: the object takes 101 bytes .* 100"):
        encode("gather_object", bytes(99))


@pytest.mark.parametrize("operation", ["broadcast", "gather", "all_gather"])
@pytest.mark.parametrize("max_bytes", [None, 64])
async def test_a_peer_that_announces_too_much(
    monkeypatch: pytest.MonkeyPatch, operation: str, max_bytes: int | None
) -> None:
    group = group_of(2, max_bytes=max_bytes)
    requests: list[Any] = {
        "broadcast": [BroadcastObject(bytes(200), 0), BroadcastObject(None, 0)],
        "gather": [GatherObject(bytes(200), 1), GatherObject(None, 1)],
        "all_gather": [AllGatherObject(bytes(200)), AllGatherObject(None)],
    }[operation]
    for rank in range(2):
        requests[rank].prepare(rank, 2, group.settings)
    monkeypatch.setattr(objects, "MAX_OBJECT", 100)
    other = asyncio.ensure_future(requests[0].run(Link(group, 0)))
    with pytest.raises(ProtocolError, match=r"rank 0 announced .*more than .*100") as info:
        await requests[1].run(Link(group, 1))
    assert info.value.rank == 0
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x01\x02",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xa1\xff",
        b"\x91" * 5000 + b"\xc0",
        b"\x91" * 200 + b"\xc0",
        b"\x81\xc0\x01",
        b"\x81\x90\x01",
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
    ],
)
async def test_bytes_that_are_no_object(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"rank 3 sent \d+ bytes that are no object") as info:
        await decode(memoryview(data), 3)
    assert info.value.rank == 3


async def test_large_objects_are_decoded_beside_the_loop() -> None:
    value = {"weights": bytes(2 * 1024 * 1024), "n": 7}
    async with counting_turns() as turns:
        await asyncio.sleep(0)
        before = turns()
        assert await decode(encode("broadcast_object", value), 0) == value
        assert turns() > before


@pytest.mark.parametrize("break_after", [0, 4, 9])
async def test_a_broken_link_leaves_nothing_running(break_after: int) -> None:
    for make in (lambda: BroadcastObject(1, 0), lambda: GatherObject(1, 0), lambda: AllGatherObject(1)):
        group = group_of(6, break_after=break_after)

        async def body(rank: int, request: Any) -> Any:
            request.prepare(rank, 6, group.settings)  # noqa: B023
            return await request.run(Link(group, rank))  # noqa: B023

        outcomes = await asyncio.gather(*(body(rank, make()) for rank in range(6)), return_exceptions=True)
        assert Broken in {type(outcome) for outcome in outcomes}
        assert not any(isinstance(o, BaseException) and type(o) is not Broken for o in outcomes)
        assert asyncio.all_tasks() == {asyncio.current_task()}
