"""An error on one rank between two steps of a `ShardedOptimizer`, or in one, is one on all ranks at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rank_threads import in_threads
from torch import Tensor, nn

from ruda_async import RudaError, TensorContractError, sync
from ruda_async.training import ShardedGradScaler, ShardedOptimizer


def _made(comm: sync.Communicator) -> tuple[nn.Module, ShardedOptimizer]:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).double())  # two flats
    return net, ShardedOptimizer(partial(torch.optim.AdamW, lr=0.1), net.parameters(), comm)


def _loss(net: nn.Module) -> Tensor:
    loss: Tensor = net[0](torch.ones(1, 3)).sum() + net[1](torch.ones(1, 2).double()).sum()  # type: ignore[index]
    return loss


def _backward(net: nn.Module) -> None:
    _loss(net).backward()  # type: ignore[no-untyped-call]


def _same_everywhere(net: nn.Module, comm: sync.Communicator) -> bool:
    told = comm.all_gather_object([p.tolist() for p in net.parameters()])
    return all(each == told[0] for each in told)


@pytest.mark.parametrize("place", ["before zero_grad", "before step", "after clipping", "after unscaling"])
def test_whatever_was_caught_may_be_abandoned(place: str, url: str) -> None:
    """The loop that everybody writes, also where the step before was skipped after clipping."""

    def body(comm: sync.Communicator) -> list[str]:
        net, optimizer = _made(comm)
        scaler = ShardedGradScaler(comm, "cpu", init_scale=2.0)
        seen: list[str] = []
        caught: list[ValueError | RudaError] = []

        def fail(step: int, here: str) -> None:
            if step in (1, 3) and place == here and comm.rank == 1:
                raise ValueError("unreadable")

        for step in range(5):
            before = [p.detach().clone() for p in net.parameters()]
            try:
                fail(step, "before zero_grad")
                optimizer.zero_grad()
                scaler.scale(_loss(net)).backward()
                fail(step, "before step")
                if place == "after unscaling":
                    scaler.unscale_(optimizer)  # type: ignore[arg-type]
                    fail(step, place)
                if place == "after clipping" or step == 2:
                    optimizer.clip_grad_norm_(1.0)
                    fail(step, place)
                if step != 2:
                    optimizer.step()
                    seen.append("stepped")
            except (ValueError, RudaError) as error:
                optimizer.abandon(error)
                caught.append(error)
                seen.append("abandoned")
                assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
            if place == "after unscaling":
                scaler.update()
            assert _same_everywhere(net, comm)
        for each in caught:
            assert "unreadable" in str(each)
            assert isinstance(each, ValueError if comm.rank == 1 else TensorContractError)
            assert comm.rank == 1 or each.rank == 1  # type: ignore[union-attr]
        assert comm.stats()["in_flight"] == 0
        return seen

    for seen in in_threads(3, body, url, timeout=20):
        assert seen == ["stepped", "abandoned", "abandoned", "stepped"]


@pytest.mark.parametrize("method", ["step", "clip_grad_norm_", "reduce_gradients"])
def test_a_gradient_of_another_shape_is_refused_on_all_ranks(method: str) -> None:
    def body(comm: sync.Communicator) -> None:
        net, optimizer = _made(comm)
        _backward(net)
        weight = net[0].weight  # type: ignore[index]
        if comm.rank == 1:
            weight.grad.data = torch.ones(3)
        with pytest.raises(TensorContractError, match=r"parameter 0 has shape \[3\]") as caught:
            getattr(optimizer, method)(*([1.0] if method == "clip_grad_norm_" else []))
        assert comm.rank == 1 or caught.value.rank == 1
        optimizer.abandon(caught.value)  # they all know: it does nothing
        optimizer.zero_grad()
        _backward(net)
        optimizer.step()
        assert _same_everywhere(net, comm)

    in_threads(2, body, timeout=20)


def test_memory_that_runs_out_while_gradients_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    from ruda_async.training.shards import Flat

    def body(comm: sync.Communicator) -> None:
        net, optimizer = _made(comm)
        _backward(net)
        last = optimizer._flats[-1]
        load = Flat.load

        def no_memory() -> None:
            raise MemoryError("no room")

        if comm.rank == 1:
            monkeypatch.setattr(last, "load", no_memory)
        with pytest.raises(MemoryError if comm.rank == 1 else RudaError, match="no room"):
            optimizer.step()
        if comm.rank == 1:
            monkeypatch.setattr(last, "load", partial(load, last))
        optimizer.step()
        assert _same_everywhere(net, comm)

    in_threads(2, body, timeout=20)


def test_parameters_are_the_same_again_after_an_inner_optimizer_failed() -> None:
    class Failing(torch.optim.SGD):
        broken = False

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.broken:
                raise ArithmeticError("too fast")
            super().step()

    def body(comm: sync.Communicator) -> None:
        net = nn.Linear(3, 3)
        optimizer = ShardedOptimizer(partial(Failing, lr=0.1), net.parameters(), comm)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.optimizer.broken = comm.rank == 1  # type: ignore[attr-defined]
        with pytest.raises(ArithmeticError if comm.rank == 1 else RudaError, match="too fast") as caught:
            optimizer.step()
        optimizer.abandon(caught.value)  # type: ignore[arg-type]
        optimizer.optimizer.broken = False  # type: ignore[attr-defined]
        optimizer.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert _same_everywhere(net, comm)

    in_threads(2, body, timeout=20)
