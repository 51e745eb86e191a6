"""`ShardedGradScaler` against torch's scaler in one process: the same steps are skipped, on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from support import run_ranks
from torch import Tensor, nn

from ruda_async import AsyncCommunicator, CollectiveCancelledError, sync
from ruda_async.training import GradientSync, ShardedGradScaler, ShardedOptimizer, clip_grad_norm_, off_loop

WORLD, STEPS = 3, 8
OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}

# Infinite in step 1 on rank 2, NaN in step 4 on rank 0, in all others on none.
SPOILT = {(1, 2): float("inf"), (4, 0): float("nan")}


def _net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(3)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return net


def _loss(net: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss = net(torch.randn(6, 4, generator=generator)).square().mean()
    # Spoils one gradient of many, so that one shard alone has it.
    bias = net[2].bias  # type: ignore[index]
    return loss + bias.sum() * SPOILT.get((step, rank), 0.0)  # type: ignore[no-any-return]


def _expected(max_norm: float | None) -> tuple[list[float], list[Tensor]]:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(sum(_loss(net, step, rank) for rank in range(WORLD)) / WORLD).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in net.parameters()]


def _check(net: nn.Module, scales: list[float], max_norm: float | None) -> None:
    expected, parameters = _expected(max_norm)
    assert scales == expected
    assert min(scales) < max(scales)
    for ours, theirs in zip(net.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_sharded_optimizer(max_norm: float | None, url: str) -> None:
    def body(comm: sync.Communicator) -> None:
        net = _net()
        optimizer = ShardedOptimizer(partial(torch.optim.AdamW, lr=0.01), net.parameters(), comm)
        scaler: Any = ShardedGradScaler(comm, "cpu", **OPTIONS)
        scales = []
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(_loss(net, step, comm.rank)).backward()
            if max_norm is not None:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(max_norm)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        _check(net, scales, max_norm)

    in_threads(WORLD, body, url, timeout=30)


@pytest.mark.timeout(40)
def test_a_plain_optimizer_with_experts_of_each_ranks_own() -> None:
    def body(comm: sync.Communicator) -> None:
        net, mine = _net(), nn.Parameter(torch.ones(2))
        gradients = GradientSync([*net.parameters(), mine], comm, groups=[([mine], None)])
        optimizer = torch.optim.AdamW([*net.parameters(), mine], lr=0.01)
        scaler = ShardedGradScaler(comm, "cpu", **OPTIONS)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            before = mine.detach().clone()
            spoilt = float("inf") if (step, comm.rank) == (1, 1) else 1.0
            gradients.backward(scaler.scale(_loss(net, 0, comm.rank) + (mine * spoilt).sum()))
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 10.0, comm, sharded=[mine])
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert torch.equal(mine, before) == (step == 1)
        assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]

    in_threads(2, body, timeout=30)


@pytest.mark.timeout(40)
def test_a_rank_whose_shard_is_empty() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.ones(1))
        optimizer = ShardedOptimizer(partial(torch.optim.SGD, lr=1.0), [p], comm)
        scaler: Any = ShardedGradScaler(comm, "cpu", init_scale=4.0)
        for step, spoilt in enumerate((1.0, float("inf"), 1.0)):
            optimizer.zero_grad()
            factor = spoilt if comm.rank == 1 else 1.0
            scaler.scale((p * 0.25 * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert p.item() == [0.75, 0.75, 0.5][step]
            assert scaler.get_scale() == [4, 2, 2][step]

    in_threads(2, body, timeout=30)


@pytest.mark.timeout(40)
def test_an_error_on_one_rank_is_one_for_all() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.ones(3, dtype=torch.float16 if comm.rank == 1 else torch.float32))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = ShardedGradScaler(comm, "cpu")
        scaler.scale(p.float().sum()).backward()
        error = ValueError if comm.rank == 1 else CollectiveCancelledError
        with pytest.raises(error, match="FP16"):
            scaler.unscale_(optimizer)
        assert comm.all_reduce_sum(torch.ones(1)).item() == 2
        with pytest.raises(TypeError, match="not a communicator"):
            ShardedGradScaler(None, "cpu")

    in_threads(2, body, timeout=30)


@pytest.mark.timeout(40)
async def test_in_an_asynchronous_program() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        net = _net()
        factory = partial(torch.optim.AdamW, lr=0.01)
        optimizer = await off_loop(ShardedOptimizer, factory, net.parameters(), comm)
        scaler: Any = ShardedGradScaler(comm, "cpu", **OPTIONS)
        scales = []
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(_loss(net, step, comm.rank)).backward()
            await off_loop(scaler.step, optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        _check(net, scales, None)

    await run_ranks(WORLD, body, timeout=30)
