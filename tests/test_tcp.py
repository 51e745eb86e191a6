"""What is TCP's own: addresses, dying and silent peers, damaged streams, memory, descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from failure_support import rank_processes
from rank_threads import in_threads
from support import SCHEMES, free_port, fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveTimeoutError, ConfigError, PeerLostError, sync


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_addresses(host: str) -> None:
    if "::" in host and not has_ipv6():
        pytest.skip("no IPv6 here")

    async def body(comm: AsyncCommunicator) -> None:
        assert (await comm.all_reduce_sum(np.ones(3)))[0] == 3
        assert comm.describe()["transport"]["scheme"] == "tcp"

    await run_ranks(3, body, url=f"tcp://{host}:{free_port()}/addresses")


async def test_unknown_host() -> None:
    error = (
        await asyncio.gather(
            run_ranks(2, outcome, url="tcp://no-such-host.invalid:5/x"), return_exceptions=True
        )
    )[0]
    assert isinstance(error, ConfigError)
    assert "no-such-host.invalid" in str(error)


@pytest.mark.parametrize(("scheme", "limit"), [("tcp", 1.0), ("shm", 0.5)])
def test_killed_rank_is_noticed_at_once(scheme: str, limit: float) -> None:
    if scheme not in SCHEMES:
        pytest.skip(f"no {scheme} here")
    with rank_processes(fresh_url(scheme), 4) as ranks:
        killed = time.time()
        ranks[2].kill()
        for number in (0, 1, 3):
            word, lost, when = ranks[number].words()
            assert (word, lost) == ("lost", "2")
            assert float(when) - killed < limit
        for number, rank in ((0, 0), (1, 1), (3, 2)):
            assert ranks[number].words() == ["shrunk", str(rank), "3", "3.0"]
            assert ranks[number].words() == ["closed"]


def test_stopped_rank_is_noticed_by_its_silence() -> None:
    with rank_processes(fresh_url("tcp"), 3, {"heartbeat": 0.5}) as ranks:
        stopped = time.time()
        ranks[1].stop()
        for number in (0, 2):
            word, lost, when = ranks[number].words()
            assert (word, lost) == ("lost", "1")
            assert 0.4 < float(when) - stopped < 3


async def test_garbage_on_a_link_is_a_lost_peer() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            comm._node.transport._links[0].stream._sock.send(os.urandom(100))  # type: ignore[attr-defined]
        error = await outcome(comm.recv(1 - comm.rank))
        assert isinstance(error, PeerLostError)
        assert error.rank == 1 - comm.rank
        if comm.rank == 0:
            assert "protocol" in str(error)

    await run_ranks(2, body, url=fresh_url("tcp"))


async def test_slow_reader_holds_the_sender_and_not_memory() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        gate = comm.channel("gate")
        if comm.rank == 0:
            value = np.ones(1_000_000)
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20):
                error = await outcome(comm.send(value, 1, timeout=0.01))
                assert isinstance(error, CollectiveTimeoutError)
            assert tracemalloc.get_traced_memory()[0] - before < 4_000_000
            await gate.barrier()
            await comm.send(value, 1)
        else:
            await gate.barrier()
            assert (await comm.recv(0)).shape == (1_000_000,)
            assert comm.stats()["peers"][0]["early_bytes"] == 0
        await comm.barrier()

    tracemalloc.start()
    try:
        await run_ranks(2, body, url=fresh_url("tcp"))
    finally:
        tracemalloc.stop()


async def test_large_payloads_are_not_copied(url: str) -> None:
    """A 64 MiB all-reduce on two ranks allocates its two results and little more."""
    nbytes = 64 << 20
    inputs = [np.full(nbytes // 4, float(r + 1), np.float32) for r in range(2)]
    peak = 0

    async def body(comm: AsyncCommunicator) -> None:
        nonlocal peak
        await comm.barrier()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = await comm.all_reduce_sum(inputs[comm.rank])
        assert result[0] == result[-1] == 3
        await comm.barrier()
        peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
        await comm.barrier()

    tracemalloc.start()
    try:
        await run_ranks(2, body, url=url)
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * 2 * nbytes


async def test_no_descriptor_stays_open() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()

    await run_ranks(3, body, url=fresh_url("tcp"))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        await run_ranks(3, body, url=fresh_url("tcp"))
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before


async def test_uvloop_runs_the_same() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def body(comm: AsyncCommunicator) -> float:
        await comm.send(np.ones(300_000), 1 - comm.rank) if comm.rank else await comm.recv(1)
        return float((await comm.all_reduce_sum(np.ones(100_000)))[5])

    def main() -> list[float]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_ranks(2, body, url=fresh_url("tcp")))

    assert await asyncio.get_running_loop().run_in_executor(None, main) == [2, 2]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_hundred_thousand_calls_leave_nothing_behind(url: str) -> None:
    def state() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    async def body(comm: AsyncCommunicator) -> None:
        value = np.ones(2, np.float32)
        for _ in range(2000):
            await comm.all_reduce_sum(value)
        resident, before = resident_bytes(), state()
        for _ in range(100_000):
            await comm.all_reduce_sum(value)
        assert resident_bytes() - resident < 4 << 20
        assert state() == before
        await comm.barrier()

    await run_ranks(2, body, url=url, limit=600)


# ---------------------------------------------------------------------- congestion control


def _congestion(comm: AsyncCommunicator) -> set[str]:
    streams = [link.stream for link in comm._node.transport._links.values()]
    found = [s._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for s in streams]
    return {name.rstrip(b"\0").decode() for name in found}


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="the system lets nobody choose")
async def test_within_a_host_connections_do_not_pace() -> None:
    async def body(comm: AsyncCommunicator) -> set[str]:
        return _congestion(comm)

    assert await run_ranks(3, body, url=fresh_url("tcp")) == [{"reno"}] * 3
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    for name in allowed:
        assert await run_ranks(2, body, url=f"{fresh_url('tcp')}?congestion={name}") == [{name}] * 2


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="the system lets nobody choose")
async def test_unknown_congestion_control_is_named() -> None:
    with pytest.raises(ConfigError, match=r"congestion=snail.*tcp_allowed_congestion_control"):
        await ruda_async.connect(f"{fresh_url('tcp')}?congestion=snail", rank=0, world_size=2, timeout=5)


@pytest.mark.parametrize("world_size", [2, 3])
async def test_blocking_calls_that_fill_the_sockets(world_size: int) -> None:
    """The thread that waits moves the bytes both ways itself, and leaves the loop a turn."""

    def body(comm: sync.Communicator) -> None:
        x = np.arange(2_000_003, dtype=np.float32) + comm.rank
        for _ in range(3):
            total = comm.all_reduce_sum(x)
            every = comm.all_gather(x[:500_000])
            np.testing.assert_array_equal(
                total, sum(np.arange(2_000_003, dtype=np.float32) + r for r in range(world_size))
            )
            for rank in range(world_size):
                part = every[rank * 500_000 : (rank + 1) * 500_000]
                np.testing.assert_array_equal(part, np.arange(500_000, dtype=np.float32) + rank)

    await asyncio.to_thread(in_threads, world_size, body, fresh_url("tcp") + "?socket_bytes=65536")
