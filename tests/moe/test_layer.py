"""The sharded layer against one process: values and all gradients, in float64."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import in_threads
from support import SCHEMES, fresh_url, outcome, run_ranks
from torch import Tensor, nn

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveMismatchError,
    RudaError,
    TensorContractError,
    autograd,
    moe,
    sync,
)
from ruda_async.moe import blocking, selecting
from ruda_async.moe.layer import _orders, start

WIDTH = 4


def _expert(number: int, out: int = WIDTH) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, out)).double()


_modules_lock = threading.Lock()


def _experts(numbers: range, out: int = WIDTH) -> list[nn.Module]:
    with _modules_lock:  # torch.manual_seed is shared by the ranks' threads
        return [_expert(number, out) for number in numbers]


def _inputs(rank: int, tokens: int, experts: int, to_one: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator)
    logits = torch.randn(tokens, experts, dtype=torch.float64, generator=generator)
    if to_one:
        logits[:, experts - 1] += 100
    return values.requires_grad_(), logits.requires_grad_()


def _loss(output: Tensor, rank: int) -> Tensor:
    ramp = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).view(output.shape)
    return ((rank + 1) * ramp * output**2).sum()


def _gradients(modules: list[nn.Module]) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


class Setting:
    """One layout, numbers of tokens, and router."""

    def __init__(self, counts: list[int], tokens: list[int], k: int, **options: Any) -> None:
        self.layout = moe.ExpertLayout.of_counts(counts)
        self.tokens = tokens
        self.k = k
        self.to_one = options.pop("to_one", False)
        self.out = options.pop("out", WIDTH)
        self.options = options

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        return _inputs(rank, self.tokens[rank], self.layout.experts, self.to_one)

    def expected(self) -> tuple[Tensor, ...]:
        """Outputs, and the gradients of tokens, logits and all experts."""
        pairs = [self.inputs(rank) for rank in range(len(self.tokens))]
        tokens = torch.cat([x for x, _ in pairs]).detach().requires_grad_()
        logits = torch.cat([x for _, x in pairs]).detach().requires_grad_()
        modules = _experts(range(self.layout.experts), self.out)
        output = moe.reference(tokens, logits, modules, self.k, **self.options)
        parts = output.split(self.tokens)
        sum((_loss(part, rank) for rank, part in enumerate(parts)), torch.zeros(())).backward()
        assert tokens.grad is not None
        assert logits.grad is not None
        return output.detach(), tokens.grad, logits.grad, *_gradients(modules)

    def check(self, found: list[tuple[Tensor, Tensor, Tensor, list[Tensor]]]) -> None:
        output, tokens, logits, *experts = self.expected()
        tight = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(torch.cat([f[0] for f in found]), output, **tight)
        torch.testing.assert_close(torch.cat([f[1] for f in found]), tokens, **tight)
        torch.testing.assert_close(torch.cat([f[2] for f in found]), logits, **tight)
        ours = [gradient for f in found for gradient in f[3]]
        assert len(ours) == len(experts)
        for one, other in zip(ours, experts, strict=True):
            torch.testing.assert_close(one, other, **tight)


SETTINGS = {
    "even": Setting([2, 2, 2], [5, 7, 6], 2),
    "experts not divisible by ranks": Setting([3, 2, 2], [5, 7, 6], 3),
    "zero tokens on a rank": Setting([2, 1, 2], [5, 0, 6], 2),
    "no tokens anywhere": Setting([1, 1, 1], [0, 0, 0], 1),
    "empty owners": Setting([0, 4, 0], [5, 7, 6], 2),
    "empty owner of another width": Setting([3, 0, 2], [5, 7, 6], 2, out=3),
    "all tokens to one expert": Setting([2, 2, 1], [5, 7, 6], 1, to_one=True),
    "every expert": Setting([1, 2, 1], [2, 3, 1], 4),
    "grouped sigmoid": Setting(
        [2, 3, 1],
        [5, 7, 6],
        2,
        method="grouped_sigmoid",
        groups=3,
        top_groups=2,
        bias=torch.linspace(-1, 1, 6, dtype=torch.float64),
        scale=2.5,
    ),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_equal_to_one_process(name: str, pooled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS[name]
    if pooled:  # as if the rows were large
        monkeypatch.setattr(selecting, "POOLED", 1)

    def body(comm: sync.Communicator) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        tokens, logits = setting.inputs(comm.rank)
        modules = _experts(setting.layout.local(comm.rank), setting.out)
        output = moe.moe_layer(
            comm,
            tokens,
            logits,
            moe.per_expert(modules),
            setting.layout,
            setting.k,
            out_features=setting.out,
            **setting.options,
        )
        _loss(output, comm.rank).backward()
        assert tokens.grad is not None
        assert logits.grad is not None
        return output.detach(), tokens.grad, logits.grad, _gradients(modules)

    setting.check(in_threads(3, body))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scheme", [s for s in ("memory", "tcp", "shm") if s in SCHEMES])
def test_large_rows_lie_where_they_are_read(scheme: str) -> None:
    """With and without gradients, over and over in the same memory, while earlier outputs are held."""
    layout = moe.ExpertLayout.even(4, 2)
    inputs = [
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(rank))
            for shape in [(300, 512), (300, 4)]
        ]
        for rank in range(2)
    ]

    def body(comm: sync.Communicator) -> list[Tensor]:
        tokens, logits = inputs[comm.rank]
        outputs = []
        for step in range(6):
            with torch.set_grad_enabled(step % 2 == 0):
                x = (tokens + step).requires_grad_(step % 2 == 0)
                outputs.append(moe.moe_layer(comm, x, logits, lambda rows, _: rows * 2, layout, 2))
        return [output.detach() for output in outputs]

    for rank, outputs in enumerate(in_threads(2, body, fresh_url(scheme))):
        tokens, logits = inputs[rank]
        for step, output in enumerate(outputs):
            expected = moe.reference(tokens + step, logits, [lambda rows: rows * 2] * 4, 2)
            torch.testing.assert_close(output, expected)


def test_selecting_into_given_memory_is_differentiable_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "POOLED", 1)
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 0, 2, 3])

    def call(values: Tensor) -> Tensor:
        selected = selecting.select(values, index, lambda shape, dtype: torch.empty(shape, dtype=dtype))
        assert selected.requires_grad
        return selected.mul_(1) ** 2

    assert torch.autograd.gradcheck(call, (rows,))
    assert torch.autograd.gradgradcheck(call, (rows,))


@given(st.data(), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3))
def test_the_order_of_experts_and_back(data: st.DataObject, sources: int, local: int, notes: int) -> None:
    row = st.lists(st.integers(0, 3), min_size=local, max_size=local)
    counts = data.draw(st.lists(row, min_size=sources, max_size=sources))
    arrived: list[tuple[int, int, int] | None] = []
    for source, told in enumerate(counts):
        arrived += [None] * notes
        arrived += [(expert, source, n) for expert, count in enumerate(told) for n in range(count)]
    order, inverse = _orders(np.array(counts, np.int64).reshape(sources, local), notes)
    rows = [row for row in arrived if row is not None]
    assert [arrived[at] for at in order] == sorted(rows)
    assert [sorted(rows)[at] for at in inverse] == rows


def test_rows_that_nobody_needs_are_let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came is gone while the experts compute, and what they got while their results travel."""
    lock = threading.Lock()
    came: dict[int, list[weakref.ref[Tensor]]] = {}
    given_back: list[bool] = []
    select, run = blocking.select, blocking.run_on

    def selecting_from(rows: Tensor, *args: Any) -> Tensor:
        selected = select(rows, *args)
        came[threading.get_ident()] = [weakref.ref(rows), weakref.ref(selected)]
        return selected

    def running(*args: Any) -> Tensor:
        with lock:
            given_back.append(came[threading.get_ident()][1]() is None)
        return run(*args)

    def experts(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        with lock:
            given_back.append(came[threading.get_ident()][0]() is None)
        return rows * 2

    monkeypatch.setattr(blocking, "select", selecting_from)
    monkeypatch.setattr(blocking, "run_on", running)

    def body(comm: sync.Communicator) -> None:
        with torch.no_grad():
            layout = moe.ExpertLayout.even(4, 2)
            moe.moe_layer(comm, torch.randn(9, WIDTH), torch.randn(9, 4), experts, layout, 2)

    in_threads(2, body)
    assert given_back == [True] * 4


@pytest.mark.timeout(30)
@pytest.mark.parametrize("scheme", ["memory", "tcp"])
async def test_awaited(scheme: str) -> None:
    setting = SETTINGS["empty owner of another width"]

    async def body(comm: AsyncCommunicator) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        tokens, logits = setting.inputs(comm.rank)
        modules = _experts(setting.layout.local(comm.rank), setting.out)
        compute = moe.per_expert(modules)

        async def experts(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            return await asyncio.to_thread(compute, rows, counts)

        output = await moe.aio.moe_layer(
            autograd.differentiable(comm),
            tokens,
            logits,
            experts,
            setting.layout,
            setting.k,
            out_features=setting.out,
        )
        await autograd.backward(_loss(output, comm.rank))
        assert tokens.grad is not None
        assert logits.grad is not None
        return output.detach(), tokens.grad, logits.grad, _gradients(modules)

    setting.check(await run_ranks(3, body, url=fresh_url(scheme)))


@pytest.mark.timeout(30)
def test_inference_is_without_a_graph_and_in_half_precision() -> None:
    def body(comm: sync.Communicator) -> None:
        layout = moe.ExpertLayout.even(4, 2)
        x = torch.ones(3, WIDTH, dtype=torch.bfloat16)
        with torch.no_grad():
            double = moe.per_expert([lambda rows: rows * 2] * 2)
            output = moe.moe_layer(comm, x, torch.zeros(3, 4), double, layout, 2)
        assert output.dtype == torch.bfloat16
        assert output.grad_fn is None
        assert output.unique().tolist() == [2]

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_frozen_tokens_on_some_ranks_and_experts_that_ignore_their_rows() -> None:
    """Which ranks need gradients differs; all the same, everyone enters backward."""

    def body(comm: sync.Communicator) -> None:
        layout = moe.ExpertLayout([0, 1, 2])
        x = torch.ones(2, WIDTH, requires_grad=comm.rank == 0)
        constant = torch.ones(WIDTH, requires_grad=True)

        def experts(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            return rows * 3 if comm.rank == 0 else constant.expand(len(rows), WIDTH)

        output = moe.moe_layer(comm, x, torch.zeros(2, 2), experts, layout, 2)
        output.sum().backward()
        if comm.rank == 0:
            assert x.grad is not None
            assert x.grad.unique().tolist() == [1.5]  # half of expert 0
            assert constant.grad is None
        else:
            assert x.grad is None
            assert constant.grad is not None
            assert constant.grad.tolist() == [2] * WIDTH  # half of four tokens

    in_threads(2, body)


@pytest.mark.timeout(30)
async def test_requests_on_channels_in_any_order() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        layout = moe.ExpertLayout.even(3, 2)

        async def request(i: int) -> None:
            x = torch.full((i % 4, WIDTH), float(i))
            identity = moe.per_expert([nn.Identity()] * layout.counts[comm.rank])
            async with comm.channel(f"request {i}") as channel:
                output = await moe.aio.moe_layer(channel, x, torch.zeros(i % 4, 3), identity, layout, 2)
            assert not output.requires_grad
            torch.testing.assert_close(output, x)

        await asyncio.gather(*(request(i) for i in list(range(30))[:: 1 - 2 * comm.rank]))

    with torch.no_grad():  # one block around all tasks, since the mode is the thread's
        await run_ranks(2, body)


@pytest.mark.timeout(30)
async def test_grad_mode_switched_by_another_task_meanwhile() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        layout = moe.ExpertLayout.even(2, 2)
        x = torch.ones(2, WIDTH, requires_grad=True)

        async def experts(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            torch.set_grad_enabled(False)
            await asyncio.sleep(0)
            with torch.enable_grad():
                return rows * 2

        output = await moe.aio.moe_layer(comm, x, torch.zeros(2, 2), experts, layout, 1)
        torch.set_grad_enabled(True)
        await autograd.backward(output.sum())
        assert x.grad is not None
        assert x.grad.unique().tolist() == [2]

    try:
        await run_ranks(2, body)
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.timeout(30)
def test_bad_input_on_one_rank_fails_all_at_once() -> None:
    layout = moe.ExpertLayout.even(3, 2)

    def identity(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        return rows

    def fail(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        raise ZeroDivisionError("an expert's own fault")

    def body(comm: sync.Communicator) -> None:
        x, logits = torch.ones(2, WIDTH), torch.zeros(2, 3)
        bad = comm.rank == 1
        begun = time.monotonic()
        for arguments, text in [
            ((x, logits[:, :2] if bad else logits, identity, layout, 1), r"\[2, 3\]"),
            ((x, logits, identity, moe.ExpertLayout([0, 3]) if bad else layout, 1), "make one for 2"),
            ((x.long() if bad else x, logits, identity, layout, 1), "tokens are floating"),
            ((x, logits, identity, layout, 4 if bad else 1), "k=4"),
            ((x, logits, (lambda rows, n: rows[:0]) if bad else identity, layout, 3), "one row for each"),
        ]:
            with pytest.raises(TensorContractError, match=text) as caught:
                moe.moe_layer(comm, *arguments)
            assert caught.value.rank == 1
        with pytest.raises(ZeroDivisionError if bad else RudaError, match="an expert's own fault"):
            moe.moe_layer(comm, x, logits, fail if bad else identity, layout, 3)
        assert time.monotonic() - begun < 5  # the calls' deadline is 10 s
        assert moe.moe_layer(comm, x, logits, identity, layout, 3).equal(x)

    in_threads(2, body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("other", [[3, 1, 2], [2, 2, 1, 1], [1, 3, 2]], ids=str)
def test_another_layout_on_one_rank_is_said_on_all(other: list[int]) -> None:
    ours = [2, 2, 2]

    def body(comm: sync.Communicator) -> tuple[str, bool]:
        counts = other if comm.rank == 1 else ours
        tokens = torch.ones(4, WIDTH)
        with pytest.raises(RudaError, match=r"layout|for 4 ranks") as caught:
            moe.moe_layer(
                comm,
                tokens,
                torch.arange(24.0).view(4, 6),
                lambda rows, _: rows,
                moe.ExpertLayout.of_counts(counts),
                2,
            )
        return str(caught.value), bool(comm.all_reduce_sum(torch.ones(1)) == 3)  # it still works

    for text, works in in_threads(3, body):
        assert "rank" in text
        assert works


@pytest.mark.timeout(30)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
async def test_rows_shorter_than_what_goes_with_them(dtype: torch.dtype, mode: Any) -> None:
    """One feature: a note takes many rows. Two exchanges a layer, whatever the mode."""

    async def body(comm: AsyncCommunicator) -> None:
        layout = moe.ExpertLayout.of_counts([3, 0, 2])
        tokens = torch.arange(1.0, 6 + comm.rank).view(-1, 1).to(dtype)
        logits = torch.arange(5.0 * len(tokens)).view(-1, 5).sin()
        experts = [lambda rows, n=n: rows * (n + 1) for n in range(5)]
        with mode():
            output = await moe.aio.moe_layer(
                comm,
                tokens,
                logits,
                moe.per_expert([experts[n] for n in layout.local(comm.rank)])
                if layout.counts[comm.rank]
                else (lambda rows, _: rows),
                layout,
                2,
            )
            expected = moe.reference(tokens, logits, experts, 2)
        torch.testing.assert_close(output, expected)
        made = comm.stats()["operations"]
        assert {name: row["count"] for name, row in made.items()} == {"all_to_all_v_float": 2}

    await run_ranks(3, body, url=fresh_url("memory"))


@pytest.mark.parametrize("scheme", ["memory", "tcp"])
async def test_a_layer_that_is_cancelled_among_its_experts_ends_on_the_other_ranks(scheme: str) -> None:
    """They have left the way there, and wait for the way back."""
    layout = moe.ExpertLayout.of_counts([1, 1])
    begun = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> None:
        values, logits = _inputs(comm.rank, 3, 2)

        async def never(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            begun.set()
            await asyncio.Event().wait()
            return rows

        experts = moe.per_expert(_experts(range(comm.rank, comm.rank + 1)))
        if comm.rank:
            with pytest.raises(CollectiveCancelledError) as caught:
                await moe.aio.moe_layer(comm, values, logits, experts, layout, 1, timeout=30)
            assert caught.value.rank == 0
        else:
            task = asyncio.ensure_future(
                moe.aio.moe_layer(comm, values, logits, never, layout, 1, timeout=30)
            )
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # The next call is a call like any other.
        assert (await comm.all_reduce_sum(torch.ones(1))).item() == 2

    async with asyncio.timeout(20):
        await run_ranks(2, body, url=fresh_url(scheme))


async def test_ranks_that_are_an_exchange_apart_do_not_pair() -> None:
    """The way back of one layer meets the way out of the next: an error on both, and not wrong rows."""

    async def body(comm: AsyncCommunicator) -> object:
        layout, tokens = moe.ExpertLayout.even(2, 2), torch.ones(4, WIDTH)
        logits = torch.arange(8.0).view(4, 2).sin()
        if comm.rank == 1:  # it gave up its first layer between the exchanges, and nobody was told
            _, rows, rule = start(comm, tokens, logits, layout, 2, {})
            await rule.run(comm, rows, 5)
        return await outcome(
            moe.aio.moe_layer(comm, tokens, logits, lambda rows, _: rows, layout, 2, timeout=5)
        )

    for error in await run_ranks(2, body):
        assert isinstance(error, CollectiveMismatchError)
        assert error.field == "purpose"
