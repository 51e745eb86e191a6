"""`ShardedOptimizer` against the plain optimizer on averaged gradients."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from support import run_ranks
from torch import Tensor, nn

from ruda_async import AsyncCommunicator, CollectiveCancelledError, ConfigError, TensorContractError, sync
from ruda_async.training import NonFiniteGradientError, ShardedOptimizer, off_loop

Factory = Callable[[Any], torch.optim.Optimizer]

FACTORIES: dict[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=0.001, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
}


class Net(nn.Module):
    """Odd sizes, a scalar, two dtypes, tied weights, and layers used seldom or never."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7).double()
        self.b = nn.Linear(7, 7).double()
        self.b2 = nn.Linear(7, 7, bias=False).double()
        self.b2.weight = self.b.weight
        self.single = nn.Linear(5, 3)
        self.seldom = nn.Linear(7, 1).double()
        self.never = nn.Linear(2, 2).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        generator = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)

    def loss(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        hidden = torch.tanh(self.b2(torch.tanh(self.b(torch.tanh(self.a(x)))))) * self.scale
        total: Tensor = hidden.square().sum() + self.single(x.float()).double().square().mean()
        if step == 1 and rank == 0:  # one rank, one step
            total = total + self.seldom(hidden).sum()
        return total


def groups(net: Net) -> list[dict[str, Any]]:
    first = [*net.a.parameters()]
    rest = [p for p in net.parameters() if all(p is not q for q in first)]
    return [{"params": first, "lr": 0.002}, {"params": rest}]


def plainly(factory: Factory, world: int, steps: int, clip: float | None = None) -> tuple[Net, Any]:
    net = Net()
    optimizer = factory(groups(net))
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (net.loss(step, rank) / world).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net, optimizer


def same(net: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        tolerance = 1e-12 if p.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_equals_the_plain_optimizer(name: str, world: int) -> None:
    expected, _ = plainly(FACTORIES[name], world, 4)

    def body(comm: sync.Communicator) -> list[bytes]:
        net = Net()
        optimizer = ShardedOptimizer(FACTORIES[name], groups(net), comm)
        for step in range(4):
            optimizer.zero_grad()
            net.loss(step, comm.rank).backward()
            optimizer.step()
        same(net, expected)
        held = sum(p.numel() for p in optimizer.shard_parameters())
        assert held <= -(-sum(p.numel() for p in net.parameters()) // world) + 4  # one pad a flat
        return [p.detach().numpy().tobytes() for p in net.parameters()]

    results = in_threads(world, body)
    assert all(found == results[0] for found in results)


def test_over_each_transport_with_accumulation_and_clipping(url: str) -> None:
    factory = FACTORIES["adamw"]
    net = Net()
    plain = factory(groups(net))
    norms = []
    for _ in range(2):
        plain.zero_grad()
        for step in range(2):
            for rank in range(3):
                (net.loss(step, rank) / 3).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(net.parameters()), 0.5).item())
        plain.step()

    def body(comm: sync.Communicator) -> None:
        mine = Net()
        optimizer = ShardedOptimizer(factory, groups(mine), comm)
        for norm in norms:
            optimizer.zero_grad()
            for step in range(2):
                mine.loss(step, comm.rank).backward()
            found = optimizer.clip_grad_norm_(0.5)
            assert found.item() == pytest.approx(norm, rel=1e-6)  # some gradients are float32
            optimizer.step()
        for (name, p), q in zip(mine.named_parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    in_threads(3, body, url)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_checkpoint_fits_other_numbers_of_ranks(name: str) -> None:
    """Three ranks save; one process, two ranks and five go on as one process does that never stopped."""
    factory = FACTORIES[name]
    _, plain = plainly(factory, 3, 3)
    saved: dict[str, Any] = {}

    def first(comm: sync.Communicator) -> None:
        net = Net()
        optimizer = ShardedOptimizer(factory, groups(net), comm)
        for step in range(3):
            optimizer.zero_grad()
            net.loss(step, comm.rank).backward()
            optimizer.step()
        whole = optimizer.state_dict()
        assert whole is not None
        only = optimizer.state_dict(root=1)
        assert (only is None) == (comm.rank != 1)
        if only is not None:
            file = io.BytesIO()
            torch.save([copy.deepcopy(net.state_dict()), only], file)
            file.seek(0)
            saved["model"], saved["optimizer"] = torch.load(file, weights_only=True)
            torch.testing.assert_close(only["state"], whole["state"], rtol=0, atol=0)

    in_threads(3, first)
    theirs = plain.state_dict()
    assert saved["optimizer"]["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert saved["optimizer"]["state"][index].keys() == state.keys()
    assert [g["params"] for g in saved["optimizer"]["param_groups"]] == [
        g["params"] for g in theirs["param_groups"]
    ]
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.002

    reference = Net()
    reference.load_state_dict(saved["model"])
    optimizer = factory(groups(reference))
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch may keep tensors
    for step in range(3):
        optimizer.zero_grad()
        reference.loss(step, 0).backward()
        optimizer.step()

    def go_on(comm: sync.Communicator) -> None:
        net = Net()
        sharded = ShardedOptimizer(factory, groups(net), comm)
        net.load_state_dict(saved["model"])
        sharded.load_state_dict(saved["optimizer"])
        for step in range(3):
            sharded.zero_grad()
            net.loss(step, 0).backward()  # alike on all ranks, so the mean is that of one process
            sharded.step()
        for (name, p), q in zip(net.named_parameters(), reference.named_parameters(), strict=True):
            tolerance = 1e-11 if p.dtype == torch.float64 else 1e-4
            torch.testing.assert_close(
                p, q[1], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )

    for world in (1, 2, 5):
        in_threads(world, go_on)


def test_schedulers_and_other_divisors() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = ShardedOptimizer(partial(torch.optim.SGD, lr=1.0), [p], comm, divide_by=4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (p.sum() * 2).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert p.tolist() == [-1.5] * 3  # 1 * 4/4, then 0.5 * 4/4

    in_threads(2, body)


def test_a_factory_that_raises_on_one_rank_fails_the_others_first_step() -> None:
    def body(comm: sync.Communicator) -> None:
        rate = -1.0 if comm.rank == 1 else 1.0
        p = nn.Parameter(torch.zeros(4))
        sgd = partial(torch.optim.SGD, lr=rate)
        if comm.rank == 1:
            with pytest.raises(ValueError, match="learning rate"):
                ShardedOptimizer(sgd, [p], comm)
        else:
            optimizer = ShardedOptimizer(sgd, [p], comm)
            p.sum().backward()
            with pytest.raises(CollectiveCancelledError, match=r"rank 1 .*learning rate") as caught:
                optimizer.step()
            assert caught.value.rank == 1
        comm.barrier()

    in_threads(2, body)


def test_misuse_fails_on_all_ranks() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.zeros(2 + comm.rank))
        sgd = partial(torch.optim.SGD, lr=1.0)
        with pytest.raises(TensorContractError, match="not the same on all ranks") as caught:
            ShardedOptimizer(sgd, [p], comm)
        assert caught.value.rank == 1
        with pytest.raises(ConfigError, match="no parameters"):
            ShardedOptimizer(sgd, [], comm)
        q = nn.Parameter(torch.zeros(4))
        with pytest.raises(ConfigError, match="twice"):
            ShardedOptimizer(sgd, [q, q], comm)
        table = nn.Embedding(4, 2, sparse=comm.rank == 0)
        optimizer = ShardedOptimizer(sgd, table.parameters(), comm)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(TensorContractError, match="sparse") as caught:
            optimizer.step()
        assert comm.rank == 0 or caught.value.rank == 0
        optimizer.zero_grad()
        for nothing in ({}, {"state": {}}, {"state": {}, "param_groups": None}):
            with pytest.raises(ConfigError, match=r"param_groups.*state_dict\(\)"):
                optimizer.load_state_dict(nothing)
        with pytest.raises(ConfigError, match="groups of"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
        state = {0: {"momentum_buffer": torch.zeros(3)}}
        with pytest.raises(ConfigError, match=r"shape \[3\]"):
            optimizer.load_state_dict({"state": state, "param_groups": [{"params": [0]}]})
        matrix = nn.Parameter(torch.ones(4, 4))
        wide = ShardedOptimizer(_Whole, [matrix], comm)
        matrix.sum().backward()
        wide.step()
        with pytest.raises(TensorContractError, match="elementwise"):
            wide.state_dict()
        comm.barrier()

    in_threads(2, body)


class _Whole(torch.optim.Optimizer):
    """Keeps one number for two elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["pairs"] = torch.zeros(len(p) // 2)


def test_an_inner_optimizer_that_fails_fails_everywhere() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["lr"] > 1:
                raise ArithmeticError("too fast")

    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.ones(4))
        optimizer = ShardedOptimizer(partial(Failing, lr=1.0 + comm.rank), [p], comm)
        p.sum().backward()
        with pytest.raises(ArithmeticError if comm.rank else Exception, match="too fast"):
            optimizer.step()
        comm.barrier()

    in_threads(2, body, timeout=50)


async def test_in_an_asynchronous_program() -> None:
    expected, _ = plainly(FACTORIES["adam"], 2, 3)

    async def body(comm: AsyncCommunicator) -> None:
        net = Net()
        optimizer = await off_loop(ShardedOptimizer, FACTORIES["adam"], groups(net), comm)
        for step in range(3):
            optimizer.zero_grad()
            net.loss(step, comm.rank).backward()
            await off_loop(optimizer.step)
        same(net, expected)

    await run_ranks(2, body)


@pytest.mark.parametrize("how", ["an error", "a look at the norm", "another backward"])
def test_a_step_that_was_skipped_leaves_no_gradients_behind(how: str) -> None:
    """The model's zero_grad knows nothing of the shards, and one rank may have no batch afterwards."""

    def body(comm: sync.Communicator) -> None:
        net, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        other.load_state_dict(net.state_dict())
        optimizer = ShardedOptimizer(partial(torch.optim.SGD, lr=0.1), net.parameters(), comm)
        other.load_state_dict(net.state_dict())
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(4):
            net.zero_grad()
            if how == "another backward" and step == 1:
                net(torch.full((1, 3), 9.0, dtype=torch.float64)).sum().backward()
                optimizer.clip_grad_norm_(0.5)
                net.zero_grad()
            bad = step == 1 and how != "another backward"
            factor = float("nan") if bad and comm.rank == 1 else 1.0
            if step != 2 or comm.rank == 0:
                x = torch.full((1, 3), 1.0 + step + comm.rank, dtype=torch.float64)
                (net(x).square().sum() * factor).backward()
            if how == "an error" and bad:
                with pytest.raises(NonFiniteGradientError):
                    optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
                continue
            norm = optimizer.clip_grad_norm_(0.5)
            assert norm.isfinite() == (not bad)
            if bad:
                continue
            optimizer.step()
            plain.zero_grad()
            for rank in range(1 if step == 2 else comm.world_size):
                x = torch.full((1, 3), 1.0 + step + rank, dtype=torch.float64)
                (other(x).square().sum() / comm.world_size).backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            plain.step()
        same(net, other)

    in_threads(2, body)


def test_frozen_parameters_keep_their_numbers() -> None:
    """A plain optimizer is given frozen parameters too, and its state counts them."""

    def body(comm: sync.Communicator) -> None:
        net, other = Net(), Net()
        net.a.requires_grad_(False)
        other.a.requires_grad_(False)
        factory = FACTORIES["adamw"]
        plain = factory([{**group, "params": [*group["params"]]} for group in groups(other)])

        def plain_step(step: int) -> None:
            plain.zero_grad()
            for rank in range(comm.world_size):
                (other.loss(step, rank) / comm.world_size).backward()
            plain.step()

        plain_step(0)
        net.load_state_dict(other.state_dict())
        optimizer = ShardedOptimizer(factory, groups(net), comm)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.zero_grad()
        net.loss(1, comm.rank).backward()
        optimizer.step()
        plain_step(1)
        same(net, other)
        state, expected = optimizer.state_dict(), plain.state_dict()
        assert state is not None
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in expected["param_groups"]]
        assert state["state"].keys() == expected["state"].keys()
        plain.load_state_dict(state)

        net.a.requires_grad_()
        net.loss(2, comm.rank).backward()
        with pytest.raises(TensorContractError, match="parameter 0 was frozen when"):
            optimizer.step()

    in_threads(2, body)


def test_a_model_that_was_moved_is_refused_on_all_ranks() -> None:
    def body(comm: sync.Communicator) -> None:
        net = nn.Linear(3, 2)
        optimizer = ShardedOptimizer(partial(torch.optim.SGD, lr=0.1), net.parameters(), comm)
        if comm.rank == 1:
            net.double()
        net(torch.ones(1, 3, dtype=net.weight.dtype)).sum().backward()
        with pytest.raises(TensorContractError, match=r"data of parameter 0 is no longer") as caught:
            optimizer.step()
        assert comm.rank == 1 or caught.value.rank == 1

    in_threads(2, body)


def test_gradients_may_be_zeroed_instead_of_dropped() -> None:
    def body(comm: sync.Communicator) -> None:
        net = nn.Linear(2, 1)
        optimizer = ShardedOptimizer(partial(torch.optim.AdamW, lr=0.1), net.parameters(), comm)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        before = net.weight.detach().clone()
        assert net.weight.grad is not None
        assert net.weight.grad.tolist() == [[0.0, 0.0]]
        optimizer.step()  # a gradient of zero: weight decay alone
        torch.testing.assert_close(net.weight.detach(), before * (1 - 0.1 * 0.01))
        optimizer.zero_grad(set_to_none=True)
        assert net.weight.grad is None

    in_threads(2, body)
