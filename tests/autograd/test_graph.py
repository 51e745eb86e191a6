"""Collectives inside the graphs of `torch.compile`: one rank compiles, and meets one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ruda_async import PeerLostError, TensorContractError, autograd, sync
from ruda_async.autograd import CollectiveScope

Step = Callable[[Any, Tensor], Tensor]


def _input(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _exchange(comm: Any, x: Tensor) -> Tensor:
    rows, counts = autograd.all_to_all_v(comm, x, [3, 1])
    assert len(counts) == 2
    return rows * 2


CALLS: dict[str, Step] = {
    "all_gather": autograd.all_gather,
    "all_gather_dim": lambda c, x: autograd.all_gather_dim(c, x, -1),
    "all_reduce_sum": autograd.all_reduce_sum,
    "all_reduce_mean": autograd.all_reduce_mean,
    "reduce_scatter_sum": autograd.reduce_scatter_sum,
    "reduce_scatter_mean": autograd.reduce_scatter_mean,
    "reduce_scatter_dim": lambda c, x: autograd.reduce_scatter_dim(c, x, dim=1, op="mean"),
    "broadcast": lambda c, x: autograd.broadcast(c, x, root=1),
    "all_to_all_dim": lambda c, x: autograd.all_to_all_dim(c, x, concat_dim=1, split_dim=0),
    "all_to_all_v": _exchange,
    "wrapped all_gather_float": lambda c, x: autograd.differentiable(c).all_gather_float(x),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("wrapped")])
def test_a_whole_graph_meets_an_eager_rank(name: str) -> None:
    def body(comm: sync.Communicator) -> tuple[Tensor, Tensor]:
        def step(x: Tensor) -> Tensor:
            return (CALLS[name](comm, x.sin()) * CALLS[name](comm, x.cos())).exp()

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if comm.rank == 0 else step
        x = _input(comm.rank, 4, 6)
        for _ in range(2):  # compiled, and from the cache
            result = run(x)
            weights = torch.arange(result.numel(), dtype=torch.float64).view(result.shape)
            (result * weights * (comm.rank + 1)).sum().backward()
        alone = _input(comm.rank, 4, 6)
        again = step(alone)
        (again * weights * (comm.rank + 1)).sum().backward()
        torch.testing.assert_close(result, again, rtol=1e-12, atol=1e-12)
        assert x.grad is not None
        assert alone.grad is not None
        torch.testing.assert_close(x.grad, 2 * alone.grad, rtol=1e-12, atol=1e-12)
        return result, x.grad

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_wrapped_calls_stay_too() -> None:
    def body(comm: sync.Communicator) -> None:
        wrapped = autograd.differentiable(comm)

        def step(x: Tensor) -> Tensor:
            rows, _ = wrapped.all_to_all_v_float(x, [1, 1])
            return (
                wrapped.all_gather_float(wrapped.broadcast_float(rows, 0)) + wrapped.all_reduce_sum(x).sum()
            )

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if comm.rank == 0 else step
        x, y = _input(comm.rank, 2, 3), _input(comm.rank, 2, 3)
        run(x).square().sum().backward()
        step(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_counts_from_a_tensor_are_sizes_of_the_graph() -> None:
    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor, counts: Tensor) -> Tensor:
            rows, received = autograd.all_to_all_v(comm, x * 2, counts.tolist())
            back, _ = autograd.all_to_all_v(comm, rows * rows, received)
            return back

        run = (
            torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True) if comm.rank == 0 else step
        )
        for counts in ([1, 3], [4, 0], [0, 2]):
            x = _input(comm.rank, sum(counts), 2)
            result = run(x, torch.tensor(counts))
            torch.testing.assert_close(result, 4 * x * x)
            result.sum().backward()
            torch.testing.assert_close(x.grad, 8 * x.detach())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_backward_twice_takes_the_names_of_eager_ranks() -> None:
    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor) -> Tensor:
            return autograd.all_reduce_sum(comm, x * x)

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if comm.rank == 0 else step
        x = _input(comm.rank, 3)
        result = run(x).sum()
        result.backward(retain_graph=True)
        result.backward()
        torch.testing.assert_close(x.grad, 8 * x.detach())
        assert comm.stats()["channels"] == 1

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_calls_whose_results_are_not_used_are_made_all_the_same() -> None:
    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor) -> Tensor:
            autograd.all_gather(comm, x)
            return autograd.all_reduce_sum(comm, x) + 1

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if comm.rank == 0 else step
        assert run(_input(1, 2)).tolist() == (2 * _input(1, 2) + 1).tolist()
        comm.barrier()

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_a_bound_scope_breaks_the_graph_and_records() -> None:
    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor) -> Tensor:
            return autograd.all_reduce_sum(comm, x.sin()) * 2

        run = torch.compile(step, backend="aot_eager") if comm.rank == 0 else step
        x, y = _input(comm.rank, 3), _input(comm.rank, 3)
        run(x).sum().backward()
        with CollectiveScope() as scope:
            scope.bind(comm)
            result = run(y)
            unused = torch.zeros((), dtype=torch.float64)
            scope.complete(result.sum() if comm.rank == 1 else unused).backward()
        torch.testing.assert_close(y.grad, 2 * y.detach().cos())
        torch.testing.assert_close(x.grad, 4 * x.detach().cos())
        run(x).sum().backward()

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_errors_keep_their_types() -> None:
    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor) -> Tensor:
            return autograd.reduce_scatter_sum(comm, x * 1).sum()

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if comm.rank == 0 else step
        with pytest.raises(TensorContractError, match="divide"):
            run(_input(0, 3))
        result = run(_input(0, 4))
        comm.barrier()
        if comm.rank == 1:
            comm.abort("test")
            return
        with pytest.raises(PeerLostError) as caught:
            result.backward()
        assert caught.value.rank == 1

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="what a graph keeps is not shown"
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_pass_that_fails_is_told_from_and_to_a_compiled_rank(backend: str) -> None:
    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("a hook that fails")

    @torch._functorch.config.patch(donated_buffer=False)  # else no graph can be retained
    def body(comm: sync.Communicator) -> None:
        between: list[Tensor] = []

        def step(x: Tensor) -> Tensor:
            y = autograd.all_reduce_sum(comm, x * x)
            between.append(y)
            return autograd.all_to_all_v(comm, y, [1, 2]).value.square().sum()

        def compiled(x: Tensor) -> Tensor:
            y = autograd.all_reduce_sum(comm, x * x)
            return autograd.all_to_all_v(comm, y, [1, 2]).value.square().sum()

        run = torch.compile(compiled, backend=backend, fullgraph=True) if comm.rank == 0 else step
        x = _input(comm.rank, 3)
        loss = run(x)
        # Rank 0 fails before its first exchange, and rank 1 between the two; the graph is kept.
        for culprit in (0, 1):
            place = loss if comm.rank == 0 else between[0]
            handle = place.register_hook(fail) if comm.rank == culprit else None
            error = ArithmeticError if comm.rank == culprit else TensorContractError
            with pytest.raises(error, match="a hook that fails"), autograd.abandon_on_error(loss):
                loss.backward(retain_graph=True)
            if handle is not None:
                handle.remove()
        x.grad = None
        with autograd.abandon_on_error(loss):
            loss.backward()
        everyone = sum(_input(rank, 3).detach().square() for rank in range(2))
        torch.testing.assert_close(x.grad, 8 * everyone * x.detach())
        comm.barrier()
        assert comm.stats()["channels"] == 1

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.timeout(120)
def test_a_checkpoint_is_not_recomputed_to_tell_of_an_error() -> None:
    """That would make forward calls which no other rank makes."""

    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor) -> Tensor:
            return autograd.all_reduce_sum(comm, x.sin()).exp()

        run = torch.compile(step, backend="aot_eager", fullgraph=True)
        x = _input(comm.rank, 3)
        once: Any = checkpoint(run, x, use_reentrant=False)
        calls = comm.stats()["completed"]
        with pytest.raises(ArithmeticError), autograd.abandon_on_error(once):
            raise ArithmeticError("on all ranks")
        assert comm.stats()["completed"] == calls

    in_threads(2, body, limit=110, timeout=100)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_inductor() -> None:
    """Needs a C++ compiler."""

    def body(comm: sync.Communicator) -> None:
        def step(x: Tensor) -> Tensor:
            rows, _ = autograd.all_to_all_v(comm, x.sin(), [1, 3])
            autograd.all_gather(comm, x)  # not used, and made all the same, in its place
            autograd.all_to_all_v(comm, x.cos(), [2, 2])
            total: Tensor = autograd.all_reduce_mean(comm, autograd.all_gather(comm, rows.sum(0)).cos())
            return total.sum()

        run = torch.compile(step, fullgraph=True) if comm.rank == 0 else step
        x, y = _input(comm.rank, 4, 3), _input(comm.rank, 4, 3)
        run(x).backward()
        step(y).backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)

    in_threads(2, body, limit=500, timeout=400)
