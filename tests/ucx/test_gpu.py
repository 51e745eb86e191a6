"""CUDA tensors over ``ucx://``, on a real device: run by ``tox -e gpu``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import fresh_url, run_ranks
from ucx_support import run_transports

from ruda_async import AsyncCommunicator
from ruda_async.transport import Transport

torch = pytest.importorskip("torch", reason="pip install 'ruda-async[torch]'")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORLD = 3


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


CALLS: dict[str, Callable[[AsyncCommunicator, Any], Any]] = {
    "all_reduce_sum": lambda c, x: c.all_reduce_sum(x),
    "all_reduce_max": lambda c, x: c.all_reduce(x, "max"),
    "reduce_scatter_sum": lambda c, x: c.reduce_scatter_sum(x),
    "all_gather": lambda c, x: c.all_gather(x),
    "broadcast": lambda c, x: c.broadcast(x, 1),
    "gather": lambda c, x: c.gather(x, 0),
    "all_to_all": lambda c, x: c.all_to_all(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [3, 30_000])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_results_equal_those_of_the_cpu(name: str, rows: int, dtype: Any) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        host = values(comm.rank, (rows, 4), dtype)
        expected = await CALLS[name](comm, host)
        result = await CALLS[name](comm, host.cuda())
        if expected is None:
            assert result is None
            return
        assert result.is_cuda
        assert result.dtype == dtype
        assert torch.equal(result.cpu(), expected)

    await run_ranks(WORLD, body, url=fresh_url("ucx"))


async def test_uneven_exchange() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        host = values(comm.rank, (1 + 2 + 3, 5), torch.bfloat16)
        expected = await comm.all_to_all_v_float(host, [1, 2, 3])
        result = await comm.all_to_all_v_float(host.cuda(), [1, 2, 3])
        assert result.value.is_cuda
        assert list(result.receive_counts) == list(expected.receive_counts)
        assert torch.equal(result.value.cpu(), expected.value)

    await run_ranks(WORLD, body, url=fresh_url("ucx"))


async def test_what_the_stream_still_computes_is_waited_for() -> None:
    """The input is written by work that is queued, and not done, when the call is made."""

    async def body(comm: AsyncCommunicator) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            big = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                big = big @ big
                big = big / big.norm()
            value = torch.zeros(1_000_000, device="cuda") + (big[0, 0] * 0 + comm.rank + 1)
            total = await comm.all_reduce_sum(value)
            assert (total == 3).all()

    await run_ranks(2, body, url=fresh_url("ucx"))


@pytest.mark.parametrize("nbytes", [1000, 9_000_001])
async def test_device_memory_goes_down_as_it_is(nbytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """The transport itself, between two buffers on the device, ordered with the current stream."""

    async def body(t: Transport) -> bool:
        peer = 1 - t.rank
        source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 2048
        source += t.rank + 1  # queued behind all that

        class Device:
            def __init__(self, tensor: Any) -> None:
                self.tensor = tensor
                self.nbytes = nbytes
                self.__cuda_array_interface__ = tensor.__cuda_array_interface__

        receive = t.recv_into(peer, 1, (Device(target),))
        sending = t.send(peer, 1, (Device(source),))
        await receive
        await sending
        assert np.array_equal(target.cpu().numpy(), np.full(nbytes, peer + 1, np.uint8))
        return t.capabilities.device_memory

    with caplog.at_level(logging.INFO, "ruda_async.ucx"):
        native = await run_transports(body)
    assert ("staged" in caplog.text) is not all(native)
