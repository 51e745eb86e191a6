"""`GradientSync` against the gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from support import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    ConfigError,
    TensorContractError,
    autograd,
    sync,
)
from ruda_async.training import GradientSync, off_loop

WORLD = 3


class Net(nn.Module):
    """Tied weights, two dtypes, a branch for each rank, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Linear(6, 6).double()
        self.tied = nn.Linear(6, 6).double()
        self.tied.weight = self.first.weight
        self.single = nn.Linear(6, 4)  # its rounding must not reach the others, so it has x alone
        self.branches = nn.ModuleList(nn.Linear(6, 1).double() for _ in range(WORLD))
        self.never = nn.Linear(2, 2).double()
        self.scalar = nn.Parameter(torch.ones((), dtype=torch.float64))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        hidden = self.tied(torch.tanh(self.first(x))) * self.scalar
        out: Tensor = self.branches[branch](hidden).sum() + self.single(x.float()).double().square().sum()
        return out


def data(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def expected(world: int, steps: int, op: str = "mean") -> dict[str, Tensor | None]:
    """Gradients of the sum or mean of all ranks' losses, added up over steps."""
    net = Net()
    for step in range(steps):
        for rank in range(world):
            (net(data(rank, step), rank) / (world if op == "mean" else 1)).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def check(net: nn.Module, reference: dict[str, Tensor | None]) -> None:
    for name, p in net.named_parameters():
        want = reference[name]
        if want is None:
            assert p.grad is None, name
            continue
        tolerance = 1e-12 if p.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            p.grad, want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 22])
def test_gradients_are_those_of_one_process(url: str, bucket_bytes: int) -> None:
    reference = expected(WORLD, 1)

    def body(comm: sync.Communicator) -> list[bytes]:
        net = Net()
        gradients = GradientSync(net, comm, bucket_bytes=bucket_bytes)
        for _ in range(3):  # the memory of buckets is used again
            net.zero_grad()
            net(data(comm.rank, 0), comm.rank).backward()
            check(net, reference)
        assert gradients.stats().passes == 3
        return [p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None]

    results = in_threads(WORLD, body, url)
    assert all(found == results[0] for found in results)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_accumulated_steps(op: str) -> None:
    reference = expected(WORLD, 3, op)

    def body(comm: sync.Communicator) -> None:
        net = Net()
        gradients = GradientSync(net, comm, op=op, bucket_bytes=300)
        with gradients.no_sync():
            for step in range(2):
                net(data(comm.rank, step), comm.rank).backward()
        assert gradients.stats().passes == 0
        net(data(comm.rank, 2), comm.rank).backward()
        check(net, reference)

    in_threads(WORLD, body)


def test_means_may_be_accumulated_after_they_were_synchronised() -> None:
    reference = expected(WORLD, 2)

    def body(comm: sync.Communicator) -> None:
        net = Net()
        GradientSync(net, comm)
        for step in range(2):
            net(data(comm.rank, step), comm.rank).backward()
        check(net, reference)

    in_threads(WORLD, body)


def test_a_sum_is_not_summed_again() -> None:
    def body(comm: sync.Communicator) -> None:
        net = nn.Linear(2, 1).double()
        gradients = GradientSync(net, comm, op="sum")
        x = torch.ones(1, 2, dtype=torch.float64)
        net(x).sum().backward()
        with pytest.raises(TensorContractError, match="zero gradients between passes"):
            net(x).sum().backward()
        for in_place in (True, False):
            net.zero_grad(set_to_none=not in_place)
            gradients.backward(net(x).sum())
            assert net.weight.grad is not None
            assert net.weight.grad.tolist() == [[2, 2]]

    in_threads(2, body)


def test_a_parameter_used_only_in_an_accumulated_pass() -> None:
    def body(comm: sync.Communicator) -> None:
        a, b = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        gradients = GradientSync([a, b], comm)
        with gradients.no_sync():
            (a.sum() * (comm.rank + 1)).backward()
        b.sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad.tolist(), b.grad.tolist()) == ([1.5, 1.5], [1, 1])

    in_threads(2, body)


def test_a_rank_whose_loss_reaches_nothing() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.ones(2, dtype=torch.float64))
        gradients = GradientSync([p], comm)
        for way in range(3):
            p.grad = None
            if comm.rank == 0:
                gradients.backward(p.sum())
            elif way == 0:
                gradients.backward(None)
            elif way == 1:
                gradients.backward(torch.zeros(()))
            else:
                gradients.finish()
            assert p.grad is not None
            assert p.grad.tolist() == [0.5, 0.5]

    in_threads(2, body)


def test_communication_ends_while_backward_still_runs() -> None:
    def body(comm: sync.Communicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        gradients = GradientSync(net, comm, bucket_bytes=8 * 72)
        hidden = net[0](torch.randn(3, 8, generator=generator, dtype=torch.float64))
        result = net[1](hidden)

        class Gate(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                assert gradients._pass is not None
                gradients._pass.calls[0].result(20)  # the last layer's bucket is reduced by now
                return gradient

        net[1](Gate.apply(hidden)).sum().backward()
        del result
        early = {each.bucket: each.early for each in gradients.timeline()}
        assert early[0]
        assert set(early) == {0, 1}

    in_threads(2, body)


def test_statistics_count_bytes_and_times() -> None:
    def body(comm: sync.Communicator) -> None:
        net = nn.Linear(4, 2, bias=False).double()
        gradients = GradientSync(net, comm)
        for _ in range(2):
            gradients.backward(net(torch.ones(1, 4, dtype=torch.float64)).sum())
        stats = gradients.stats()
        assert (stats.passes, stats.nbytes) == (2, 2 * 8 * (4 * 2 + 1))  # with one flag
        assert stats.in_flight > 0
        assert 0 <= stats.overlapped <= stats.in_flight
        (times,) = gradients.timeline()
        assert times.started < times.ended

    in_threads(2, body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        generator = torch.Generator().manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
        for p in net.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        alone = copy.deepcopy(net)
        GradientSync(net, comm, bucket_bytes=1)
        inputs = [torch.full((2, 4), float(r), dtype=torch.float64, requires_grad=True) for r in range(2)]
        middle = net[0](inputs[comm.rank])
        inner: Any = checkpoint(net[1], middle, use_reentrant=reentrant)
        net[2](inner).sum().backward()
        (sum(alone(x).sum() for x in inputs) / 2).backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)

    in_threads(2, body)


def test_a_second_gradient_in_one_pass_is_refused_and_works_without_overlap() -> None:
    def body(comm: sync.Communicator) -> None:
        layer = nn.Linear(4, 4, bias=False).double()
        with torch.no_grad():
            layer.weight.copy_(torch.eye(4, dtype=torch.float64))

        def loss() -> Tensor:
            x = torch.full((1, 4), comm.rank + 1.0, dtype=torch.float64, requires_grad=True)
            once: Any = checkpoint(layer, x, use_reentrant=True)
            twice: Any = checkpoint(layer, once, use_reentrant=True)
            total: Tensor = twice.sum()
            return total

        gradients = GradientSync(layer, comm)
        with pytest.raises(TensorContractError, match="overlap=False"):
            loss().backward()
        gradients.remove()
        layer.zero_grad()
        late = GradientSync(layer, comm, overlap=False)
        late.backward(loss())
        assert layer.weight.grad is not None
        assert layer.weight.grad.unique().tolist() == [3.0]  # the mean of 2 and 4

    in_threads(2, body)


def test_halves_on_the_wire() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.zeros(257))
        gradients = GradientSync([p], comm, compress=torch.bfloat16)
        values = [torch.randn(257, generator=torch.Generator().manual_seed(r)) for r in range(WORLD)]
        gradients.backward((p * values[comm.rank]).sum())
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        total = (values[0].bfloat16().float() + values[1].bfloat16().float()) + values[2].bfloat16().float()
        assert torch.equal(p.grad, (total / WORLD).bfloat16().float())
        assert gradients.stats().nbytes == 2 * 258

    in_threads(WORLD, body)


def test_experts_in_a_grid_belong_to_other_groups() -> None:
    """2 x 2: a column replicates its experts; one parameter is this rank's alone."""

    def body(comm: sync.Communicator) -> None:
        column = comm.split(comm.rank % 2)
        shared, expert, own = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
        gradients = GradientSync([shared], comm, groups=[([expert], column), ([own], None)])
        for _ in range(2):
            for p in (shared, expert, own):
                p.grad = None
            weight = 10.0**comm.rank
            gradients.backward(weight * (shared.sum() + expert.sum() + own.sum()))
            assert shared.grad is not None
            assert expert.grad is not None
            assert own.grad is not None
            assert shared.grad[0].item() == 1111 / 4
            assert expert.grad[0].item() == (101 if comm.rank % 2 == 0 else 1010) / 4
            assert own.grad[0].item() == weight / 4

    in_threads(4, body)


def test_two_in_one_pass_used_in_another_order_on_each_rank() -> None:
    def body(comm: sync.Communicator) -> None:
        a, b, c, d = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(4))
        GradientSync([a, b], comm)
        GradientSync([c, d], comm)
        loss = (a * 2 if comm.rank else c * 2) + (d * 4 if comm.rank else b * 4)
        loss.sum().backward()
        grads = [p.grad.item() for p in (a, b, c, d) if p.grad is not None]
        assert grads == [1, 2, 1, 2]

    in_threads(2, body)


def test_first_broadcast_and_disagreement() -> None:
    def body(comm: sync.Communicator) -> None:
        net = nn.BatchNorm1d(3)
        with torch.no_grad():
            net.weight.fill_(comm.rank)
            assert net.running_mean is not None
            net.running_mean.fill_(comm.rank + 5)
        GradientSync(net, comm, broadcast=False)
        assert net.weight.tolist() == [comm.rank] * 3
        GradientSync(net, comm)
        assert net.weight.tolist() == [0] * 3
        assert net.running_mean.tolist() == [5] * 3

        other = nn.Linear(2 + comm.rank, 1)
        with pytest.raises(TensorContractError, match=r"weight: float32 \[1, 2\].*rank 1") as caught:
            GradientSync(other, comm)
        assert caught.value.rank == 1
        with pytest.raises(TensorContractError, match=r"not the same.*sum"):
            GradientSync(net, comm, op="sum" if comm.rank else "mean")
        kind = torch.complex64 if comm.rank else torch.float32
        with pytest.raises(TensorContractError, match="complex64") as caught:
            GradientSync([nn.Parameter(torch.zeros(1, dtype=kind))], comm)
        assert caught.value.rank == 1
        for wrong in ({"op": "max"}, {"bucket_bytes": 0}, {"compress": torch.float64}):
            options: dict[str, Any] = wrong if comm.rank else {}  # rank 0's are right, and fail too
            expected = ConfigError if comm.rank else CollectiveCancelledError
            with pytest.raises(expected, match=next(iter(wrong))) as refusal:
                GradientSync(net, comm, **options)
            assert comm.rank or refusal.value.rank == 1
        comm.barrier()

    in_threads(2, body)


def test_large_and_small_tensors_are_broadcast() -> None:
    def body(comm: sync.Communicator) -> None:
        sizes = [(3,), (1024, 300), (2, 2), (400, 1000)]
        values = [torch.full(size, float(10 * comm.rank + i)) for i, size in enumerate(sizes)]
        values[3] = values[3].t()  # large, and not contiguous
        parameters = [nn.Parameter(value) for value in values]
        GradientSync(parameters, comm)
        assert [p.unique().tolist() for p in parameters] == [[0], [1], [2], [3]]

    in_threads(3, body)


def test_one_rank_alone() -> None:
    def body(comm: sync.Communicator) -> None:
        net = Net()
        GradientSync(net, comm)
        net(data(0, 0), 0).backward()
        check(net, expected(1, 1))

    in_threads(1, body)


async def test_in_an_asynchronous_program(url: str) -> None:
    reference = expected(WORLD, 1)

    async def body(comm: AsyncCommunicator) -> None:
        net = Net()
        with pytest.raises(autograd.BlockedLoopError, match="off_loop"):
            GradientSync(net, comm)
        gradients = await off_loop(GradientSync, net, comm)
        await off_loop(gradients.backward, net(data(comm.rank, 0), comm.rank))
        check(net, reference)
        net.zero_grad()
        await autograd.backward(net(data(comm.rank, 0), comm.rank))
        check(net, reference)

    await run_ranks(WORLD, body, url=url)
