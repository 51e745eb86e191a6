"""Placement and the queue, without processes."""

from __future__ import annotations

import asyncio
import signal
import socket
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from digits_moe import Sizes, load
from hypothesis import given
from hypothesis import strategies as st
from serve_moe.batching import Batcher, RefusedError, Work
from serve_moe.generation import Generation, follow
from serve_moe.placement import Placement
from serve_moe.rank import one_signal_ignored
from serve_moe.turns import AT_ONCE, make_loop
from serve_moe.web import listen

import ruda_async


@given(st.integers(1, 20), st.integers(1, 9))
def test_even_placement_holds_every_expert_once(experts: int, ranks: int) -> None:
    placement = Placement.even(experts, ranks)
    assert [n for held in placement.held for n in held] == list(range(experts))
    assert placement.absent == frozenset()
    assert (len(placement.held[0]) > 0) == (ranks == 1)
    workers = [len(held) for held in placement.held[ranks > 1 :]]
    assert max(workers) - min(workers) <= 1


@given(st.data())
def test_what_is_held_is_owned_and_the_rest_has_some_owner(data: st.DataObject) -> None:
    """After any ranks were lost, in any number."""
    experts, ranks = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9))
    whole = Placement.even(experts, ranks)
    lost = data.draw(st.sets(st.integers(1, ranks - 1))) if ranks > 1 else set()
    left = Placement(experts, tuple(held for rank, held in enumerate(whole.held) if rank not in lost))
    layout = left.layout
    assert layout.experts == experts
    assert all(a <= b for a, b in pairwise(layout.prefix))
    for rank, held in enumerate(left.held):
        assert set(held) <= set(layout.local(rank))
    assert left.absent == {number for rank in lost for number in whole.held[rank]}


def work(rows: int) -> Work:
    return Work(np.full((rows, 64), rows, dtype=np.float32), 5.0)


async def test_batches_are_full_and_in_order() -> None:
    batcher = Batcher(10, 100, linger=0.0)
    works = [work(rows) for rows in (4, 3, 15, 1)]
    for one in works:
        batcher.submit(one)
    found = []
    while batcher.rows:
        batch = await batcher.next()
        found.append([(works.index(piece.work), piece.start, piece.stop) for piece in batch])
    assert found == [[(0, 0, 4), (1, 0, 3), (2, 0, 3)], [(2, 3, 13)], [(2, 13, 15), (3, 0, 1)]]


async def test_a_batch_that_failed_is_the_next_but_for_clients_that_left() -> None:
    batcher = Batcher(4, 100, linger=0.0)
    works = [work(2), work(2), work(3)]
    for one in works:
        batcher.submit(one)
    first = await batcher.next()
    works[0].cancel()
    batcher.put_back(first)
    again = await batcher.next()
    assert [(piece.work, piece.rows) for piece in again] == [(works[1], 2), (works[2], 2)]
    batcher.drop(works[2])
    assert batcher.rows == 0


async def test_a_full_queue_refuses_and_says_for_how_long() -> None:
    batcher = Batcher(4, 10, linger=0.0)
    batcher.submit(work(8))
    with pytest.raises(RefusedError, match="8 rows wait") as caught:
        batcher.submit(work(3))
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    batcher.submit(work(2))
    assert batcher.rows == 10


async def test_a_batch_waits_for_company_until_it_is_full() -> None:
    batcher = Batcher(4, 100, linger=1000.0)
    batcher.submit(work(3))
    waiting = asyncio.ensure_future(batcher.next())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    batcher.submit(work(1))
    assert [piece.rows for piece in await waiting] == [3, 1]
    # Whoever waits alone and leaves takes the wait along.
    one = work(1)
    one.on_cancel = batcher.drop
    batcher.submit(one)
    waiting = asyncio.ensure_future(batcher.next())
    await asyncio.sleep(0)
    one.cancel()
    batcher.submit(work(4))
    assert [piece.rows for piece in await waiting] == [4]


async def test_a_request_ends_with_its_first_error() -> None:
    one = work(4)
    one.deliver(0, np.zeros((3, 10)))
    one.fail(RefusedError(503, "rank_lost", "first"))
    one.fail(RefusedError(500, "internal", "second"))
    one.deliver(3, np.zeros((1, 10)))
    parts = one.parts()
    assert (await anext(parts))[0] == 0
    with pytest.raises(RefusedError, match="first"):
        await anext(parts)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": np.array("another/1")}, "not of the format"),
        ({"sizes": np.array([8, 2, 64])}, "its sizes are"),
        ({"sizes": np.array([8, 9, 64, 64])}, "its sizes are"),
        ({"sizes": np.array([8, 2, 10**9, 10**9])}, "its input.weight is float32"),
        ({"experts.7.up.weight": None}, "it has no experts.7.up.weight"),
        ({"experts.7.up.weight": np.full((64, 64), np.nan, np.float32)}, "not finite"),
        ({"router.weight": np.array(["a"])}, "its router.weight is <U1"),
    ],
)
def test_a_model_of_another_layout_is_no_model(
    change: dict[str, Any], text: str, model: Path, tmp_path: Path
) -> None:
    with np.load(model) as file:
        arrays = {**file, **change}
    path = tmp_path / "other.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=text):
        load(path)


@pytest.mark.parametrize("damage", ["empty", "text", "short", "flipped", "array"])
def test_a_damaged_file_is_no_model(damage: str, model: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "damaged.npz", model.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :]
    path.write_bytes({"empty": b"", "text": b"hello", "short": whole[:half]}.get(damage, flipped))
    if damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"not of the format|damaged"):
        load(path)


@pytest.mark.parametrize("joined", [True, False])
def test_a_worker_ignores_a_signal_only_while_it_is_needed(joined: bool) -> None:
    """One that knocks at a job which is no more ends at once, and does not wait to be killed."""
    came: list[int] = []
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
        with one_signal_ignored(lambda: joined):
            signal.raise_signal(signal.SIGTERM)
            assert came == ([] if joined else [signal.SIGTERM])
            signal.raise_signal(signal.SIGTERM)
            assert came[-1:] == [signal.SIGTERM]
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


async def test_a_worker_forgets_a_batch_when_the_front_says_so() -> None:
    """The exchange alone does not always end it: that where the front was cancelled may be over there."""
    begun, ended = asyncio.Event(), asyncio.Event()

    class Exchange:
        async def run(self, shard: Any, number: int, tokens: Any) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    shard: Any = SimpleNamespace(model=SimpleNamespace(sizes=Sizes(), router=torch.nn.Linear(64, 8)))

    async def rank(number: int) -> None:
        async with ruda_async.connect("memory://forgetting", rank=number, world_size=2) as comm:
            if number:
                assert await follow(Generation(comm, None, shard, Exchange(), None)) is None  # type: ignore[arg-type]
                return
            control = comm.channel("control")
            await control.broadcast_object({"do": "batch", "number": 1}, 0)
            await begun.wait()
            await control.broadcast_object({"do": "forget", "number": 1}, 0)
            await ended.wait()
            await control.broadcast_object({"do": "forget", "number": 1}, 0)  # it has left already
            await control.broadcast_object({"do": "stop"}, 0)

    async with asyncio.timeout(30):
        await asyncio.gather(rank(0), rank(1))


def test_a_turn_of_the_loop_handles_few_sockets_and_leaves_none_out() -> None:
    """Though the first ones are ready again at once."""
    pairs = [socket.socketpair() for _ in range(3 * AT_ONCE)]
    loop = make_loop()
    turns: list[list[int]] = [[]]
    ended = loop.create_future()

    def turn() -> None:
        if len(turns) == 8:
            ended.set_result(None)
        else:
            turns.append([])
            loop.call_soon(turn)

    for number, (ours, theirs) in enumerate(pairs):
        theirs.send(b"x")  # and never read
        loop.add_reader(ours, lambda number=number: turns[-1].append(number))
    loop.call_soon(turn)
    loop.run_until_complete(ended)
    loop.close()
    for pair in pairs:
        for end in pair:
            end.close()
    seen = [number for found in turns[1:7] for number in found]
    assert [len(found) for found in turns[1:6]] == [AT_ONCE] * 5
    assert {seen.count(number) for number in range(len(pairs))} == {2}


def test_answers_are_sent_at_once() -> None:
    """A body that came after its head waited 40 ms for the client to acknowledge that."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
