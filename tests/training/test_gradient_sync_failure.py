"""A rank that fails in backward fails the step on all ranks, at once, and the next step works."""

from __future__ import annotations

import asyncio
import gc
import textwrap
import weakref
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from support import BETWEEN_PROCESSES, fresh_url, run_programs, run_ranks
from torch import Tensor, nn

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    PeerLostError,
    TensorContractError,
    autograd,
    sync,
)
from ruda_async.training import GradientSync, off_loop


class Broken(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("broken here")


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("place", [1, 2], ids=["in the middle", "before the first gradient"])
def test_an_error_in_backward_reaches_all_ranks(url: str, place: int) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _layers()
        gradients = GradientSync(net, comm, bucket_bytes=1)
        x = torch.ones(1, 4, dtype=torch.float64) * (comm.rank + 1)
        for _ in range(2):
            value = x
            for number, layer in enumerate(net):
                value = layer(value)
                if comm.rank == 1 and number == place:
                    value = Broken.apply(value)
            if comm.rank == 1:
                with pytest.raises(ArithmeticError, match="broken here"):
                    gradients.backward(value.sum())
            else:
                with pytest.raises(TensorContractError, match="broken here") as caught:
                    gradients.backward(value.sum())
                assert caught.value.rank == 1
            net.zero_grad()
            gradients.backward(net(x).sum())
            bias = net[2].bias.grad
            assert bias is not None
            assert bias.item() == 1
        assert comm.stats()["in_flight"] == 0

    in_threads(3, body, url, timeout=50)


def test_a_plain_backward_that_raises_is_noticed_too() -> None:
    def body(comm: sync.Communicator) -> None:
        net = _layers()
        gradients = GradientSync(net, comm, bucket_bytes=1)
        x = torch.ones(1, 4, dtype=torch.float64)
        hidden = net[1](net[0](x))
        if comm.rank == 1:
            with pytest.raises(ArithmeticError):
                net[2](Broken.apply(hidden)).sum().backward()
        else:
            with pytest.raises(TensorContractError, match="an error was raised in it") as caught:
                net[2](hidden).sum().backward()
            assert caught.value.rank == 1
        net.zero_grad()
        gradients.backward(net(x).sum())
        assert net[2].bias.grad is not None
        assert net[2].bias.grad.item() == 1

    in_threads(2, body, timeout=50)


def test_a_sparse_gradient_is_refused_on_all_ranks() -> None:
    def body(comm: sync.Communicator) -> None:
        table = nn.Embedding(5, 2, sparse=comm.rank == 1)
        gradients = GradientSync(table, comm)
        with pytest.raises(TensorContractError, match="sparse") as caught:
            gradients.backward(table(torch.tensor([1, 1])).sum())
        assert comm.rank == 1 or caught.value.rank == 1

    in_threads(2, body, timeout=50)


@pytest.mark.parametrize("style", ["backward", "plain", "plain and finish"])
def test_whatever_was_caught_may_be_abandoned(style: str, url: str) -> None:
    """The loop that everybody writes: one `except` for this rank's error and for what comes of another's."""

    def step_of(gradients: GradientSync, net: nn.Module, x: Tensor) -> None:
        if style == "backward":
            gradients.backward(net(x).sum())
            return
        net(x).sum().backward()
        if style == "plain and finish":
            gradients.finish()

    def body(comm: sync.Communicator) -> None:
        net = _layers()
        gradients = GradientSync(net, comm, bucket_bytes=1)
        culprits = {1: 1, 2: 1, 4: 0}
        failed = []
        for step in range(6):
            net.zero_grad()
            try:
                if culprits.get(step) == comm.rank:
                    raise OSError("a sample that cannot be read")
                step_of(gradients, net, torch.full((1, 4), 1.0 + step + comm.rank, dtype=torch.float64))
            except (OSError, TensorContractError) as error:
                gradients.abandon(error)
                failed.append((step, getattr(error, "rank", comm.rank), "cannot be read" in str(error)))
        assert failed == [(step, culprit, True) for step, culprit in culprits.items()]
        grad = net[0].weight.grad
        assert grad is not None
        everyone = comm.all_gather(grad.reshape(1, -1))
        assert (everyone == everyone[0]).all()
        assert comm.stats()["in_flight"] == 0

    in_threads(2, body, url, timeout=20)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_in_a_hook_of_a_plain_backward_may_be_abandoned(wrapped: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _layers()
        gradients = GradientSync(net, comm, bucket_bytes=1)
        x = torch.ones(1, 4, dtype=torch.float64)
        failed = []
        for step in range(4):
            net.zero_grad()
            hidden = net[1](net[0](x))
            try:
                try:
                    net[2](Broken.apply(hidden) if (step, comm.rank) == (1, 1) else hidden).sum().backward()
                except (ArithmeticError, TensorContractError) as error:
                    if wrapped:
                        raise RuntimeError("the step failed") from error
                    raise
            except (ArithmeticError, TensorContractError, RuntimeError) as error:
                gradients.abandon(error)
                failed.append(step)
        assert failed == [1]

    in_threads(2, body, timeout=20)


@pytest.mark.parametrize("plain", [False, True], ids=["guarded", "plain"])
@pytest.mark.parametrize("how", ["unfrozen", "added", "replaced"])
def test_a_parameter_that_came_later_is_not_trained_apart(how: str, plain: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _layers()
        net[0].requires_grad_(how != "unfrozen")
        gradients = GradientSync(net, comm)
        x = torch.full((1, 4), 1.0 + comm.rank, dtype=torch.float64)
        gradients.backward(net(x).sum())
        net.zero_grad()
        if how == "unfrozen":
            net[0].requires_grad_()
        elif how == "added":
            net.append(nn.Linear(1, 1).double())
        else:
            net[0].weight = nn.Parameter(net[0].weight.detach())
        late = "3.weight" if how == "added" else "0.weight"
        # The loss of rank 1 does not reach the new layer; it fails all the same.
        loss = net[:3](x).sum() if how == "added" and comm.rank == 1 else net(x).sum()
        with pytest.raises(TensorContractError, match=late.replace(".", "[.]")):
            loss.backward() if plain else gradients.backward(loss)
        gradients.remove()
        net.zero_grad()
        again = GradientSync(net, comm)
        again.backward(net(x).sum())
        grad = net.get_parameter(late).grad
        assert grad is not None
        everyone = comm.all_gather(grad.reshape(1, -1))
        assert (everyone == everyone[0]).all()

    in_threads(2, body, timeout=20)


@pytest.mark.parametrize("plain", [False, True], ids=["guarded", "plain"])
def test_a_model_that_was_converted_is_refused_by_name_on_all_ranks(plain: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _layers()
        gradients = GradientSync(net, comm)
        if comm.rank == 1:
            net.float()
        x = torch.ones(1, 4, dtype=torch.float32 if comm.rank == 1 else torch.float64)
        with pytest.raises(
            TensorContractError, match=r"is torch\.float32 .* and was torch\.float64"
        ) as caught:
            net(x).sum().backward() if plain else gradients.backward(net(x).sum())
        assert comm.rank == 1 or caught.value.rank == 1
        gradients.abandon(caught.value)
        net.double().zero_grad()
        gradients.backward(net(x.double()).sum())
        assert net[2].bias.grad is not None
        assert net[2].bias.grad.item() == 1

    in_threads(2, body, timeout=20)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_model_that_is_forgotten_takes_memory_and_channels_with_it(op: str) -> None:
    def body(comm: sync.Communicator) -> None:
        def once() -> list[weakref.ref[object]]:
            net = _layers()
            GradientSync(net, comm, op=op, bucket_bytes=1)  # held by the parameters alone
            gc.collect()
            net(torch.full((1, 4), 1.0 + comm.rank).double()).sum().backward()
            assert net[2].bias.grad is not None
            assert net[2].bias.grad.item() == (1 if op == "mean" else comm.world_size)
            return [weakref.ref(net), weakref.ref(net[0].weight)]

        before = comm.stats()["channels"]
        gone = [ref for _ in range(3) for ref in once()]
        comm.barrier()  # the loop's thread has let go of the last call
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
        comm.barrier()  # the loop has run what it was given before
        assert comm.stats()["channels"] == before

    in_threads(2, body, timeout=20)


def test_a_lost_rank_comes_out_of_backward() -> None:
    def body(comm: sync.Communicator) -> None:
        net = _layers()
        gradients = GradientSync(net, comm, bucket_bytes=1)

        def leave(gradient: Tensor) -> None:
            assert gradients._pass is not None
            for call in gradients._pass.calls.values():
                call.result(20)  # what was under way has ended
            comm.abort("test")

        hidden = net[1](net[0](torch.ones(1, 4, dtype=torch.float64)))
        if comm.rank == 1:
            hidden.register_hook(leave)
            with pytest.raises(Exception, match="abort"):
                net[2](hidden).sum().backward()
            return
        with pytest.raises(PeerLostError) as caught:
            net[2](hidden).sum().backward()
        assert caught.value.rank == 1

    in_threads(3, body, timeout=50)


async def test_backward_on_the_loop_is_refused_and_the_step_can_be_repeated() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        p = nn.Parameter(torch.ones(2))
        gradients = await off_loop(GradientSync, [p], comm)
        with pytest.raises(autograd.BlockedLoopError, match="off_loop"):
            p.sum().backward()
        p.grad = None
        await off_loop(gradients.backward, (p * (comm.rank + 1)).sum())
        assert p.grad is not None
        assert p.grad.tolist() == [1.5, 1.5]

    await run_ranks(2, body)


async def test_cancelling_a_pass_ends_it_on_all_ranks() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        p = nn.Parameter(torch.ones(2))
        gradients = await off_loop(GradientSync, [p], comm)
        gate = comm.channel("gate")
        if comm.rank == 0:
            waiting = asyncio.ensure_future(off_loop(gradients.backward, p.sum()))
            while not comm.stats()["in_flight"]:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await gate.barrier()
        else:
            await gate.barrier()
            with pytest.raises(CollectiveCancelledError):
                await off_loop(gradients.backward, p.sum())
        p.grad = None
        await off_loop(gradients.backward, (p * (comm.rank + 1)).sum())
        assert p.grad is not None
        assert p.grad.tolist() == [1.5, 1.5]

    await run_ranks(2, body)


DYING = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    from ruda_async import PeerLostError, sync
    from ruda_async.training import GradientSync

    torch.set_num_threads(1)
    url, rank = sys.argv[1], int(sys.argv[2])
    with sync.connect(url, rank=rank, world_size=3, timeout=100) as comm:
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)]).double()
        gradients = GradientSync(net, comm, bucket_bytes=1)
        hidden = net[1](net[0](torch.ones(1, 4, dtype=torch.float64)))
        if rank == 1:
            hidden.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        try:
            net[2](hidden).sum().backward()
        except PeerLostError as error:
            print("lost", error.rank)
    """
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "scheme",
    # The first one alone where time is short: how a death is noticed is tested without torch.
    [
        pytest.param(s, marks=[pytest.mark.long] if number else [])
        for number, s in enumerate(BETWEEN_PROCESSES)
    ],
)
async def test_a_process_that_dies_in_backward(scheme: str) -> None:
    outputs = await run_programs(DYING, fresh_url(scheme), 3, 140)
    assert [out.strip() for out, _, _ in outputs] == ["lost 1", "", "lost 1"], outputs
    assert [code for _, _, code in outputs] == [0, -9, 0]
