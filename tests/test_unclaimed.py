"""Receives that are cancelled in the moment in which their message has come: the next one gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import run_ranks

from ruda_async import AsyncCommunicator, TensorContractError
from ruda_async.collectives.request import fingerprint

torch = pytest.importorskip("torch")

Cancel = Callable[[], object]


def cancel_when_received(comm: AsyncCommunicator, cancel: Cancel) -> None:
    """Call `cancel` once, when the next receive is filled and before anybody can go on with that."""
    transport: Any = comm.node.transport
    recv_into = transport.recv_into

    def receive(*args: Any) -> Any:
        transport.recv_into = recv_into
        receiving = asyncio.ensure_future(recv_into(*args))
        receiving.add_done_callback(lambda _: cancel())
        return receiving

    transport.recv_into = receive


def cancel_one_turn_after_posting(comm: AsyncCommunicator, cancel: Cancel) -> None:
    """Call `cancel` once, in the turn of the loop after the next receive was posted."""
    transport: Any = comm.node.transport
    recv_into = transport.recv_into

    def receive(*args: Any) -> Any:
        transport.recv_into = recv_into
        asyncio.get_running_loop().call_soon(cancel)
        return recv_into(*args)

    transport.recv_into = receive


async def received(comm: AsyncCommunicator, any_source: bool, **options: Any) -> Any:
    return (await comm.recv_any(**options))[0] if any_source else await comm.recv(0, **options)


@pytest.mark.parametrize("moment", [cancel_when_received, cancel_one_turn_after_posting])
@pytest.mark.parametrize("any_source", [False, True])
@pytest.mark.parametrize("count", [1, 200_000])
async def test_cancelled_receives_lose_nothing(
    url: str, moment: Callable[[AsyncCommunicator, Cancel], None], any_source: bool, count: int
) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for number in range(40):
            if comm.rank == 0:
                await comm.send(np.full(count, float(number)), 1)
                continue
            task = asyncio.ensure_future(received(comm, any_source))
            moment(comm, task.cancel)
            await asyncio.wait((task,))
            got = await received(comm, any_source) if task.cancelled() else task.result()
            assert got.shape == (count,)
            assert (got == number).all()

    await run_ranks(2, body, url=url)


@pytest.mark.parametrize("before", [None, "numpy", "torch"])
@pytest.mark.parametrize("after", ["numpy", "torch", "out", "any"])
async def test_the_next_receive_says_what_it_becomes(before: str | None, after: str) -> None:
    """Kind and `out` are those of the receive that gets it; what was the other's `out` is the caller's."""
    outs = {"numpy": np.zeros(5, np.int32), "torch": torch.zeros(5, dtype=torch.int32), None: None}

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            await comm.send(np.arange(5, dtype=np.int32), 1)
            await comm.send(np.full(2, 9.0), 1)
            return
        first = outs[before]
        task = asyncio.ensure_future(comm.recv(0, out=first))
        cancel_when_received(comm, task.cancel)
        await asyncio.wait((task,))
        assert task.cancelled()
        if first is not None:
            first[:] = 77
        with pytest.raises(TensorContractError, match="out="):  # and this one leaves it, too
            await comm.recv(0, out=np.zeros(4, np.int32))
        out = np.zeros(10, np.int32)[::2]
        options = {"torch": {"like": torch.zeros(0)}, "out": {"out": out}}.get(after, {})
        got = await received(comm, after == "any", **options)
        assert torch.is_tensor(got) is (after == "torch")
        assert (got is out) is (after == "out")
        assert [int(x) for x in got] == [0, 1, 2, 3, 4]
        assert (await comm.recv(0) == 9.0).all()

    await run_ranks(2, body)


@pytest.mark.parametrize("count", [6, 600_000])
async def test_a_receive_refused_for_its_out_leaves_the_message(url: str, count: int) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            await comm.send(np.arange(count), 1)
            return
        for out in (np.zeros(count + 1, int), np.zeros(count, np.float32), np.zeros((2, count // 2), int)):
            with pytest.raises(TensorContractError, match="out="):
                await comm.recv(0, out=out)
            with pytest.raises(TensorContractError, match="out="):
                await comm.recv_any(out=out)
        assert (await comm.recv(0) == np.arange(count)).all()

    await run_ranks(2, body, url=url)


async def test_a_turn_of_receive_from_any_comes_back_though_it_is_cancelled_twice() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            await comm.send(np.full(3, 4.0), 1)
        await comm.barrier()
        if comm.rank != 1:
            return
        for turns in range(8):
            task = asyncio.ensure_future(comm.recv_any(out=np.zeros(1)))  # too small, if it gets so far
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled() or isinstance(task.exception(), TensorContractError)
        assert (await comm.recv(0, timeout=5) == 4.0).all()

    await run_ranks(3, body)


async def test_another_message_in_the_place_of_one_that_came_and_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe that had to wait says what came, not what is there when its task goes on."""
    transports: dict[int, Any] = {}
    head = fingerprint("send", "float64", (600_000,))
    large = memoryview(np.zeros(600_000)).cast("B")
    going: list[Any] = []

    async def body(comm: AsyncCommunicator) -> None:
        transports[comm.rank] = transport = comm.node.transport
        await comm.barrier()
        if comm.rank == 0:
            await comm.barrier()
            await comm.send(np.full(7, 2.0), 1)
            return
        probe = transport.probe

        def probing(peer: int, tag: int) -> Any:
            if not going:
                going.append(transports[0].send(1, tag, (large,), head))
            elif len(going) == 1:
                going[0].cancel()
                going.append(None)
                asyncio.get_running_loop().call_soon(come_and_go, tag)
            return probe(peer, tag)

        def come_and_go(tag: int) -> None:
            going[1] = transports[0].send(1, tag, (large,), head)
            going[1].cancel()

        with monkeypatch.context() as patch:
            patch.setattr(transport, "probe", probing)
            receiving = asyncio.ensure_future(comm.recv(0))
            while len(going) < 2 or going[1] is None:
                await asyncio.sleep(0)
            await comm.barrier()
            assert (await receiving == 2.0).all()

    await run_ranks(2, body)
