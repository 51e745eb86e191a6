"""What is the same on all ranks after a constructor: all parameters, frozen ones too, and buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from torch import nn

from ruda_async import TensorContractError, sync
from ruda_async.training import GradientSync, ShardedOptimizer


def _model(rank: int) -> nn.Sequential:
    """A frozen backbone, part of it shared, another part integers, and a head; filled with the rank."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1), nn.BatchNorm1d(1))
    net[1].weight = net[0].weight
    net[0].requires_grad_(False)
    net.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(rank + 4)
    return net


@pytest.mark.parametrize("made", ["GradientSync", "of parameters", "ShardedOptimizer"])
def test_frozen_parameters_are_those_of_rank_0(made: str, url: str) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _model(comm.rank)
        place = net[0].weight.data_ptr()
        if made == "ShardedOptimizer":
            ShardedOptimizer(partial(torch.optim.SGD, lr=0.1), net.parameters(), comm)
        else:
            GradientSync(net if made == "GradientSync" else net.parameters(), comm)
        for name, p in net.named_parameters():
            assert p.tolist() == torch.full_like(p, 4).tolist(), name
        assert net[0].weight.grad is None
        assert net[1].weight is net[0].weight
        assert net[0].weight.data_ptr() == place  # written in place, as others may share it

    in_threads(3, body, url)


def test_frozen_parameters_of_a_group_are_those_of_its_first_rank() -> None:
    def body(comm: sync.Communicator) -> tuple[float, float]:
        column = comm.split(comm.rank % 2)
        net, own = _model(comm.rank), nn.Parameter(torch.ones(1) * comm.rank, requires_grad=False)
        experts = nn.Parameter(torch.ones(1) * comm.rank, requires_grad=False)
        GradientSync(net, comm, groups=[([experts], column), ([own], None)])
        return experts.item(), own.item()

    assert in_threads(4, body) == [(0, 0), (1, 1), (0, 2), (1, 3)]


@pytest.mark.parametrize("what", ["frozen", "buffer"])
def test_other_frozen_parameters_and_buffers_are_named(what: str) -> None:
    def body(comm: sync.Communicator) -> None:
        net: Any = nn.Linear(2, 1)
        value = torch.zeros(1 + comm.rank)
        if what == "buffer":
            net.register_buffer("extra", value)
        else:
            net.extra = nn.Parameter(value, requires_grad=False)
        with pytest.raises(TensorContractError, match=rf"{what} extra: float32 \[2\]' on rank 1"):
            GradientSync(net, comm)
        GradientSync(net, comm, broadcast=False)  # each rank's own then

    in_threads(2, body)
