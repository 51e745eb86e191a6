"""`GradientSync.backward` over a graph with collectives: a rank that fails in it fails the step on all."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from support import BETWEEN_PROCESSES, fresh_url, run_programs, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ruda_async import AsyncCommunicator, TensorContractError, moe, sync
from ruda_async.training import GradientSync, off_loop

WIDTH, EXPERTS, RANKS = 4, 6, 3
LAYOUT = moe.ExpertLayout.even(EXPERTS, RANKS)
_seeding = threading.Lock()

# Deadlines are far away: what ends within a test was told.


def _fail(*_: Any) -> None:
    raise ArithmeticError("a check that fails")


class Model(nn.Module):
    """Two layers of experts, with routers, and a head; of the experts those in `owned`."""

    def __init__(self, owned: range) -> None:
        super().__init__()
        with _seeding:
            torch.manual_seed(1)
            self.routers = nn.ModuleList([nn.Linear(WIDTH, EXPERTS) for _ in range(2)])
            self.head = nn.Linear(WIDTH, 1)
            layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)] for _ in range(2)]
        self.experts = nn.ModuleList([nn.ModuleList([layer[i] for i in owned]) for layer in layers])
        self.double()

    def forward(self, x: Tensor, layer: Callable[..., Tensor], hidden: list[Tensor] | None = None) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            x = x + layer(x, router(x), experts).tanh()
            if hidden is not None:
                hidden.append(x)
        return self.head(x).square().sum()  # type: ignore[no-any-return]


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3 + rank, WIDTH, dtype=torch.float64, generator=generator)


def _expected(steps: list[int]) -> Model:
    """What one process makes of these steps, by the mean over ranks of the losses."""
    model = Model(range(EXPERTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        batch = torch.cat([_batch(step, rank) for rank in range(RANKS)])
        (model(batch, lambda x, logits, experts: moe.reference(x, logits, experts, 2)) / RANKS).backward()
        optimizer.step()
    return model


def _check(model: Model, rank: int, steps: list[int]) -> None:
    expected = _expected(steps)
    owned = LAYOUT.local(rank)
    for layer, whole in zip(model.experts, expected.experts, strict=True):
        for ours, theirs in zip(layer, whole[owned.start : owned.stop], strict=True):
            torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(model.head.weight, expected.head.weight, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(model.routers[0].weight, expected.routers[0].weight, rtol=1e-11, atol=1e-13)


#: Which rank fails in which step, and behind which layer: the last one's exchanges come first in backward.
FAULTS = {1: (1, 1), 2: (1, 0), 4: (0, 1), 5: (2, 0)}


def _spoil(step: int, rank: int, hidden: list[Tensor]) -> None:
    culprit, place = FAULTS.get(step, (-1, 0))
    if rank == culprit:
        hidden[place].register_hook(_fail)


def _heard(step: int, rank: int, error: Exception) -> None:
    culprit = FAULTS[step][0]
    if rank == culprit:
        assert isinstance(error, ArithmeticError)
    else:
        assert isinstance(error, TensorContractError)
        assert f"rank {culprit} refused" in str(error)
        assert "ArithmeticError: a check that fails" in str(error)


@pytest.mark.timeout(50)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_that_fails_on_one_rank_is_skipped_by_all(url: str, checkpointed: bool) -> None:
    def body(comm: sync.Communicator) -> None:
        model = Model(LAYOUT.local(comm.rank))
        gradients = GradientSync(model, comm, groups=[(model.experts.parameters(), None)], bucket_bytes=200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        channels = comm.stats()["channels"]
        done = []

        def layer(x: Tensor, logits: Tensor, experts: nn.ModuleList) -> Tensor:
            def run(x: Tensor, logits: Tensor) -> Tensor:
                return moe.moe_layer(comm, x, logits, moe.per_expert(list(experts)), LAYOUT, 2)

            wrapped: Any = partial(checkpoint, run, use_reentrant=False) if checkpointed else run
            return wrapped(x, logits)  # type: ignore[no-any-return]

        for step in range(7):
            optimizer.zero_grad()
            hidden: list[Tensor] = []
            loss = model(_batch(step, comm.rank), layer, hidden)
            _spoil(step, comm.rank, hidden)
            try:
                gradients.backward(loss)
            except (ArithmeticError, TensorContractError) as error:
                _heard(step, comm.rank, error)
                gradients.abandon(error)
                continue
            optimizer.step()
            done.append(step)
        assert done == [0, 3, 6]
        _check(model, comm.rank, done)
        comm.barrier()
        assert comm.stats()["channels"] == channels
        assert comm.stats()["in_flight"] == 0

    in_threads(RANKS, body, url, timeout=90, limit=45)


@pytest.mark.timeout(50)
async def test_the_same_in_an_asynchronous_program() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        model = Model(LAYOUT.local(comm.rank))
        gradients = await off_loop(
            lambda: GradientSync(model, comm, groups=[(model.experts.parameters(), None)])
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        done = []
        for step in range(7):
            optimizer.zero_grad()
            x = _batch(step, comm.rank)
            hidden = []
            for router, experts in zip(model.routers, model.experts, strict=True):
                run = moe.per_expert(list(experts))  # type: ignore[call-overload]
                x = x + (await moe.aio.moe_layer(comm, x, router(x), run, LAYOUT, 2)).tanh()
                hidden.append(x)
            loss = model.head(x).square().sum()
            _spoil(step, comm.rank, hidden)
            try:
                await off_loop(gradients.backward, loss)
            except (ArithmeticError, TensorContractError) as error:
                _heard(step, comm.rank, error)
                await off_loop(gradients.abandon, error)
                continue
            optimizer.step()
            done.append(step)
        assert done == [0, 3, 6]
        _check(model, comm.rank, done)

    await run_ranks(RANKS, body, timeout=90, limit=45)


PROCESS = textwrap.dedent(
    """
    import sys, time
    import torch
    from ruda_async import TensorContractError, moe, sync
    from ruda_async.training import GradientSync

    torch.set_num_threads(1)
    url, rank = sys.argv[1], int(sys.argv[2])
    layout = moe.ExpertLayout.even(4, 2)

    def fail(gradient):
        raise FloatingPointError("NaN here")

    with sync.connect(url, rank=rank, world_size=2, timeout=100) as comm:
        router, expert = torch.nn.Linear(4, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        both = torch.nn.ModuleList([router, expert])
        gradients = GradientSync(both, comm, groups=[(expert.parameters(), None)])
        for step in range(2):
            x = torch.ones(3, 4)
            y = moe.moe_layer(comm, x, router(x), moe.per_expert(list(expert)), layout, 2)
            if (step, rank) == (0, 1):
                y.register_hook(fail)
            loss = y.square().sum()
            comm.barrier()
            began = time.monotonic()
            try:
                gradients.backward(loss)
                print("trained", flush=True)
            except (FloatingPointError, TensorContractError) as error:
                gradients.abandon(error)
                at_once = time.monotonic() - began < 20
                print(type(error).__name__, "NaN here" in str(error), at_once, flush=True)
            both.zero_grad()
    """
)


@pytest.mark.timeout(90)
async def test_in_processes() -> None:
    if not BETWEEN_PROCESSES:
        pytest.skip("no transport between processes")
    outputs = await run_programs(PROCESS, fresh_url(BETWEEN_PROCESSES[0]), 2, 80)
    printed = [out.splitlines() for out, _, _ in outputs]
    errors = ["TensorContractError", "FloatingPointError"]
    assert printed == [[f"{error} True True", "trained"] for error in errors], outputs
