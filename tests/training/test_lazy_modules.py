"""Modules that make their tensors at the first input: those without one are refused by name, on all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rank_threads import in_threads
from torch import nn

from ruda_async import TensorContractError, sync
from ruda_async.training import GradientSync, ShardedOptimizer


def _net(kind: str) -> nn.Sequential:
    lazy = nn.LazyLinear(3) if kind == "parameter" else nn.LazyBatchNorm1d(affine=False)
    return nn.Sequential(nn.Linear(2, 2), lazy)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("missing", [{1}, {0, 1}], ids=["on one rank", "on both"])
@pytest.mark.parametrize(("kind", "name"), [("parameter", "1.weight"), ("buffer", "1.running_mean")])
def test_gradient_sync(kind: str, name: str, missing: set[int]) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _net(kind)
        x = torch.full((4, 2), 1.0 + comm.rank)
        if comm.rank not in missing:
            net(x)
        with pytest.raises(
            TensorContractError, match=f"{kind} '{name}' is not initialised.* one forward"
        ) as caught:
            GradientSync(net, comm)
        assert caught.value.rank in missing
        net(x)
        GradientSync(net, comm).backward(net(x).square().sum())
        grad = net[0].weight.grad
        assert grad is not None
        everyone = comm.all_gather(grad.reshape(1, -1))
        assert (everyone == everyone[0]).all()

    in_threads(2, body, timeout=20)


@pytest.mark.timeout(30)
def test_buffers_that_stay_each_ranks_own_may_come_later() -> None:
    def body(comm: sync.Communicator) -> None:
        net = _net("buffer")
        gradients = GradientSync(net, comm, broadcast=False)
        gradients.backward(net(torch.full((4, 2), 1.0 + comm.rank)).square().sum())
        assert net[0].weight.grad is not None

    in_threads(2, body, timeout=20)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("frozen", [False, True])
def test_sharded_optimizer(frozen: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _net("parameter")
        for p in net[1].parameters():
            p.requires_grad = not frozen
        x = torch.full((4, 2), 1.0 + comm.rank)
        if comm.rank == 1:
            net(x)
        with pytest.raises(
            TensorContractError, match=r"parameter 2 is not initialised.* one forward"
        ) as caught:
            ShardedOptimizer(partial(torch.optim.SGD, lr=0.1), net.parameters(), comm)
        assert caught.value.rank == 0
        net(x)
        optimizer = ShardedOptimizer(partial(torch.optim.SGD, lr=0.1), net.parameters(), comm)
        net(x).square().sum().backward()
        optimizer.step()
        everyone = comm.all_gather(net[0].weight.detach().reshape(1, -1))
        assert (everyone == everyone[0]).all()

    in_threads(2, body, timeout=20)
