"""Values and gradients against the same mathematics in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from support import fresh_url
from torch import Tensor

from ruda_async import autograd, sync

Everyone = list[Tensor]
WORLD = 3
COUNTS = [[2, 0, 1], [0, 0, 3], [1, 2, 4]]


def _exchange(inputs: Everyone) -> Everyone:
    blocks = [x.split(COUNTS[source]) for source, x in enumerate(inputs)]
    return [torch.cat([blocks[source][rank] for source in range(WORLD)]) for rank in range(WORLD)]


def _swap(inputs: Everyone) -> Everyone:
    return [torch.cat([x.chunk(WORLD, 0)[rank] for x in inputs], 1) for rank in range(WORLD)]


#: name → (shape of each rank's input, the call, what all ranks' results are in one process)
Case = tuple[Callable[[int], tuple[int, ...]], Callable[[Any, Tensor], Any], Callable[[Everyone], Everyone]]
CASES: dict[str, Case] = {
    "all_gather": (
        lambda r: (2, 3),
        autograd.all_gather,
        lambda xs: [torch.cat(xs)] * WORLD,
    ),
    "all_gather_dim": (
        lambda r: (2, 3),
        lambda c, x: autograd.all_gather_dim(c, x, -1),
        lambda xs: [torch.cat(xs, 1)] * WORLD,
    ),
    "reduce_scatter_sum": (
        lambda r: (6, 2),
        autograd.reduce_scatter_sum,
        lambda xs: list(sum(xs[1:], xs[0]).chunk(WORLD)),
    ),
    "reduce_scatter_mean": (
        lambda r: (6, 2),
        autograd.reduce_scatter_mean,
        lambda xs: list((sum(xs[1:], xs[0]) / WORLD).chunk(WORLD)),
    ),
    "reduce_scatter_dim": (
        lambda r: (2, 6),
        lambda c, x: autograd.reduce_scatter_dim(c, x, 1, "mean"),
        lambda xs: list((sum(xs[1:], xs[0]) / WORLD).chunk(WORLD, 1)),
    ),
    "all_reduce_sum": (
        lambda r: (2, 3),
        autograd.all_reduce_sum,
        lambda xs: [sum(xs[1:], xs[0])] * WORLD,
    ),
    "all_reduce_sum of a scalar": (
        lambda r: (),
        autograd.all_reduce_sum,
        lambda xs: [sum(xs[1:], xs[0])] * WORLD,
    ),
    "all_reduce_mean": (
        lambda r: (2, 3),
        autograd.all_reduce_mean,
        lambda xs: [sum(xs[1:], xs[0]) / WORLD] * WORLD,
    ),
    "broadcast": (
        lambda r: (2, 3),
        lambda c, x: autograd.broadcast(c, x, 1),
        lambda xs: [xs[1] + 0 * (xs[0] + xs[2])] * WORLD,
    ),
    "all_to_all_v": (
        lambda r: (sum(COUNTS[r]), 2),
        lambda c, x: autograd.all_to_all_v(c, x, COUNTS[c.rank]).value,
        _exchange,
    ),
    "all_to_all_dim": (
        lambda r: (6, 2),
        lambda c, x: autograd.all_to_all_dim(c, x, 0, 1),
        _swap,
    ),
}


def _input(rank: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


def _loss(result: Tensor, rank: int) -> Tensor:
    """A loss that is not linear and differs from rank to rank, so that every derivative shows."""
    ramp = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).reshape(result.shape)
    return ((rank + 1) * ramp * result**3).sum()


def _penalised(loss: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
    return loss + sum((gradient**2).sum() for gradient in gradients)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str) -> None:
    shape, call, whole = CASES[name]

    def body(comm: sync.Communicator) -> tuple[Tensor, Tensor, Tensor]:
        x = _input(comm.rank, shape(comm.rank))
        result = call(comm, x * 1.0)
        loss = _loss(result, comm.rank)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        _penalised(loss, (first,)).backward()
        assert comm.stats()["channels"] == 1, "a backward channel was left open"
        assert x.grad is not None
        return result.detach(), first.detach(), x.grad

    found = in_threads(WORLD, body)

    inputs = [_input(rank, shape(rank)) for rank in range(WORLD)]
    results = whole([x * 1.0 for x in inputs])
    total = sum((_loss(result, rank) for rank, result in enumerate(results)), torch.zeros(()))
    first = torch.autograd.grad(total, inputs, create_graph=True)
    _penalised(total, first).backward()
    for rank in range(WORLD):
        torch.testing.assert_close(found[rank][0], results[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[rank][1], first[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[rank][2], inputs[rank].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", CASES)
def test_gradcheck_alone(name: str) -> None:
    """With one rank, torch's own numerical checks apply, of both orders."""
    shape, call, _ = CASES[name]

    def body(comm: sync.Communicator) -> None:
        x = _input(0, (*shape(0),))
        if name == "all_to_all_v":
            exchange = lambda x: autograd.all_to_all_v(comm, x, [len(x)]).value  # noqa: E731
        elif name == "broadcast":
            exchange = lambda x: autograd.broadcast(comm, x, 0)  # noqa: E731
        else:
            exchange = lambda x: call(comm, x)  # noqa: E731
        assert torch.autograd.gradcheck(exchange, (x,))
        assert torch.autograd.gradgradcheck(exchange, (x,))

    in_threads(1, body)


@pytest.mark.timeout(30)
def test_over_tcp() -> None:
    def body(comm: sync.Communicator) -> None:
        x = _input(comm.rank, (4, 3))
        _loss(autograd.all_gather(comm, x), comm.rank).backward()
        whole = torch.cat([_input(rank, (4, 3)) for rank in range(2)]).detach().requires_grad_()
        (_loss(whole, 0) + _loss(whole, 1)).backward()
        assert whole.grad is not None
        torch.testing.assert_close(x.grad, whole.grad.chunk(2)[comm.rank], rtol=1e-12, atol=1e-12)

    in_threads(2, body, fresh_url("tcp"))


@pytest.mark.timeout(30)
def test_broadcast_gives_zeros_off_the_root() -> None:
    def body(comm: sync.Communicator) -> None:
        x = _input(comm.rank, (2,))
        autograd.broadcast(comm, x, 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == ([3, 3] if comm.rank == 2 else [0, 0])

    in_threads(WORLD, body)


@pytest.mark.timeout(30)
def test_expanded_gradients_and_views() -> None:
    def body(comm: sync.Communicator) -> None:
        base = _input(comm.rank, (4, 6))
        view = base.t()[1::2]  # strided, with an offset
        autograd.all_gather(comm, view).sum().backward()  # the gradient is an expanded scalar
        expected = torch.zeros(4, 6, dtype=torch.float64)
        expected[:, 1::2] = 2
        torch.testing.assert_close(base.grad, expected)
        row = _input(comm.rank, (3,))
        autograd.all_reduce_sum(comm, row.expand(2, 3)).sum().backward()
        torch.testing.assert_close(row.grad, torch.full((3,), 4.0, dtype=torch.float64))

    in_threads(2, body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", CASES)
def test_an_expanded_gradient_of_a_view(name: str) -> None:
    """As a plain sum gives it: one number for all places. The input has strides, and no memory of its own."""
    shape, call, whole = CASES[name]

    def base(rank: int) -> Tensor:
        return _input(rank, (*shape(rank), 3))

    def body(comm: sync.Communicator) -> Tensor | None:
        x = base(comm.rank)
        call(comm, x[..., 1]).sum().backward()
        return x.grad

    found = in_threads(WORLD, body)
    inputs = [base(rank) for rank in range(WORLD)]
    results = whole([x[..., 1] for x in inputs])
    sum((result.sum() for result in results), torch.zeros(())).backward()
    for rank in range(WORLD):
        torch.testing.assert_close(found[rank], inputs[rank].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.timeout(30)
def test_input_that_needs_no_gradient_beside_one_that_does() -> None:
    def body(comm: sync.Communicator) -> None:
        weight, data = _input(comm.rank, (2,)), torch.full((2,), comm.rank + 1.0, dtype=torch.float64)
        plain = autograd.all_gather(comm, data)
        assert not plain.requires_grad
        (autograd.all_gather(comm, weight) * plain).sum().backward()
        torch.testing.assert_close(weight.grad, torch.full((2,), 2 * (comm.rank + 1.0), dtype=torch.float64))
        integers = torch.arange(2)
        assert autograd.all_gather(comm, integers).tolist() == [0, 1, 0, 1]

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_result_may_be_edited_in_place() -> None:
    def body(comm: sync.Communicator) -> None:
        calls: list[Callable[[Any, Tensor], Tensor]] = [
            autograd.all_reduce_sum,
            autograd.reduce_from,
            autograd.gather_from,
            lambda c, x: autograd.all_gather(c, x.bfloat16()),
        ]
        for call in calls:
            x = _input(comm.rank, (2, 4))
            result = call(comm, x)
            result.mul_(3)
            result.sum().backward()
            assert x.grad is not None
            assert set(x.grad.unique().tolist()) <= {3.0, 6.0}
        for call in (autograd.copy_to, autograd.scatter_to):  # views of their input
            with pytest.raises(RuntimeError, match="view"):
                call(comm, _input(comm.rank, (2, 4))).mul_(3)

    in_threads(2, body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_keep_the_dtype(dtype: torch.dtype) -> None:
    def body(comm: sync.Communicator) -> None:
        x = torch.ones(4, dtype=dtype, requires_grad=True)
        autograd.reduce_scatter_mean(comm, x).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        assert x.grad.tolist() == [0.5] * 4

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_no_grad_is_the_plain_call() -> None:
    def body(comm: sync.Communicator) -> None:
        x = _input(comm.rank, (2,))
        with torch.no_grad():
            result = autograd.all_reduce_sum(comm, x)
        assert not result.requires_grad
        assert result.grad_fn is None

    in_threads(2, body)
