"""A backward pass that raises on one rank ends at once on all, and communicators go on to work."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from autograd_support import leaf
from rank_threads import in_threads
from support import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    PeerLostError,
    RudaError,
    TensorContractError,
    autograd,
    sync,
)

# Deadlines are far away: what ends within a test was told.


def _fail(*_: Any) -> None:
    raise ArithmeticError("a hook that fails")


def _fails(comm: sync.Communicator | AsyncCommunicator, run: Callable[[], object], culprit: int) -> None:
    """`run` raises the hook's error on rank `culprit`, and one that names both on the others.

    They may have it from each other.
    """
    if comm.rank == culprit:
        with pytest.raises(ArithmeticError, match="a hook that fails"):
            run()
        return
    with pytest.raises(TensorContractError, match=f"rank {culprit} refused .* a hook that fails") as caught:
        run()
    assert caught.value.rank not in (None, comm.rank)


def _guarded(loss: Tensor, **options: Any) -> None:
    with autograd.abandon_on_error(loss):
        loss.backward(**options)


def _chain(comm: Any, x: Tensor) -> list[Tensor]:
    """The loss of four collectives, one on the other, and what is between them."""
    a = autograd.all_gather(comm, x * x)
    b = autograd.reduce_scatter_sum(comm, a.sin())
    c = autograd.all_to_all_v(comm, b, [len(b)] + [0] * (comm.world_size - 1)).value
    d = autograd.all_reduce_sum(comm, c.sum() + 0 * b.sum())
    return [d.exp().sum(), d, c, b, a, x]


def _expected(world_size: int) -> list[Tensor]:
    """The gradients of all ranks' `_chain`, in one process."""
    shards = [leaf(0.1 * rank + 0.1, 0.2) for rank in range(world_size)]
    a = torch.cat([x * x for x in shards])
    parts = (a.sin() * world_size).view(world_size, 2)
    # All rows go to rank 0, whose sum is that of all.
    (parts.sum().exp() * world_size).backward()
    return [x.grad for x in shards if x.grad is not None]


@pytest.mark.timeout(40)
@pytest.mark.parametrize("place", range(6), ids=["loss", "4th", "3rd", "2nd", "1st", "leaf"])
def test_the_others_hear_of_it_wherever_it_was(url: str, place: int) -> None:
    def body(comm: sync.Communicator) -> None:
        for step in range(3):
            x = leaf(0.1 * comm.rank + 0.1, 0.2)
            values = _chain(comm, x)
            if step % 2:
                _guarded(values[0])
                torch.testing.assert_close(x.grad, _expected(3)[comm.rank], rtol=1e-12, atol=0)
                continue
            if comm.rank == 1:
                values[place].register_hook(_fail)
            if place == 5 and comm.rank != 1:  # all exchanges are over
                _guarded(values[0])
            else:
                _fails(comm, lambda loss=values[0]: _guarded(loss), 1)  # type: ignore[misc]
        comm.barrier()
        assert comm.stats()["channels"] == 1
        assert comm.stats()["in_flight"] == 0

    in_threads(3, body, url, timeout=60)


@pytest.mark.timeout(30)
def test_a_rank_that_comes_later_hears_of_it_too() -> None:
    failed = threading.Event()

    def body(comm: sync.Communicator) -> None:
        values = _chain(comm, leaf(0.1, 0.2))
        values[1].register_hook(_fail if comm.rank == 1 else lambda gradient: failed.wait(20) and None)

        def run() -> None:
            try:
                _guarded(values[0])
            finally:
                if comm.rank == 1:
                    failed.set()

        _fails(comm, run, 1)

    in_threads(2, body, timeout=60)


@pytest.mark.timeout(30)
def test_what_is_raised_before_the_pass_begins_counts() -> None:
    def body(comm: sync.Communicator) -> None:
        loss = _chain(comm, leaf(0.1, 0.2))[0]

        def run() -> None:
            with autograd.abandon_on_error(loss):
                if comm.rank == 0:
                    raise ArithmeticError("a hook that fails, or a check of the loss")
                loss.backward()

        _fails(comm, run, 0)
        assert comm.all_reduce_sum(torch.ones(1)).item() == 2

    in_threads(2, body, timeout=60)


@pytest.mark.timeout(30)
def test_the_graph_can_be_walked_again_where_it_was_retained() -> None:
    """Each run of a node has a number; all ranks count the failed one, however far they had come."""

    def body(comm: sync.Communicator) -> None:
        x = leaf(0.1 * comm.rank + 0.1, 0.2)
        values = _chain(comm, x)
        for place in (1, 4, 2):
            handle = values[place].register_hook(_fail) if comm.rank == place % 3 else None
            _fails(comm, lambda: _guarded(values[0], retain_graph=True), place % 3)
            if handle is not None:
                handle.remove()
            x.grad = None
        _guarded(values[0], retain_graph=True)
        _guarded(values[0])
        torch.testing.assert_close(x.grad, 2 * _expected(3)[comm.rank], rtol=1e-12, atol=0)

    in_threads(3, body, timeout=60)


@pytest.mark.timeout(30)
def test_blocks_in_blocks_tell_once() -> None:
    def body(comm: sync.Communicator) -> None:
        x = leaf(0.1 * comm.rank + 0.1, 0.2)
        values = _chain(comm, x)
        handle = values[2].register_hook(_fail) if comm.rank == 1 else None

        def run() -> None:
            if comm.rank == 1:
                with autograd.abandon_on_error(values[0], values[1]):
                    _guarded(values[0], retain_graph=True)
            else:
                _guarded(values[0], retain_graph=True)

        _fails(comm, run, 1)
        if handle is not None:
            handle.remove()
        x.grad = None
        _guarded(values[0])
        torch.testing.assert_close(x.grad, _expected(2)[comm.rank], rtol=1e-12, atol=0)

    in_threads(2, body, timeout=60)


@pytest.mark.timeout(30)
def test_a_second_derivative_that_fails() -> None:
    def body(comm: sync.Communicator) -> None:
        for culprit in (1, None, 0):
            x = leaf(0.5 + comm.rank)
            y = autograd.all_reduce_sum(comm, x.pow(3))
            (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
            if comm.rank == culprit:
                y.register_hook(_fail)
            loss = first.pow(2).sum()
            if culprit is not None:
                _fails(comm, lambda loss=loss: _guarded(loss), culprit)  # type: ignore[misc]
                continue
            _guarded(loss)
            both = [leaf(0.5), leaf(1.5)]
            total = 2 * sum(v.pow(3) for v in both).pow(2).sum()  # type: ignore[union-attr]
            grads = torch.autograd.grad(total, both, create_graph=True)
            sum(g.pow(2).sum() for g in grads).backward()  # type: ignore[union-attr]
            torch.testing.assert_close(x.grad, both[comm.rank].grad, rtol=1e-12, atol=0)
        comm.barrier()
        assert comm.stats()["channels"] == 1

    in_threads(2, body, timeout=60)


@pytest.mark.timeout(30)
def test_a_call_that_waits_for_its_turn() -> None:
    """Under a scope a blocking call is begun where it is waited for: at its first node nothing is sent."""

    def body(comm: sync.Communicator) -> None:
        for _ in range(2):
            scope = autograd.CollectiveScope()
            wrapped = scope.bind(comm)
            x = leaf(0.5 + comm.rank)
            y = wrapped.all_reduce_sum(x * x)
            if comm.rank == 1:
                entry: Any = y.grad_fn.next_functions[0][0]
                entry.register_prehook(_fail)
            loss = scope.complete(y.sum())
            _fails(comm, lambda loss=loss: _guarded(loss), 1)  # type: ignore[misc]
            scope.unbind()
        comm.barrier()
        assert comm.stats()["channels"] == 1

    in_threads(2, body, timeout=60)


@pytest.mark.timeout(30)
def test_a_loss_that_was_completed_by_a_scope() -> None:
    """The rank that fails does not itself use the collective in which the others wait."""

    def body(comm: sync.Communicator) -> None:
        with autograd.CollectiveScope() as scope:
            wrapped = scope.bind(comm)
            x = leaf(0.5 + comm.rank)
            y = wrapped.all_reduce_sum(x * x)
            unused = wrapped.all_reduce_sum(x.detach())
            mine = x.exp().sum() if comm.rank == 1 else y.sum()
            loss = scope.complete(mine)
            if comm.rank == 1:
                mine.register_hook(_fail)
            _fails(comm, lambda: _guarded(loss), 1)
            assert unused.grad_fn is not None
            scope.complete(wrapped.all_reduce_sum(x * 2).sum()).backward()

    in_threads(3, body, timeout=60)


@pytest.mark.timeout(30)
def test_it_is_passed_on_to_groups_that_do_not_hold_the_rank() -> None:
    """Rank 3 shares its row with 2 and its column with 1; rank 0 hears of it from these."""

    def body(comm: sync.Communicator) -> None:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        x = leaf(1.0 + comm.rank)
        for culprit in (3, None, 0):
            x.grad = None
            y = autograd.all_reduce_sum(column, x)
            z = autograd.all_reduce_sum(row, y)
            if comm.rank == culprit:
                z.register_hook(_fail)
            if culprit is None:
                _guarded(z.sum())
                assert x.grad is not None
                assert x.grad.item() == 4
            elif comm.rank == culprit:
                with pytest.raises(ArithmeticError):
                    _guarded(z.sum())
            else:
                with pytest.raises(TensorContractError, match="ArithmeticError: a hook that fails"):
                    _guarded(z.sum())

    in_threads(4, body, timeout=60)


@pytest.mark.timeout(30)
def test_a_lost_rank_is_one_for_all() -> None:
    def body(comm: sync.Communicator) -> None:
        values = _chain(comm, leaf(0.1, 0.2))

        def leave(gradient: Tensor) -> None:
            comm.abort("test")

        if comm.rank == 2:
            values[2].register_hook(leave)
            with pytest.raises(RudaError, match="abort"):
                _guarded(values[0])
            return
        with pytest.raises(PeerLostError) as caught:
            _guarded(values[0])
        assert caught.value.rank == 2
        rest = comm.shrink()
        _guarded(_chain(rest, leaf(0.1, 0.2))[0])

    in_threads(3, body, timeout=60)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("place", range(4), ids=["loss", "in the 2nd", "between", "in the 1st"])
def test_what_a_checkpoint_recomputes(url: str, place: int) -> None:
    """The others wait in forward calls that they make again, and no rank is a call apart afterwards."""

    def body(comm: sync.Communicator) -> None:
        armed = False

        def block(x: Tensor, spoilt: bool) -> Tensor:
            y = autograd.all_reduce_sum(comm, x.sin())
            z = autograd.all_to_all_v(comm, y.exp(), [1, 0, 1], coordinated=True).value
            if spoilt and armed:
                z.register_hook(_fail)
            return autograd.all_reduce_mean(comm, z.cos().sum()) * x

        def model(x: Tensor, checkpointed: bool) -> list[Tensor]:
            values = [x * 1]
            for number in (1, 0):
                spoilt = place == 2 * number + 1
                run: Any = partial(checkpoint, block, use_reentrant=False) if checkpointed else block
                values.append(run(values[-1], spoilt))
            return [values[-1].sum(), values[-1], values[-2], values[-3]]

        for step in range(4):
            armed = False
            expected, x = leaf(0.1 * comm.rank + step, 0.2), leaf(0.1 * comm.rank + step, 0.2)
            model(expected, False)[0].backward()
            armed = step % 2 == 0 and comm.rank == 1
            values = model(x, True)
            if armed and place % 2 == 0:
                values[place].register_hook(_fail)
            if step % 2 == 0:
                _fails(comm, lambda loss=values[0]: _guarded(loss), 1)  # type: ignore[misc]
                continue
            _guarded(values[0])
            torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)
        comm.barrier()
        assert comm.stats()["channels"] == 1

    in_threads(3, body, url, timeout=60)


@pytest.mark.timeout(30)
def test_a_retained_graph_with_checkpoints() -> None:
    def body(comm: sync.Communicator) -> None:
        def block(x: Tensor) -> Tensor:
            return autograd.all_reduce_sum(comm, autograd.all_gather(comm, x.sin()).cos())

        expected, x = leaf(0.1 * comm.rank, 0.2), leaf(0.1 * comm.rank, 0.2)
        block(block(expected)).sum().backward()
        y: Any = checkpoint(block, x, use_reentrant=False)
        z: Any = checkpoint(block, y, use_reentrant=False)
        for place, culprit in ((z, 0), (y, 1), (z, 1)):
            handle = place.register_hook(_fail) if comm.rank == culprit else None
            _fails(comm, lambda: _guarded(z.sum(), retain_graph=True), culprit)
            if handle is not None:
                handle.remove()
        x.grad = None
        _guarded(z.sum())
        torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)

    in_threads(2, body, timeout=60)


# ---------------------------------------------------------------------- on an event loop


async def _requests(comm: AsyncCommunicator, inputs: list[Tensor], order: list[int]) -> list[Tensor]:
    """Calls in flight together, in another order on each rank."""

    async def request(i: int) -> Tensor:
        channel = comm.channel(f"request {i}")
        once = await autograd.aio.all_reduce_sum(channel, inputs[i] ** 2)
        return await autograd.aio.all_gather(channel, once * once)

    outputs = await asyncio.gather(*(request(i) for i in order))
    return [output for _, output in sorted(zip(order, outputs, strict=True))]


@pytest.mark.timeout(30)
async def test_an_awaited_pass_with_calls_in_flight() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for step in range(4):
            inputs = [leaf(float(i + 1)) for i in range(6)]
            order = list(range(6))
            random.Random(10 * step + comm.rank).shuffle(order)
            outputs = await _requests(comm, inputs, order)
            if step % 2 == 0 and comm.rank == 2:
                outputs[step].register_hook(_fail)
            loss = torch.stack([output.sum() for output in outputs]).sum()
            if step % 2:
                await autograd.backward(loss)
                for i, x in enumerate(inputs):
                    assert x.grad is not None
                    assert x.grad.item() == 9 * 2 * 3 * (i + 1.0) ** 2 * 2 * (i + 1.0)
            elif comm.rank == 2:
                with pytest.raises(ArithmeticError, match="a hook that fails"):
                    await autograd.backward(loss)
            else:
                with pytest.raises(TensorContractError, match=r"rank 2 refused .* a hook that fails"):
                    await autograd.backward(loss)

    await run_ranks(3, body, timeout=60)


@pytest.mark.timeout(30)
async def test_a_cancelled_pass_is_cancelled_in_calls_it_had_not_begun() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = leaf(1.0 + comm.rank)
        first, second = comm.channel("first"), comm.channel("second")
        y = await autograd.aio.all_reduce_sum(first, x)
        z = await autograd.aio.all_reduce_sum(second, x)
        # Rank 0 waits in the backward of one call, and rank 1 in that of the other: torch goes to the later
        # nodes first, unless a rank leaves one out.
        loss = y.sum() + z.sum() if comm.rank == 0 else y.sum() + 0 * x.sum()
        if comm.rank == 0:
            waiting = asyncio.ensure_future(autograd.backward(loss))
            while not comm.stats()["in_flight"]:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            with pytest.raises(CollectiveCancelledError, match="CollectiveCancelledError") as caught:
                await autograd.backward(loss)
            assert caught.value.rank == 0
        y = await autograd.aio.all_reduce_sum(first, x)
        x.grad = None
        await autograd.backward(y.sum())
        assert x.grad is not None

    await run_ranks(2, body, timeout=60)


@pytest.mark.timeout(30)
async def test_a_task_that_is_cancelled_before_its_pass_begins() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = leaf(1.0 + comm.rank)
        y = await autograd.aio.all_reduce_sum(comm, x)
        if comm.rank == 0:

            async def request() -> None:
                with autograd.abandon_on_error(y):
                    await asyncio.get_running_loop().create_future()

            waiting = asyncio.ensure_future(request())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            with pytest.raises(CollectiveCancelledError, match="its backward pass failed") as caught:
                await autograd.backward(y.sum())
            assert caught.value.rank == 0

    await run_ranks(2, body, timeout=60)


@pytest.mark.timeout(30)
async def test_a_pass_on_the_loop_itself_is_refused_on_all_ranks() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = leaf(1.0 + comm.rank)
        y = await autograd.aio.all_reduce_sum(comm, x)
        if comm.rank == 0:
            with pytest.raises(autograd.BlockedLoopError), autograd.abandon_on_error(y):
                y.sum().backward()
        else:
            with pytest.raises(TensorContractError, match="BlockedLoopError"):
                await autograd.backward(y.sum())
        y = await autograd.aio.all_reduce_sum(comm, x)
        await autograd.backward(y.sum())
        assert x.grad is not None
        assert x.grad.item() == 2

    await run_ranks(2, body, timeout=60)
