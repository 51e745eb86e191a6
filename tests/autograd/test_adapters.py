"""`differentiable(comm)`, sync and async, and the awaitable functions."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from autograd_support import leaf
from rank_threads import in_threads
from support import run_ranks
from torch import Tensor

import ruda_async
from ruda_async import AsyncCommunicator, PeerLostError, TensorContractError, autograd, sync, traits
from ruda_async.autograd import BlockedLoopError, CollectiveScope, aio, functions

NAMES = [name for name in traits.__all__ if name.endswith("Collective")]


def test_signatures_are_those_of_the_twin() -> None:
    for name in functions.__all__:
        ours = inspect.signature(getattr(aio, name))
        assert ours == inspect.signature(getattr(functions, name)), name
        assert inspect.iscoroutinefunction(getattr(aio, name)), name


def test_torch_is_not_imported_with_the_library() -> None:
    script = (
        "import sys, ruda_async, ruda_async.sync; assert 'torch' not in sys.modules\n"
        "import ruda_async.autograd, ruda_async.moe; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=55)


@pytest.mark.timeout(30)
def test_satisfies_the_traits() -> None:
    def body(comm: sync.Communicator) -> None:
        wrapped = autograd.differentiable(comm)
        assert autograd.differentiable(wrapped) is wrapped
        for name in NAMES:
            assert isinstance(wrapped, getattr(traits, name)), name
        assert (wrapped.rank, wrapped.world_size, wrapped.autodiff_context) == (0, 1, None)
        assert wrapped.name == comm.name
        with pytest.raises(AttributeError):
            _ = wrapped.no_such_thing
        with pytest.raises(TypeError, match="not a communicator"):
            autograd.differentiable(3)

    in_threads(1, body)


def _train(comm: traits.VariableTensorCollective[Tensor]) -> list[list[float]]:
    """Code that knows the traits only; its gradients."""
    a, b, c, d, e = (leaf(1, 2) for _ in range(5))
    exchanged = comm.all_to_all_v_float(e, [1, 1])
    assert exchanged.receive_counts == (1, 1)
    counts = comm.all_gather_int(torch.tensor([comm.rank]))
    assert counts.tolist() == [0, 1]
    moved = comm.all_to_all_v_int(torch.arange(2), [2, 0] if comm.rank else [0, 2])
    assert moved.receive_counts == ((0, 2) if comm.rank == 0 else (2, 0))
    loss = (
        comm.all_gather_float(a).sum()
        + comm.reduce_scatter_sum(b).sum()
        + comm.all_reduce_sum(c).sum()
        + comm.broadcast_float(d, 1).sum()
        + exchanged.value.sum()
    )
    ((comm.rank + 1) * loss).backward()
    return [x.grad.tolist() for x in (a, b, c, d, e) if x.grad is not None]


def _expected(rank: int) -> list[list[float]]:
    return [[3, 3], [1, 2], [3, 3], [3, 3] if rank == 1 else [0, 0], [1, 2]]


@pytest.mark.timeout(30)
def test_code_written_against_the_traits_trains() -> None:
    def body(comm: sync.Communicator) -> None:
        assert _train(autograd.differentiable(comm)) == _expected(comm.rank)

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_everything_else_passes_through() -> None:
    def body(comm: sync.Communicator) -> None:
        wrapped = autograd.differentiable(comm)
        x = leaf(1, 2)
        assert wrapped.all_reduce(np.ones(2)).tolist() == [2, 2]  # type: ignore[type-var]
        assert wrapped.all_reduce(torch.arange(2), "max").tolist() == [0, 1]
        assert wrapped.gather(x.detach(), 0) is None or comm.rank == 0
        wrapped.barrier()
        assert wrapped.all_gather_object(comm.rank) == [0, 1]
        with pytest.raises(TensorContractError, match="gather has no gradient"):
            wrapped.gather(x, 0)
        with pytest.raises(TensorContractError, match="'max' has no gradient"):
            wrapped.all_reduce(x, "max")
        with torch.no_grad():
            assert wrapped.all_reduce(x, "max").tolist() == [1, 2]
        with pytest.raises(TensorContractError, match="all_gather_int"):
            wrapped.all_gather_float(torch.arange(2))
        group = wrapped.split(0)
        assert group is not None
        for derived in (wrapped.channel("a"), wrapped.bounded(64), group):
            assert derived.all_reduce_mean(x).requires_grad
        assert wrapped.split(None if comm.rank else 0) is None or comm.rank == 0

    in_threads(2, body)


# ---------------------------------------------------------------------- awaited


@pytest.mark.timeout(30)
async def test_async_wrapper(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        wrapped = autograd.differentiable(comm)
        for name in NAMES:
            assert isinstance(wrapped, getattr(traits, name)), name
        a, b, c, d, e = (leaf(1, 2) for _ in range(5))
        exchanged = await wrapped.all_to_all_v_float(e, [1, 1])
        assert (await wrapped.all_gather_int(torch.tensor([comm.rank]))).tolist() == [0, 1]
        loss = (
            (await wrapped.all_gather_float(a)).sum()
            + (await wrapped.reduce_scatter_sum(b)).sum()
            + (await wrapped.all_reduce_sum(c)).sum()
            + (await wrapped.broadcast_float(d, 1)).sum()
            + exchanged.value.sum()
        )
        await autograd.backward((comm.rank + 1) * loss)
        assert [x.grad.tolist() for x in (a, b, c, d, e) if x.grad is not None] == _expected(comm.rank)
        with pytest.raises(TensorContractError, match="no gradient"):
            await wrapped.gather(a, 0)
        group = await wrapped.split(0)
        assert group is not None
        assert (await group.all_reduce_mean(a)).requires_grad

    await run_ranks(2, body, url=url)


@pytest.mark.timeout(30)
async def test_awaited_functions_have_the_same_gradients() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = leaf(1, 2, 3, 4)
        outputs = await asyncio.gather(
            aio.all_gather(comm, x),
            aio.all_gather_dim(comm, x, 0),
            aio.reduce_scatter_sum(comm, x),
            aio.reduce_scatter_mean(comm, x),
            aio.reduce_scatter_dim(comm, x, -1),
            aio.all_reduce_sum(comm, x),
            aio.all_reduce_mean(comm, x),
            aio.broadcast(comm, x, 0),
            aio.all_to_all_dim(comm, x, 0, 0),
            aio.copy_to(comm, x),
            aio.reduce_from(comm, x),
            aio.scatter_to(comm, x),
            aio.gather_from(comm, x),
        )
        await autograd.backward([output.sum() for output in outputs])
        assert x.grad is not None
        of_broadcast = 2 if comm.rank == 0 else 0
        assert x.grad.tolist() == [2 + 2 + 1 + 0.5 + 1 + 2 + 1 + of_broadcast + 1 + 2 + 1 + 1 + 1] * 4
        assert comm.stats()["channels"] == 1

    await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_many_passes_at_once_on_one_loop() -> None:
    """More than an executor has threads, started in another order on each rank."""

    async def body(comm: AsyncCommunicator) -> None:
        inputs = [leaf(1) for _ in range(40)]
        losses = [(await aio.all_reduce_sum(comm, x)).sum() for x in inputs]
        await asyncio.gather(*map(autograd.backward, losses[:: 1 - 2 * comm.rank]))
        assert all(x.grad is not None and x.grad.item() == 2 for x in inputs)

    await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_backward_on_the_loop_is_refused_with_the_way_out() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = leaf(1)
        loss = (await aio.all_reduce_sum(comm, x)).sum()
        with pytest.raises(BlockedLoopError, match=r"await ruda_async\.autograd\.backward"):
            loss.backward()
        y = (await aio.all_reduce_sum(comm, x)).sum()
        await autograd.backward(y)
        assert x.grad is not None

    await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_the_loop_stays_free_and_the_pass_is_elsewhere() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = leaf(1)
        y = await aio.all_reduce_sum(comm, x)
        threads: list[Any] = []
        y.register_hook(lambda gradient: threads.append(threading.current_thread()))
        if comm.rank == 1:
            await comm.channel("gate").barrier()
        waiting = asyncio.ensure_future(autograd.backward(y.sum()))
        if comm.rank == 0:
            await comm.channel("gate").barrier()  # rank 1 enters only after this loop has turned
        await waiting
        assert threads[0] is not threading.current_thread()

    await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_cancelling_a_pass_ends_it_on_all_ranks() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        loss = (await aio.all_reduce_sum(comm, leaf(1))).sum()
        before = threading.active_count()
        if comm.rank == 0:
            waiting = asyncio.ensure_future(autograd.backward(loss))
            while not comm.stats()["in_flight"]:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await comm.channel("gate").barrier()
        else:
            await comm.channel("gate").barrier()
            with pytest.raises(ruda_async.CollectiveCancelledError):
                await autograd.backward(loss)
        assert threading.active_count() <= before + 1
        assert (await comm.all_reduce_sum(torch.ones(1))).item() == 2

    await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_errors_come_out_of_the_awaited_pass() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        loss = (await aio.all_reduce_sum(comm, leaf(1))).sum()
        await comm.barrier()
        if comm.rank == 1:
            comm.abort("test")
            return
        with pytest.raises(PeerLostError) as caught:
            await autograd.backward(loss)
        assert caught.value.rank == 1

    await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_async_scope() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        row, column = await comm.split(comm.rank // 2), await comm.split(comm.rank % 2)
        scopes = [CollectiveScope(), CollectiveScope()]
        row, column = scopes[0].bind(row), scopes[1].bind(column)
        x = leaf(1)
        outer = await aio.all_reduce_sum(row, await aio.all_reduce_sum(column, x))
        for _ in range(600):  # a graph that is walked in more than one stride
            outer = outer + 0
        loss = outer.sum() if comm.rank == 3 else torch.zeros((), dtype=torch.float64)
        await autograd.backward(await aio.complete_scopes(loss, scopes))
        assert x.grad is not None
        assert x.grad.item() == 1
        y = leaf(1)
        output = await aio.all_reduce_sum(row, y)
        single = output.sum() if row.rank else torch.zeros((), dtype=torch.float64)
        await autograd.backward(await scopes[0].complete_async(single))
        assert y.grad is not None
        with pytest.raises(ruda_async.RudaError, match="complete_async"):
            scopes[0].complete(single)

    await run_ranks(4, body)


def test_wrong_kind_of_communicator() -> None:
    def body(comm: sync.Communicator) -> None:
        with pytest.raises(TypeError, match="aio"):
            autograd.all_gather(comm._inner, leaf(1))
        with pytest.raises(TypeError, match="blocking"):
            asyncio.run(aio.all_gather(comm, leaf(1)))

    in_threads(1, body)
