"""What is shared memory's own: rings, many ranks, what stays behind, and how little waiting costs."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import in_threads
from ruda_shm.regions import _NOTE, _Peer
from ruda_shm.spare import Spare
from support import SCHEMES, fresh_url, run_ranks, running_programs

import ruda_async
from ruda_async import AsyncCommunicator, ConfigError, sync

pytestmark = pytest.mark.skipif("shm" not in SCHEMES, reason="no shared memory transport here")

if "shm" in SCHEMES:
    from ruda_shm.ring import HEADER_BYTES, Ring
    from ruda_shm.spare import Spare


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 90), max_size=4)), max_size=200))
def test_ring_against_a_queue(steps: list[tuple[bool, list[int]]]) -> None:
    """What is read is what was written, in order, over many turns of a small ring."""
    memory = mmap.mmap(-1, HEADER_BYTES + 64)
    view = memoryview(memory)
    writer, reader = Ring(view), Ring(view)
    sent, got, value = bytearray(), bytearray(), 0
    for writes, sizes in steps:
        if writes:
            buffers = []
            for size in sizes:
                buffers.append(bytes((value + i) % 251 for i in range(size)))
                value += size
            data = b"".join(buffers)
            taken = writer.write(buffers)
            assert taken <= len(data)
            assert taken == min(len(data), 64 - (len(sent) - len(got)))
            sent += data[:taken]
            value -= len(data) - taken
        else:
            for size in sizes:
                buffer = memoryview(bytearray(size))
                got += buffer[: reader.read_into(buffer)]
                assert sent.startswith(got)
    while len(got) < len(sent):
        buffer = memoryview(bytearray(64))
        got += buffer[: reader.read_into(buffer)]
    assert got == sent
    for ring in (writer, reader):
        ring.release()


def test_ring_asks_for_doorbells_without_losing_one() -> None:
    memory = mmap.mmap(-1, HEADER_BYTES + 64)
    view = memoryview(memory)
    writer, reader = Ring(view), Ring(view)
    assert not writer.reader_waits()
    assert reader.wait_as_reader()
    assert writer.write([b"x"]) == 1
    assert writer.reader_waits()
    assert not writer.reader_waits()  # asked once a wait
    assert not reader.wait_as_reader()  # there is something
    assert writer.write([bytes(100)]) == 63
    assert writer.write([b"y"]) == 0  # full, and asks
    buffer = memoryview(bytearray(10))
    assert reader.read_into(buffer) == 10
    assert reader.writer_waits()
    assert not reader.writer_waits()
    with pytest.raises(ValueError, match="power of two"):
        Ring(view[:-1])


async def test_twenty_ranks() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        total = await comm.all_reduce_sum(np.full(1000, float(comm.rank)))
        assert total[0] == 190
        await comm.all_to_all(np.arange(40))
        gathered = await comm.all_gather(np.array([comm.rank]))
        assert gathered.tolist() == list(range(20))
        large = np.arange(100_000, dtype=np.float32) + comm.rank
        assert (await comm.all_reduce_sum(large) == 20 * np.arange(100_000, dtype=np.float32) + 190).all()
        assert (await comm.broadcast(large, 19) == np.arange(100_000, dtype=np.float32) + 19).all()
        counts = [(comm.rank + peer) % 3 * 500 for peer in range(20)]
        value, received = await comm.all_to_all_v(np.full((sum(counts), 3), float(comm.rank)), counts)
        assert list(received) == counts
        assert (value[:, 0] == np.repeat(np.arange(20.0), received)).all()
        assert await comm.recv((comm.rank - 1) % 20) == (comm.rank - 1) % 20 if comm.rank else True
        await comm.send(np.array([comm.rank]), (comm.rank + 1) % 20)
        assert comm.rank or await comm.recv(19) == 19
        some = await comm.split(comm.rank % 3)
        assert some is not None
        assert (await some.all_reduce_sum(np.ones(30_000)) == some.world_size).all()

    await run_ranks(20, body, url=fresh_url("shm"), limit=50)


@pytest.mark.parametrize("ring_bytes", ["4k", "64k", "1M"])
async def test_ring_sizes(ring_bytes: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        value = np.arange(200_000, dtype=np.float32) + comm.rank
        total = await comm.all_reduce_sum(value)
        assert total[-1] == 2 * 199_999 + 1
        received = await asyncio.gather(comm.recv(1 - comm.rank), comm.send(value, 1 - comm.rank))
        assert received[0][0] == 1 - comm.rank

    await run_ranks(2, body, url=f"{fresh_url('shm')}?ring_bytes={ring_bytes}")


async def test_ranks_may_have_rings_of_their_own_size() -> None:
    async def rank_main(rank: int) -> float:
        url = f"{shared}?ring_bytes={['4k', '1M'][rank]}"
        async with ruda_async.connect(url, rank=rank, world_size=2, timeout=10) as comm:
            return float((await comm.all_reduce_sum(np.ones(100_000)))[0])

    shared = fresh_url("shm")
    assert await asyncio.gather(rank_main(0), rank_main(1)) == [2, 2]


async def test_ring_that_is_no_power_of_two() -> None:
    with pytest.raises(ConfigError, match="ring_bytes=5000"):
        await run_ranks(2, lambda comm: comm.barrier(), url=f"{fresh_url('shm')}?ring_bytes=5000")


async def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    outcomes = []

    async def rank_main(rank: int) -> None:
        try:
            await ruda_async.connect(shared, rank=rank, world_size=2, timeout=5)
        except ruda_async.RudaError as error:
            outcomes.append((type(error), str(error)))

    shared = fresh_url("shm")
    await asyncio.gather(rank_main(0), rank_main(1))
    texts = dict(outcomes)
    assert "ring_bytes= than 1048576" in texts[ConfigError]
    assert "No space left" in texts[ConfigError]
    assert "no memory to share" in texts[ruda_async.PeerLostError]


async def test_long_job_names() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()

    await run_ranks(2, body, url=f"shm://{'a' * 300}")


WAITING = """
import asyncio, os, sys, time
import numpy as np
import ruda_async

async def main():
    url, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    async with ruda_async.connect(url, rank=rank, world_size=world, timeout=60) as comm:
        await comm.all_reduce_sum(np.ones(100_000))
        print("ready", flush=True)
        if rank == 0:
            await asyncio.to_thread(sys.stdin.readline)
            await comm.barrier()
        else:
            before = time.process_time(), time.monotonic()
            await comm.barrier()
            used = (time.process_time() - before[0]) / (time.monotonic() - before[1])
            print("used", used, flush=True)

asyncio.run(main())
"""

WAITING_IN_BLOCKING_CALLS = """
import sys, time
import numpy as np
import ruda_async

url, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with ruda_async.sync.connect(url, rank=rank, world_size=world, timeout=60) as comm:
    comm.all_reduce_sum(np.ones(100_000))
    print("ready", flush=True)
    if rank == 0:
        sys.stdin.readline()
        comm.barrier()
    else:
        before = time.process_time(), time.monotonic()
        comm.barrier()
        used = (time.process_time() - before[0]) / (time.monotonic() - before[1])
        print("used", used, flush=True)
"""


@pytest.mark.parametrize("heartbeat", ["", "?heartbeat=0.4"], ids=["none-due", "several-due"])
@pytest.mark.parametrize("program", [WAITING, WAITING_IN_BLOCKING_CALLS], ids=["awaited", "blocking"])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_waiting_costs_nothing_and_says_nothing(scheme: str, program: str, heartbeat: str) -> None:
    """One rank in a call, the other between two: neither is taken for lost."""
    with running_programs(program, fresh_url(scheme) + heartbeat, range(2), "2") as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        time.sleep(1.5)  # the time that is waited is what is measured
        assert ranks[0].stdin is not None
        ranks[0].stdin.write("go\n")
        ranks[0].stdin.flush()
        out, err = ranks[1].communicate(timeout=20)
        assert out.startswith("used")
        assert float(out.split()[1]) < 0.15  # a tenth of the time: spinning takes all of it
        assert err == ""
        assert ranks[1].returncode == 0


def mapped(pid: int | str, name: str) -> set[str]:
    """The inodes of the files whose names have `name` in them that a process maps."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # gone, or not ours to see
        return set()
    return {line.split()[4] for line in maps if name in line}


def test_nothing_stays_behind_after_kill() -> None:
    """By construction: the memory has no name, so it goes with the last process that maps it."""
    with running_programs(WAITING, fresh_url("shm"), range(4), "4") as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        assert not any(mapped(rank.pid, "/dev/shm/") for rank in ranks)
        files = set().union(*(mapped(rank.pid, "memfd:ruda-async") for rank in ranks))
        assert len(files) >= 6  # six pairs of rings
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.wait(10)
        everybody = [name for name in os.listdir("/proc") if name.isdigit()]
        assert not any(files & mapped(pid, "memfd:ruda-async") for pid in everybody)


BUSY = """
import asyncio, sys
import numpy as np
import ruda_async

async def main():
    url, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    async with ruda_async.connect(url, rank=rank, world_size=world, timeout=30) as comm:
        large = comm.empty(2_000_000, np.float32) if rank else np.empty(2_000_000, np.float32)
        try:
            for turn in range(100_000):
                large[:] = rank
                result = await comm.all_reduce_sum(large)
                assert (result == 6).all()
                if turn == 3:
                    print("busy", flush=True)
        except ruda_async.PeerLostError as error:
            print("lost", error.rank, flush=True)
        rest = await comm.shrink()
        large[:] = 1
        print(float((await rest.all_reduce_sum(large))[-1]), flush=True)

asyncio.run(main())
"""


def test_a_rank_is_killed_while_others_read_its_memory() -> None:
    with running_programs(BUSY, fresh_url("shm"), range(4), "4") as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "busy\n"
        ranks[2].kill()
        for rank in (ranks[0], ranks[1], ranks[3]):
            out, _ = rank.communicate(timeout=20)
            assert out == "lost 2\n3.0\n"


def test_any_thread_makes_memory() -> None:
    """What `empty` does with descriptors, and what the loop does, must not meet in other threads."""
    wrong: list[str] = []

    def body(comm: sync.Communicator) -> None:
        def make(number: int) -> None:
            try:
                for step in range(60):
                    comm.empty(300_000 + 40_000 * ((7 * step + number) % 50), np.uint8)[0] = 1
            except OSError as error:
                wrong.append(str(error))

        threads = [threading.Thread(target=make, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        x = np.full(100_000, comm.rank + 1.0)
        for _ in range(30):
            np.testing.assert_array_equal(comm.all_reduce_sum(x), 3)
        for thread in threads:
            thread.join()
        comm.barrier()

    in_threads(2, body, fresh_url("shm"))  # the first job of a process opens what all of them use
    before = len(os.listdir("/proc/self/fd"))
    in_threads(2, body, fresh_url("shm"))
    assert not wrong
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # of the listing itself


def test_descriptor_kept_in_reserve_is_for_one_thread_at_a_time() -> None:
    spare = Spare()
    wrong: list[str] = []

    def use() -> None:
        for _ in range(2000):
            try:
                with spare:
                    descriptor = os.open(os.devnull, os.O_RDONLY)
                    os.close(descriptor)
            except OSError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spare.close()
    with spare:  # late users do without, and leave nothing
        pass
    assert not wrong
    assert spare._held is None


def test_what_a_dead_peer_told_of_its_memory_is_still_heard() -> None:
    """It left words of ours unread: the system first says so with an error, and then has what it had sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    spare = Spare()
    with ours:
        peer = _Peer(1, None, ours, spare)  # type: ignore[arg-type]
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, 4096)
        socket.send_fds(theirs, [_NOTE.pack(7, 4096)], [descriptor])
        os.close(descriptor)
        ours.send(_NOTE.pack(3, 0))
        theirs.close()
        peer.receive()
        assert len(peer.maps[7]) == 4096
        spare.close()
