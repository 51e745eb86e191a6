"""``torch+gloo://``: links of tcp, collectives of Gloo."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from native_checks import all_operations, same
from support import free_port, outcome, run_ranks

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    TensorContractError,
    TransportUnavailableError,
)
from ruda_async.transport import NativeGroup
from ruda_async.transport.conformance import SCENARIOS, run_scenario

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs a torch that is built with Gloo", allow_module_level=True)

#: Behind `long`: Gloo ends the whole process where a group goes while its threads still talk.
pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.fixture
def url() -> str:
    return f"torch+gloo://127.0.0.1:{free_port()}/gloo"


@pytest.fixture(params=["gloo", "staged"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Gloo; and what NCCL's provider does around it, with Gloo and the CPU in place of NCCL and a GPU."""
    if request.param == "staged":
        from ruda_torch import nccl, transport
        from ruda_torch.gloo import GlooProvider

        class Staged(nccl.StagedProvider):
            name = "gloo"
            virtue = "many bytes"
            device = torch.device("cpu")
            make = GlooProvider.make

        monkeypatch.setattr(transport, "_provider", lambda backend: Staged)
    return str(request.param)


@pytest.mark.parametrize("world_size", [2, 4])
async def test_collectives_by_name(engine: str, url: str, world_size: int) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for dtype in ("float32", "float64", "int64", "int8", "int16"):
            await all_operations(comm, dtype, 3000 if dtype == "float32" else 7)
        assert "gloo, asked for by" in comm.explain("all_reduce", 8)
        mean = await comm.all_reduce(np.full(9, comm.rank, np.float32), "mean")
        same(mean, np.full(9, (world_size - 1) / 2, np.float32))
        same(await comm.all_reduce(np.full(3, 1 << comm.rank), "bor"), np.full(3, (1 << world_size) - 1))
        high = await comm.all_reduce(np.array([np.nan if comm.rank else 1.0]), "max")
        assert np.isnan(high[0])
        tensor = torch.arange(6.0).reshape(2, 3) + comm.rank
        total = await comm.all_reduce(tensor)
        assert torch.equal(total, sum(torch.arange(6.0).reshape(2, 3) + r for r in range(world_size)))
        frozen = np.arange(5.0)
        frozen.flags.writeable = False
        same(await comm.broadcast(frozen, 0), np.arange(5.0))

    await run_ranks(world_size, body, url=url, algorithm="gloo", order="any", limit=100, timeout=60)


async def test_large_ones_without_being_asked(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> list[str]:
        x = np.ones(100_000)
        same(await comm.all_gather(x), np.ones(200_000))
        same(await comm.all_reduce(x), np.full(100_000, 2.0))
        return [comm.explain("all_gather", n) for n in (100, 800_000)] + [comm.explain("all_reduce", 800_000)]

    small, large, exact = (await run_ranks(2, body, url=url, timeout=60, limit=100))[0]
    assert ": gloo" not in small
    assert ": gloo, many bytes" in large
    assert ": gloo" not in exact


async def test_the_size_from_which_gloo_runs_calls_is_one_for_all(url: str) -> None:
    async def connected(rank: int, **options: int) -> Any:
        return await outcome(ruda_async.connect(url, rank=rank, world_size=2, timeout=30, **options))

    errors = await asyncio.gather(connected(0), connected(1, native_bytes=100))
    text = "rank 1 has native_bytes=100 and rank 0 has native_bytes=262144; give all ranks the same"
    assert [str(error) for error in errors] == [text] * 2


async def test_channels_at_once_and_failures(engine: str, url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        rank, size = comm.rank, comm.world_size

        async def works(channel: AsyncCommunicator, number: int) -> None:
            same(await channel.all_reduce(np.full(100, number + rank)), np.full(100, size * number + 3))

        names = ["a", "b", "c"]
        channels = [comm.channel(name) for name in names[rank:] + names[:rank]]
        await asyncio.gather(*(works(channel, ord(channel.name)) for channel in channels))
        await asyncio.gather(*(channel.close() for channel in channels))
        error = await outcome(comm.all_reduce(np.ones(3, np.complex64) if rank == 1 else np.ones(3)))
        assert isinstance(error, TensorContractError)
        assert error.rank == 1
        await works(comm, 1)
        error = await outcome(comm.all_gather(np.ones(3 + rank // 2)))
        assert isinstance(error, CollectiveMismatchError)
        await works(comm, 2)
        other = comm.channel("other")
        if rank == 2:
            await other.all_reduce(np.ones(1))
        error = await outcome(comm.broadcast(np.ones(1000), 0, timeout=0.5 if rank != 2 else 30))
        assert isinstance(error, CollectiveTimeoutError)
        if rank != 2:
            await other.all_reduce(np.ones(1))
        await works(comm, 3)
        for turn in range(6):
            call = asyncio.ensure_future(comm.all_reduce(np.full(50_000, 7.0)))
            for _ in range(1 + turn * 4):
                await asyncio.sleep(0)
            if rank == turn % size:
                call.cancel()
            try:
                same(await call, np.full(50_000, 21.0))
            except (asyncio.CancelledError, CollectiveCancelledError):
                pass
            await works(comm, 4 + turn)

    await run_ranks(3, body, url=url, algorithm="gloo", order="any", limit=100, timeout=60)


async def test_a_group_that_nobody_waits_for_any_more_is_not_waited_for_in_torch() -> None:
    """A rank whose peer gave the call up before it made the group."""
    from ruda_torch.groups import Groups

    store: Any = torch.distributed.HashStore()
    dialled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def dial(wait: object) -> Any:
        loop.call_soon_threadsafe(dialled.set)
        return store

    def make(store: Any, rank: int, size: int, wait: object) -> Any:
        raise AssertionError("not all ranks are there")

    groups = Groups(dial, make)
    making = groups.get(NativeGroup(0, 2, (0, 1), 7, 0, 0, time.monotonic() + 100, b""))
    await dialled.wait()
    groups.forget(7)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="given up"):
            await making


@pytest.mark.parametrize("failing", [False, True])
async def test_a_collective_that_is_over_does_not_keep_its_group(
    monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """Nor does the thread that looks, which sleeps afterwards and may not be its last user."""
    from ruda_torch import gloo

    class Group:
        """In the place of Gloo's."""

    class Work:
        over = False

        def is_completed(self) -> bool:
            return self.over

        def wait(self) -> None:
            if failing:
                raise RuntimeError("Connection closed by peer")

    work = Work()
    monkeypatch.setattr(gloo, "start", lambda *_: work)
    monkeypatch.setattr(gloo, "tensor", lambda view, call: view)
    group, nothing = Group(), memoryview(b"")
    gone = weakref.ref(group)
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = SimpleNamespace(operation="all_reduce")
    execute: Any = gloo.GlooProvider.execute
    running = asyncio.ensure_future(execute(None, group, None, call, nothing, nothing, stop))
    await asyncio.wait((running,), timeout=0.05)
    assert not running.done()
    work.over = True
    error = await outcome(running)
    assert (None if error is None else str(error)) == ("Connection closed by peer" if failing else None)
    del error, running, group
    async with asyncio.timeout(30):
        while gone() is not None:  # a collection does nothing while another thread is at one
            gc.collect()
            await asyncio.sleep(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_nccl_without_a_gpu_says_so() -> None:
    with pytest.raises(TransportUnavailableError, match=r"torch\+nccl: .*(GPU|without nccl)"):
        await ruda_async.connect("torch+nccl://127.0.0.1:1/x", rank=0, world_size=1)


@pytest.mark.parametrize("name", ["identity", "sizes", "goodbye", "aborted_peer", "stale_messages"])
def test_conformance(url: str, name: str) -> None:
    run_scenario(name, url)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_whole_conformance_suite(url: str, name: str) -> None:
    run_scenario(name, url)


def in_processes(size: int, script: str, environment: Callable[[int], dict[str, str]], *given: str) -> None:
    """The script beside this one in so many processes."""
    path = str(Path(__file__).with_name(script))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RUDA_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, path, *given],
            env=clean | environment(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed: list[Any] = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(printed)


def test_on_the_programs_own_process_group() -> None:
    """Rank, world size and meeting place come from ``init_process_group``; the URL needs none of them."""
    port = str(free_port())
    in_processes(
        2,
        "torch_ranks.py",
        lambda rank: {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        },
    )


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "broadcast"])
def test_a_process_ends_well_while_gloo_still_has_its_call(url: str, operation: str, how: str) -> None:
    """torch can neither take the call back, nor free it before it is over."""
    for _ in range(2):
        in_processes(
            2,
            "torch_given_up.py",
            lambda rank: {"RUDA_URL": f"{url}?rank={rank}&world_size=2"},
            operation,
            how,
        )
