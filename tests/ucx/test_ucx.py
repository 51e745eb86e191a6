"""What is UCX's own: settings, dying and silent peers, strangers, cancellation in the middle, descriptors."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from failure_support import rank_processes
from support import fresh_url, outcome, run_ranks, running_programs
from ucx_support import run_transports

from ruda_async import (
    AsyncCommunicator,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
)
from ruda_async.transport import TakenBack, Transport, wire


def first_config_error(error: BaseException) -> ConfigError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigError)
    return error


async def total(comm: AsyncCommunicator) -> float:
    small = await comm.all_reduce_sum(np.full(3, comm.rank + 1.0))
    large = await comm.all_reduce_sum(np.full(700_000, comm.rank + 1.0))
    return float(small[0] + large[-1])


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "query",
    [
        "?progress=polling",
        "?progress=thread",
        "?tls=tcp",
        "?tls=posix,self",
        "?tls=tcp&net_devices=lo",
        "?rndv_scheme=put_zcopy",
        "?rndv_thresh=1k",
        "?rndv_thresh=inf",
        "?chunk_bytes=64k",
        "?eager_bytes=0",
        "?listen=1",
        "?listen=1&progress=thread",
    ],
)
async def test_settings_move_the_same_bytes(query: str) -> None:
    assert await run_ranks(3, total, url=fresh_url("ucx") + query) == [12.0] * 3


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("?tls=nonsense", "tls=nonsense"),
        ("?tls=cma", "tls="),
        ("?net_devices=ib7&tls=tcp", "net_devices=ib7"),
        ("?rndv_scheme=wrong", "rndv_scheme=wrong"),
        ("?progress=sideways", "progress="),
        ("?eager_bytes=1g", "eager_bytes="),
    ],
)
async def test_settings_that_do_not_work_are_named(query: str, named: str) -> None:
    results = await asyncio.gather(
        run_ranks(2, total, url=fresh_url("ucx") + query, timeout=10), return_exceptions=True
    )
    assert isinstance(results[0], BaseException)
    assert named in str(first_config_error(results[0]))


async def test_the_environment_stays_as_it_was() -> None:
    before = dict(os.environ)
    await run_ranks(2, total, url=fresh_url("ucx") + "?tls=tcp&rndv_thresh=64k")
    assert dict(os.environ) == before


async def test_a_single_rank_needs_no_ucx() -> None:
    assert await run_ranks(1, total, url=fresh_url("ucx")) == [2.0]


# ---------------------------------------------------------------------- loss


@pytest.mark.parametrize("query", ["", "?progress=thread", "?tls=tcp"])
def test_killed_rank_is_noticed_at_once(query: str) -> None:
    options = {"progress": "thread"} if "thread" in query else {}
    with rank_processes(fresh_url("ucx"), 4, options, keep=False) as ranks:
        ranks[2].kill()
        for number in (0, 1, 3):
            assert ranks[number].words()[:2] == ["lost", "2"]
        for number, rank in ((0, 0), (1, 1), (3, 2)):
            assert ranks[number].words() == ["shrunk", str(rank), "3", "3.0"]
            assert ranks[number].words() == ["closed"]
            assert ranks[number].leave() == 0


FIRST_MESSAGE = """
import asyncio, sys
import numpy as np
import ruda_async

async def main():
    async with ruda_async.connect(sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=30) as comm:
        print("connected", flush=True)
        if comm.rank:
            await comm.recv(0)
        sys.stdin.readline()  # the loop stands still
        try:
            await comm.send(np.ones(500), 1)
            await comm.recv(1)
        except ruda_async.PeerLostError as error:
            print("lost", error.rank, flush=True)

asyncio.run(main())
"""


def test_the_first_long_message_goes_to_a_rank_that_is_dead() -> None:
    """UCX writes it into the peer's memory, which cannot be mapped any more unless that was done before."""
    with running_programs(FIRST_MESSAGE, fresh_url("ucx"), range(2)) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "connected\n"
        ranks[1].kill()
        ranks[1].wait()
        said, _ = ranks[0].communicate("go\n", timeout=30)
        assert said == "lost 1\n"  # and nothing of UCX's


@pytest.mark.parametrize("delay", [0.16, 0.22, 0.25, 0.31])
def test_survivors_outlive_a_rank_that_is_killed_while_they_copy_from_it(delay: float) -> None:
    die = (
        "import os, signal\n"
        f"asyncio.get_running_loop().call_later({delay}, os.kill, os.getpid(), signal.SIGKILL)"
    )
    options = [{"size": 4 << 20}, {"size": 4 << 20}, {"size": 4 << 20, "inside": die}]
    with rank_processes(fresh_url("ucx"), 3, options, ready=False, keep=False) as ranks:
        for number, rank in ((0, 0), (1, 1)):
            said = [ranks[number].words() for _ in range(3)]
            assert said[0][:1] == ["ready"]
            assert said[1][:2] == ["lost", "2"]
            assert said[2] == ["shrunk", str(rank), "2", "2.0"]


def test_a_communicator_is_closed_after_ucx_itself_has_found_a_rank_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "20ms")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")  # which goes to standard output
    late = """
import ruda_ucx.transport
async def close_late(transport, close=ruda_ucx.transport.UcxTransport._close):
    async with asyncio.timeout(20):
        while all(link.outgoing.endpoint.alive for link in transport._links.values()):
            await asyncio.sleep(0.01)
    await close(transport)
ruda_ucx.transport.UcxTransport._close = close_late
"""
    with rank_processes(fresh_url("ucx"), 3, {"before": late}, keep=False) as ranks:
        ranks[2].kill()
        ranks[2].wait()  # UCX finds a process alive that nobody has waited for
        for number, rank in ((0, 0), (1, 1)):
            assert ranks[number].words()[:2] == ["lost", "2"]
            assert ranks[number].words() == ["shrunk", str(rank), "2", "2.0"]
            assert ranks[number].words() == ["closed"]
            assert ranks[number].leave() == 0


def test_stopped_rank_is_noticed_by_its_silence() -> None:
    with rank_processes(fresh_url("ucx"), 3, {"heartbeat": 2}, keep=False) as ranks:
        ranks[1].stop()
        for number in (0, 2):
            assert ranks[number].words()[:2] == ["lost", "1"]


async def test_garbage_is_a_lost_peer() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            comm._node.transport._links[0].outgoing.control(os.urandom(100))  # type: ignore[attr-defined]
        error = await outcome(comm.recv(1 - comm.rank))
        assert isinstance(error, PeerLostError)
        assert error.rank == 1 - comm.rank
        if comm.rank == 0:
            assert "protocol" in str(error)

    await run_ranks(2, body, url=fresh_url("ucx"))


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (wire.encode(wire.MESSAGE, 7, 1 << 40), "bytes of payload"),
        (wire.encode(wire.READY, 7, ident=1), "without its place"),
        (wire.encode(wire.DROP, ident=1), "how much"),
        (wire.encode(wire.PONG), "not expected"),
        (wire.encode(wire.OFFER, 7, 10)[:-1], "32 bytes"),
        (b"", "32 bytes"),
    ],
)
async def test_frames_that_make_no_sense_end_the_link(frame: bytes, said: str) -> None:
    async def body(t: Transport) -> None:
        if t.rank == 1:
            t._links[0].outgoing.control(frame or bytes(31))  # type: ignore[attr-defined]
        error = await outcome(t.recv_into(1 - t.rank, 1, (memoryview(bytearray(1)),)))
        assert isinstance(error, PeerLostError)
        if t.rank == 0:
            assert said in str(error)

    await run_transports(body)


async def test_strangers_are_not_heard() -> None:
    """Who knows a worker's address and not the key sends in vain, and the job goes on."""

    async def body(t: Transport) -> None:
        engine = t._engine  # type: ignore[attr-defined]
        link = t._links[1 - t.rank]  # type: ignore[attr-defined]
        frame = wire.encode(wire.MESSAGE, 5, 3) + b"bad"
        if t.rank == 1:
            for key in range(3):
                engine.send(0, link.outgoing.endpoint, frame, engine.tag(key << 16 | 1))
            engine.send(0, link.outgoing.endpoint, frame, engine.tag(1 << 63 | 12345))
            await t.send(0, 5, (memoryview(b"abc"),))
        else:
            room = memoryview(bytearray(3))
            await t.recv_into(1, 5, (room,))
            assert room == b"abc"
            assert t.stats()[1]["messages_received"] == 1

    await run_transports(body)


# ---------------------------------------------------------------------- cancellation in the middle


async def start_of(buffer: np.ndarray) -> None:
    """Wait until the first byte is there."""
    while buffer[0] == 0:
        await asyncio.sleep(0)


async def awaited(waiting: Any) -> Any:
    return await waiting


@pytest.mark.parametrize("progress", ["blocking", "thread"])
async def test_a_receive_cancelled_in_the_middle_leaves_its_memory_alone(progress: str) -> None:
    nbytes = 96 << 20

    async def body(t: Transport) -> bool:
        if t.rank == 0:
            data = np.arange(nbytes // 4, dtype=np.uint32) | 1
            await t.send(1, 1, (memoryview(data).cast("B"),))
            return True
        first = np.zeros(nbytes, np.uint8)
        receive = asyncio.ensure_future(awaited(t.recv_into(0, 1, (memoryview(first),))))
        await asyncio.sleep(0)
        while not receive.done() and first[0] == 0:
            await asyncio.sleep(0)
        receive.cancel()
        await asyncio.wait((receive,))
        if not receive.cancelled():
            return False
        seen = first.copy()
        second = np.zeros(nbytes, np.uint8)
        await t.recv_into(0, 1, (memoryview(second),))
        assert np.array_equal(second.view(np.uint32), np.arange(nbytes // 4, dtype=np.uint32) | 1)
        assert np.array_equal(first, seen)
        return not seen.all()

    for _ in range(5):
        if (await run_transports(body, query=f"?progress={progress}&chunk_bytes=1m"))[1]:
            return
    pytest.skip("this machine moves 96 MiB before a task can be cancelled")


async def test_a_send_cancelled_in_the_middle_is_an_error_there_and_frees_its_memory() -> None:
    nbytes = 96 << 20

    async def body(t: Transport) -> bool:
        peer = 1 - t.rank
        if t.rank == 0:
            data = np.ones(nbytes, np.uint8)
            sending = asyncio.ensure_future(awaited(t.send(1, 1, (memoryview(data),))))
            link = t._links[1]  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            while not sending.done() and not link.outgoing._pulled():
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait((sending,))
            data[:] = 2
            cancelled = sending.cancelled()
            await t.send(1, 2, (memoryview(bytes([cancelled])),))
            return cancelled
        buffer = np.zeros(nbytes, np.uint8)
        error = await outcome(t.recv_into(peer, 1, (memoryview(buffer),)))
        assert not (buffer == 2).any()
        said = memoryview(bytearray(1))
        await t.recv_into(peer, 2, (said,))
        assert isinstance(error, TakenBack) if said[0] else error is None
        return bool(said[0])

    for _ in range(5):
        if all(await run_transports(body, query="?chunk_bytes=1m")):
            return
    pytest.skip("this machine moves 96 MiB before a task can be cancelled")


async def test_failing_a_tag_in_the_middle_frees_both_ends() -> None:
    async def body(t: Transport) -> None:
        nbytes = 64 << 20
        peer = 1 - t.rank
        buffer = np.zeros(nbytes, np.uint8)
        if t.rank == 0:
            await outcome(t.send(1, 1, (memoryview(np.ones(nbytes, np.uint8)),)))
        else:
            receive = asyncio.ensure_future(outcome(t.recv_into(0, 1, (memoryview(buffer),))))
            await asyncio.sleep(0)
            while not receive.done() and buffer[0] == 0:
                await asyncio.sleep(0)
            t.fail(1, RuntimeError("enough"))
            result = await receive
            assert result is None or str(result) == "enough"
            seen = buffer.copy()
            await asyncio.sleep(0.02)
            assert np.array_equal(buffer, seen)
        small = memoryview(bytearray(1))
        receive_small = t.recv_into(peer, 2, (small,))
        await t.send(peer, 2, (memoryview(b"x"),))
        await receive_small
        link = t._links[peer]  # type: ignore[attr-defined]
        assert not link.outgoing._offers
        assert not link.incoming._offers
        assert not link.incoming._matched

    await run_transports(body, query="?chunk_bytes=1m")


async def test_timed_out_sends_hold_no_memory() -> None:
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
        await run_ranks(2, body, url=fresh_url("ucx"))
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------- leaving nothing behind


@pytest.mark.parametrize("progress", ["blocking", "polling", "thread"])
async def test_nothing_stays_behind(progress: str) -> None:
    query = f"?progress={progress}"

    async def body(comm: AsyncCommunicator) -> None:
        await total(comm)
        await comm.close()
        await comm.close()

    def state() -> tuple[int, int, int]:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("ruda-ucx")]
        return len(os.listdir("/proc/self/fd")), len(names), len(asyncio.all_tasks())

    await run_ranks(3, body, url=fresh_url("ucx") + query)
    gc.collect()
    gc.disable()  # it is closing that gives UCX up, and not the end of what refers to each other
    try:
        before = state()
        for _ in range(3):
            await run_ranks(3, body, url=fresh_url("ucx") + query)
        after = state()
    finally:
        gc.enable()
    assert after[0] <= before[0]
    assert after[1:] == (0, 1)


async def test_abort_leaves_nothing_behind() -> None:
    async def body(t: Transport) -> None:
        if t.rank == 1:
            t.abort("to see what stays")
            t.abort("twice is harmless")
        error = await outcome(t.recv_into(1 - t.rank, 1, (memoryview(bytearray(1)),))) if not t.rank else None
        assert t.rank or isinstance(error, PeerLostError)

    async def freed() -> int:
        while any(thread.name.startswith("ruda-ucx") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    await run_transports(body)
    before = await freed()
    for _ in range(3):
        await run_transports(body)
    assert await freed() <= before


async def test_a_lost_peer_keeps_nothing_running() -> None:
    """What was under way with it is not driven any more, so an idle survivor sleeps."""
    nbytes = 64 << 20

    async def body(t: Transport) -> None:
        if t.rank == 1:
            sending = asyncio.ensure_future(awaited(t.send(0, 1, (memoryview(np.ones(nbytes, np.uint8)),))))
            link = t._links[0]  # type: ignore[attr-defined]
            while not sending.done() and not link.outgoing._pulled():
                await asyncio.sleep(0)
            t.abort("in the middle")
            await outcome(sending)
            return
        error = await outcome(t.recv_into(1, 1, (memoryview(np.zeros(nbytes, np.uint8)),)))
        assert isinstance(error, PeerLostError)
        assert not t._engine._running  # type: ignore[attr-defined]
        assert not t._engine._arriving  # type: ignore[attr-defined]

    await run_transports(body)


@pytest.mark.parametrize("progress", ["blocking", "polling", "thread"])
async def test_uvloop_runs_the_same(progress: str) -> None:
    uvloop = pytest.importorskip("uvloop", reason="pip install 'ruda-async[uvloop]'")

    def main() -> list[float]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_ranks(2, total, url=fresh_url("ucx") + f"?progress={progress}"))

    assert await asyncio.get_running_loop().run_in_executor(None, main) == [6.0, 6.0]


async def test_an_idle_rank_sleeps() -> None:
    async def body(t: Transport) -> float:
        waiting = t.recv_into(1 - t.rank, 1, (memoryview(bytearray(1)),))
        before = time.process_time()
        if t.rank == 0:
            await asyncio.sleep(1)
            spent = time.process_time() - before
            await t.send(1, 1, (memoryview(b"x"),))
            await waiting
            return spent
        await waiting
        await t.send(0, 1, (memoryview(b"x"),))
        return 0.0

    # Both ranks share this process. A poller would take all of the second.
    assert sum(await run_transports(body, query="?heartbeat=10")) < 0.5
