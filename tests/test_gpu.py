"""CUDA tensors through every collective, on real devices: run by ``tox -e gpu``."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support import fresh_url, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator
from ruda_async.tensors import device as device_module

torch = pytest.importorskip("torch", reason="pip install 'ruda-async[torch]'")

import gpu_ranks  # noqa: E402
from torch_calls import CALLS, MEANS, same, values  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]

WORLD = 3
UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("ucxx") is None, reason="pip install 'ruda-async[ucx]'"
    ),
)
SCHEMES = [UCX, "tcp", "shm", "memory"]
#: Clock cycles of a kernel that does nothing else: a tenth of a second, about.
LONG = 200_000_000


def device_of(comm: AsyncCommunicator) -> Any:
    return torch.device("cuda", comm.rank % GPUS)


@pytest.fixture(autouse=True)
def default_streams() -> Iterator[None]:
    """What a test makes current is not current after it."""
    yield
    for index in range(GPUS):
        torch.cuda.set_stream(torch.cuda.default_stream(index))
    if GPUS:
        torch.cuda.set_device(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [3, 30_000])
@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_results_equal_those_of_the_cpu(scheme: str, name: str, rows: int, dtype: Any) -> None:
    if name in MEANS and not dtype.is_floating_point:
        pytest.skip("a mean of integers is none")

    async def body(comm: AsyncCommunicator) -> None:
        host = values(comm.rank, rows, dtype)
        expected = await CALLS[name](comm, host)
        given = host.to(device_of(comm))
        result = await CALLS[name](comm, given)
        same(result, expected)
        tensor = getattr(result, "value", result)
        assert tensor is None or tensor.device == given.device
        assert torch.equal(given.cpu(), host)

    await run_ranks(WORLD, body, url=fresh_url(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_ranks_may_differ_in_where_their_tensors_lie(scheme: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        host = values(comm.rank, 3000, torch.bfloat16)
        expected = await comm.all_reduce_sum(host)
        same(await comm.all_reduce_sum(host.to(device_of(comm)) if comm.rank % 2 else host), expected)

    await run_ranks(WORLD, body, url=fresh_url(scheme))


@pytest.mark.parametrize("count", [10, 3_000_000])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_what_the_stream_still_computes_is_waited_for(scheme: str, count: int) -> None:
    """The input is written by a kernel that waits behind a long one; the result is read right after."""

    async def body(comm: AsyncCommunicator) -> None:
        stream = torch.cuda.Stream(device_of(comm))
        torch.cuda.set_stream(stream)
        value = torch.zeros(count, device=stream.device)
        torch.cuda._sleep(LONG)
        value += comm.rank + 1
        total = await comm.all_reduce_sum(value)
        torch.cuda.set_stream(stream)  # other ranks have made theirs current
        assert bool((total == sum(range(1, WORLD + 1))).all())
        gathered = await comm.all_gather(value)
        torch.cuda.set_stream(stream)
        assert gathered.view(WORLD, count)[:, -1].tolist() == [1.0, 2.0, 3.0]

    await run_ranks(WORLD, body, url=fresh_url(scheme))


@pytest.mark.parametrize("count", [10, 3_000_000])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_memory_is_written_after_what_was_queued_for_it(scheme: str, count: int) -> None:
    """A kernel that waits behind a long one would overwrite the result if that came before its turn."""

    async def body(comm: AsyncCommunicator) -> None:
        stream = torch.cuda.Stream(device_of(comm))
        torch.cuda.set_stream(stream)
        value = torch.full((count,), comm.rank + 1.0, device=stream.device)
        out = torch.empty_like(value)
        torch.cuda._sleep(LONG)
        out.fill_(-1)
        await comm.broadcast(value, 1, out=out)
        torch.cuda.set_stream(stream)
        assert bool((out == 2).all())

    await run_ranks(WORLD, body, url=fresh_url(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_staging_is_said_once_and_only_where_it_happens(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_module, "_said", set())

    async def body(comm: AsyncCommunicator) -> bool:
        for _ in range(3):
            await comm.all_reduce_sum(torch.ones(1000, device=device_of(comm)))
        return comm.node.device_memory

    with caplog.at_level(logging.INFO, "ruda_async"):
        resident = await run_ranks(WORLD, body, url=fresh_url(scheme))
    lines = [record for record in caplog.records if record.getMessage().startswith("CUDA tensors are staged")]
    assert len(lines) == (0 if all(resident) else 1)
    assert scheme == "ucx" or not any(resident)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", range(1, GPUS + 1) if GPUS else [1])
def test_nccl(world: int) -> None:
    """A process for each GPU."""
    calls = ruda_async.spawn(gpu_ranks.nccl, world, "torch+nccl://127.0.0.1:0", timeout=280)
    assert len(set(calls)) == 1
    assert calls[0] > len(CALLS)
