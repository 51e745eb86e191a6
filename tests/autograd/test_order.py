"""Ranks that reach backward nodes in different orders, again, recomputed, compiled, or not at all."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from typing import Any

import pytest
import torch
from autograd_support import leaf
from rank_threads import in_threads
from support import fresh_url
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ruda_async
from ruda_async import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TensorContractError,
    autograd,
    sync,
)


def _at_once(losses: list[Tensor], **options: Any) -> None:
    """Run the losses' backward passes in threads."""
    with concurrent.futures.ThreadPoolExecutor(len(losses)) as pool:
        for done in [pool.submit(loss.backward, **options) for loss in losses]:
            done.result()


@pytest.mark.timeout(30)
def test_passes_in_another_order_on_each_rank() -> None:
    def body(comm: sync.Communicator) -> None:
        inputs = [leaf(float(i)) for i in range(12)]
        outputs = [autograd.all_reduce_sum(comm, x).sum() * (i + 1) for i, x in enumerate(inputs)]
        random.Random(comm.rank).shuffle(outputs)
        _at_once(outputs)
        assert [x.grad.item() for x in inputs if x.grad is not None] == [3.0 * (i + 1) for i in range(12)]
        assert comm.stats()["channels"] == 1

    in_threads(3, body)


@pytest.mark.timeout(30)
def test_one_pass_over_channels_entered_in_another_order_on_each_rank() -> None:
    """What was in flight together forward is so backward; a wait at each node in turn would hang here."""

    async def rank_main(url: str, rank: int) -> None:
        async with ruda_async.connect(url, rank=rank, world_size=3, timeout=10) as comm:
            inputs = [leaf(float(i + 1)) for i in range(8)]
            order = list(range(8))
            random.Random(rank).shuffle(order)

            async def request(i: int) -> Tensor:
                channel = comm.channel(f"request {i}")
                once = await autograd.aio.all_reduce_sum(channel, inputs[i] ** 2)
                return await autograd.aio.all_gather(channel, once * once)

            outputs = await asyncio.gather(*(request(i) for i in order))
            await autograd.backward(torch.stack([output.sum() for output in outputs]).sum())
            for i, x in enumerate(inputs):
                assert x.grad is not None
                # 3 ranks' losses of 3 gathered squares of the sum of 3 squares
                assert x.grad.item() == 9 * 2 * 3 * (i + 1.0) ** 2 * 2 * (i + 1.0)

    async def main() -> None:
        url = fresh_url("memory")
        await asyncio.gather(*(rank_main(url, rank) for rank in range(3)))

    asyncio.run(main())


@pytest.mark.timeout(30)
def test_same_channel_through_a_bounded_twin() -> None:
    """`bounded` shares the channel, so its calls must not take the same backward names."""

    def body(comm: sync.Communicator) -> None:
        x, y = leaf(1), leaf(1, 2, 3, 4)
        first = autograd.all_reduce_sum(comm, x).sum()
        second = autograd.all_reduce_sum(comm.bounded(8), y).sum()
        _at_once([first, second] if comm.rank else [second, first])
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.tolist(), y.grad.tolist()) == ([2], [2] * 4)

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_backward_twice_through_retained_graphs() -> None:
    def body(comm: sync.Communicator) -> None:
        x, y = leaf(1), leaf(1)
        a, b = autograd.all_gather(comm, x).sum(), autograd.all_gather(comm, y).sum()
        a.backward(retain_graph=True)
        _at_once([a, b] if comm.rank else [b, a], retain_graph=True)
        b.backward()
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.item(), y.grad.item()) == (4, 4)
        assert comm.stats()["channels"] == 1

    in_threads(2, body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes(reentrant: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        x = leaf(1.0, 2.0)

        def block(value: Tensor) -> Tensor:
            return autograd.all_reduce_sum(comm, (value * value).sin()).exp()

        plain = block(block(x)).sum()
        (expected,) = torch.autograd.grad(plain, x)
        once: Any = checkpoint(block, x, use_reentrant=reentrant)
        twice: Any = checkpoint(block, once, use_reentrant=reentrant)
        twice.sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)

    in_threads(2, body)


@pytest.mark.timeout(60)
def test_compile_breaks_the_graph_cleanly() -> None:
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, example: object) -> Any:
        graphs.append([node.name for node in module.graph.nodes if node.op.startswith("call")])
        return module

    def body(comm: sync.Communicator) -> Tensor:
        def step(value: Tensor) -> Tensor:
            return autograd.reduce_from(comm, value.sin()) * 2 + 1

        compiled = torch.compile(step, backend=backend) if comm.rank == 0 else step
        x, y = leaf(1.0, 2.0), leaf(1.0, 2.0)
        compiled(x).sum().backward()
        step(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
        return compiled(x).detach()

    first, second = in_threads(2, body)
    assert first.tolist() == second.tolist()
    assert graphs == [["sin"], ["mul", "add"]]
    reasons = torch._dynamo.utils.counters["graph_break"]
    assert all("a collective runs outside the graph" in reason for reason in reasons)


def test_compile_with_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from ruda_async.autograd import compiling

    monkeypatch.setattr(compiling, "_frames", object())
    double = compiling.eager(lambda value: value * 2)
    compiled = torch.compile(lambda value: double(value.sin()) + 1, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin() * 2 + 1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_func_transforms_are_refused(transform: str) -> None:
    def body(comm: sync.Communicator) -> None:
        def call(value: Tensor) -> Tensor:
            return autograd.all_reduce_sum(comm, value).sum()

        with pytest.raises(TensorContractError, match=r"torch\.func"):
            getattr(torch.func, transform)(call)(torch.ones(3))

    in_threads(1, body)


# ---------------------------------------------------------------------- failure


@pytest.mark.timeout(30)
def test_a_rank_that_never_comes_is_a_timeout() -> None:
    def body(comm: sync.Communicator) -> None:
        x = leaf(1)
        loss = autograd.all_reduce_sum(comm, x, timeout=0.3).sum()
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="backward 0"):
                loss.backward()
        comm.channel("end").barrier()
        assert comm.all_reduce_sum(torch.ones(1)).item() == 2  # and it still works

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_a_lost_peer_comes_out_of_backward() -> None:
    def body(comm: sync.Communicator) -> None:
        loss = autograd.all_reduce_sum(comm, leaf(1)).sum()
        comm.barrier()
        if comm.rank == 1:
            comm.abort("test")
            return
        with pytest.raises(PeerLostError) as caught:
            loss.backward()
        assert caught.value.rank == 1

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_backward_of_another_operation_is_a_mismatch() -> None:
    """Ranks whose forward calls were of one number but not one kind find out in backward, both of them."""

    def body(comm: sync.Communicator) -> None:
        x = leaf(1, 2)
        autograd.copy_to(comm, x) if comm.rank else autograd.scatter_to(comm, x)
        entered = autograd.copy_to(comm, x) if comm.rank else autograd.scatter_to(comm, x)
        with pytest.raises(CollectiveMismatchError) as caught:
            entered.sum().backward()
        assert caught.value.rank == 1 - comm.rank
        assert comm.all_reduce_sum(torch.ones(1)).item() == 2

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_bad_arguments_are_refused_on_every_rank() -> None:
    def body(comm: sync.Communicator) -> None:
        counts = [1, 1] if comm.rank else [5, 1]
        with pytest.raises(TensorContractError) as caught:
            autograd.all_to_all_v(comm, leaf(1, 2), counts)
        assert caught.value.rank == 0
        with pytest.raises(TensorContractError, match="'max' has no gradient"):
            autograd.reduce_scatter_dim(comm, leaf(1, 2), 0, "max")
        with pytest.raises(TensorContractError, match="2 equal parts"):
            autograd.scatter_to(comm, leaf(1, 2, 3))
        with pytest.raises(TensorContractError, match="no axis"):
            autograd.scatter_to(comm, leaf(1, 2, 3), 4)
        with pytest.raises(TypeError, match="not a communicator"):
            autograd.all_gather(object(), leaf(1))

    in_threads(2, body)


# ---------------------------------------------------------------------- coordinated tracking


@pytest.mark.timeout(30)
def test_coordinated_exchange_where_one_rank_tracks() -> None:
    def body(comm: sync.Communicator) -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=comm.rank == 1)
        value, counts = autograd.all_to_all_v(comm, x, [1, 1], coordinated=True)
        assert counts == (1, 1)
        assert value.requires_grad
        ((comm.rank + 2) * value).sum().backward()
        if comm.rank == 1:
            assert x.grad is not None
            assert x.grad.tolist() == [2, 3]
        else:
            assert x.grad is None
        nobody = autograd.all_to_all_v(comm, x.detach(), [1, 1], coordinated=True)
        assert not nobody.value.requires_grad

    in_threads(2, body)


# ---------------------------------------------------------------------- tensor-parallel regions


@pytest.mark.timeout(30)
def test_regions_give_the_gradients_of_the_unsharded_layer() -> None:
    """Column- then row-parallel linear layers, and a sharded sum, all for one replicated loss."""
    torch.manual_seed(0)
    x0, a0, b0 = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (4, 6), (6, 4)))

    def reference() -> tuple[Tensor, ...]:
        x, a, b = (t.clone().requires_grad_() for t in (x0, a0, b0))
        ((x @ a).tanh() @ b).tanh().pow(2).sum().backward()
        return tuple(t.grad for t in (x, a, b) if t.grad is not None)

    def body(comm: sync.Communicator) -> None:
        x = x0.clone().requires_grad_()
        a = a0.chunk(2, 1)[comm.rank].clone().requires_grad_()
        b = b0.chunk(2, 0)[comm.rank].clone().requires_grad_()
        hidden = (autograd.copy_to(comm, x) @ a).tanh()
        output = autograd.reduce_from(comm, hidden @ b)
        slices = autograd.scatter_to(comm, output).tanh()
        loss = autograd.gather_from(comm, slices).pow(2).sum()
        loss.backward()
        dx, da, db = reference()
        torch.testing.assert_close(x.grad, dx, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a.grad, da.chunk(2, 1)[comm.rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(b.grad, db.chunk(2, 0)[comm.rank], rtol=1e-12, atol=1e-12)
        assert comm.stats()["channels"] == 1

    in_threads(2, body)
