"""What real processes do to each other: killed, stopped, slow, out of descriptors, out of memory."""

from __future__ import annotations

import asyncio
import time
import tracemalloc

import numpy as np
import pytest
from failure_support import rank_processes
from support import BETWEEN_PROCESSES, SCHEMES, fresh_url, outcome, run_ranks

from ruda_async import AsyncCommunicator, CollectiveTimeoutError

#: Leaves this process so many file descriptors more than it has open.
SCARCE = """
import os, resource
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + {more}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
#: Leaves this process files of 1 MiB at most.
SMALL_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


@pytest.fixture(params=BETWEEN_PROCESSES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["small", "large"])
def test_killed_in_the_middle_of_a_sum(scheme: str, size: int) -> None:
    with rank_processes(fresh_url(scheme), 4, {"size": size}) as ranks:
        ranks[0].kill()
        for number in (1, 2, 3):
            assert ranks[number].words()[:2] == ["lost", "0"]
        for number in (1, 2, 3):
            assert ranks[number].words() == ["shrunk", str(number - 1), "3", "3.0"]
            assert ranks[number].words() == ["closed"]
        if size == 10:  # and their processes end well
            assert [rank.leave() for rank in ranks[1:]] == [0, 0, 0]


def test_two_killed_at_once(scheme: str) -> None:
    with rank_processes(fresh_url(scheme), 4) as ranks:
        ranks[0].kill()
        ranks[3].kill()
        for number in (1, 2):
            assert ranks[number].words()[0] == "lost"
        for number in (1, 2):
            word, rank, world, total = ranks[number].words()
            # A survivor that shrank before it knew of the second may have to shrink again.
            assert (word, rank, world, total) == ("shrunk", str(number - 1), "2", "2.0")


def test_stopped_for_longer_than_the_heartbeat(scheme: str) -> None:
    with rank_processes(fresh_url(scheme), 3, {"heartbeat": 0.5}) as ranks:
        stopped = time.time()
        ranks[1].stop()
        for number in (0, 2):
            word, lost, when = ranks[number].words()
            assert (word, lost) == ("lost", "1")
            assert float(when) - stopped > 0.4
            assert ranks[number].words() == ["shrunk", str(number // 2), "2", "2.0"]
        ranks[1].resume()  # it learns, in whatever way, that it is out
        assert ranks[1].words()[0] in ("lost", "failed")


def test_stopped_for_less_goes_on(scheme: str) -> None:
    with rank_processes(fresh_url(scheme), 3, {"heartbeat": 20}) as ranks:
        ranks[1].stop()
        time.sleep(0.5)  # the time that it stands still is what is tested
        ranks[1].resume()
        ranks[2].kill()
        for number in (0, 1):
            assert ranks[number].words()[:2] == ["lost", "2"]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_slow_reader_holds_the_sender_and_not_memory(scheme: str) -> None:
    """Small messages that nobody receives fill their budget, and then their senders wait."""

    async def body(comm: AsyncCommunicator) -> None:
        gate = comm.channel("gate")
        await gate.barrier()
        if comm.rank == 0:
            before = tracemalloc.get_traced_memory()[0]
            sends = [asyncio.ensure_future(comm.send(value, 1)) for _ in range(400)]
            await asyncio.sleep(0)
            assert tracemalloc.get_traced_memory()[0] - before < 4 << 20
            assert not all(send.done() for send in sends)
            await gate.barrier()
            await asyncio.gather(*sends)
        else:
            await gate.barrier()
            for _ in range(400):
                assert (await comm.recv(0))[-1] == 7999
        await gate.barrier()

    value = np.arange(8000, dtype=np.int32)  # 32 kB each, 12.8 MB in all
    tracemalloc.start()
    try:
        await run_ranks(2, body, url=f"{fresh_url(scheme)}?early_bytes=64k", limit=50, timeout=40)
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("more", [1, pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("culprit", [0, 2])
def test_no_descriptors_left_while_connecting(scheme: str, culprit: int, more: int) -> None:
    """The rank names its trouble, or, where it can still wait for better times, what it waited for."""
    options = [{"timeout": 20.0 if more == 4 else 1.5} for _ in range(3)]
    options[culprit]["before"] = SCARCE.format(more=more)  # type: ignore[assignment]
    with rank_processes(fresh_url(scheme), 3, options, ready=False) as ranks:
        said = [rank.words() for rank in ranks]
    if more == 4 and said[culprit][0] == "ready":
        assert [one[0] for one in said] == ["ready"] * 3
        return
    word, kind, *text = said[culprit]
    assert word == "refused"
    assert kind == "ConfigError" or (kind == "CollectiveTimeoutError" and culprit == 0)
    assert "file descriptor left" in " ".join(text) or "Too many open files" in " ".join(text)
    for number, other in enumerate(said):
        if number != culprit:
            assert other[:1] == ["refused"], other
            assert other[1] in ("CollectiveTimeoutError", "PeerLostError"), other


def test_no_descriptors_left_later_is_no_trouble(scheme: str) -> None:
    inside = SCARCE.format(more=1)
    with rank_processes(fresh_url(scheme), 3, {"inside": inside}) as ranks:
        ranks[2].kill()
        for number in (0, 1):
            assert ranks[number].words()[:2] == ["lost", "2"]
            assert ranks[number].words() == ["shrunk", str(number), "2", "2.0"]


# ---------------------------------------------------------------------- memory


@pytest.mark.skipif("shm" not in SCHEMES, reason="no shared memory transport here")
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_no_room_for_the_rings(culprit: int) -> None:
    """The limit on file sizes holds for memory files too: the nearest that a test has to full memory."""
    # Sums so small that they need no memory of their own: a rank that has none would fail its first large
    # one and go, while others are still in the barrier before it.
    options = [{"timeout": 20.0, "size": 10} for _ in range(3)]
    options[culprit]["before"] = SMALL_FILES  # type: ignore[assignment]
    with rank_processes(fresh_url("shm"), 3, options, ready=False) as ranks:
        if culprit == 0:  # which makes no memory: the higher rank of a pair does
            said = [rank.words() for rank in ranks]
            assert [words[:1] for words in said] == [["ready"]] * 3, said
            ranks[2].kill()  # who sums until then says so
            assert [rank.words()[:2] for rank in ranks[:2]] == [["lost", "2"]] * 2
            return
        said = [rank.words() for rank in ranks]
    word, kind, *text = said[culprit]
    assert (word, kind) == ("refused", "ConfigError")
    assert "2097664 bytes of shared memory" in " ".join(text)
    assert "smaller ring_bytes= than 1048576" in " ".join(text)
    for number, other in enumerate(said):
        if number != culprit:
            assert other[:1] == ["refused"], other
            assert other[1] in ("PeerLostError", "CollectiveTimeoutError"), other


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_result_that_memory_has_no_room_for_fails_alone(scheme: str) -> None:
    """A rank that cannot have its result ends the call on all, and the next one works."""

    async def body(comm: AsyncCommunicator) -> None:
        empty = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 44,), (0,))
        call = comm.all_gather(empty) if comm.rank == 1 else comm.all_gather(np.zeros(1))
        error = await outcome(call)
        assert isinstance(error, Exception)
        assert not isinstance(error, CollectiveTimeoutError)
        assert (await comm.all_reduce_sum(np.ones(1)))[0] == 2

    await run_ranks(2, body, url=fresh_url(scheme))
