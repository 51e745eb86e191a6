"""The blocking twin: from any thread, interruptible, and with the same calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support import fresh_url

import ruda_async
from ruda_async import CollectiveTimeoutError, CommunicatorClosedError, RudaError, TensorContractError, sync
from ruda_async.operations import AsyncOperations
from ruda_async.sync_operations import Operations


def in_threads(world_size: int, body: Callable[[sync.Communicator], Any], url: str) -> list[Any]:
    """Run `body` on every rank, each on its own thread with a blocking communicator."""

    def rank_main(rank: int) -> Any:
        with sync.connect(url, rank=rank, world_size=world_size, timeout=10) as comm:
            return body(comm)

    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_main, range(world_size)))


def test_signatures_are_those_of_the_twin() -> None:
    names = {n for n in dir(AsyncOperations) if not n.startswith("_")}
    assert names == {n for n in dir(Operations) if not n.startswith("_")}
    for name in names:
        ours = inspect.signature(getattr(Operations, name))
        assert ours == inspect.signature(getattr(AsyncOperations, name)), name
    for name in (
        "send",
        "recv",
        "split",
        "channel",
        "bounded",
        "stats",
        "describe",
        "explain",
        "abort",
        "close",
    ):
        ours = inspect.signature(getattr(sync.Communicator, name)).parameters
        assert ours == inspect.signature(getattr(ruda_async.AsyncCommunicator, name)).parameters, name


def test_calls(url: str) -> None:
    def body(comm: sync.Communicator) -> None:
        assert comm.all_reduce_sum(np.array([comm.rank + 1.0]))[0] == 6
        assert comm.all_gather_int(np.array([comm.rank])).tolist() == [0, 1, 2]
        value, counts = comm.all_to_all_v_float(np.full((3, 2), float(comm.rank)), [1, 1, 1])
        assert counts == (1, 1, 1)
        assert value[:, 0].tolist() == [0, 1, 2]
        assert comm.broadcast_object({"from": comm.rank}, 2) == {"from": 2}
        group = comm.split(0 if comm.rank else None)
        assert (group is None) == (comm.rank == 0)
        if group is not None:
            assert group.all_reduce_sum(np.ones(1))[0] == 2
        with comm.channel("more") as channel:
            channel.barrier()
        comm.bounded(16).all_reduce_sum(np.ones(100))
        assert comm.explain("all_reduce", 8).startswith("all_reduce of 8 bytes over 3 ranks")

    in_threads(3, body, url)


def test_started_calls(url: str) -> None:
    def body(comm: sync.Communicator) -> None:
        works = [comm.start.all_reduce_sum(np.full(10, float(i))) for i in range(5)]
        for i, work in enumerate(works):
            assert (work.wait(10) == 2.0 * i).all()
            assert work.done()
        with pytest.raises(AttributeError):
            _ = comm.start.no_such_call
        waiting = comm.start.recv(1 - comm.rank)
        with pytest.raises(CollectiveTimeoutError, match="not done"):
            waiting.wait(0.05)
        assert not waiting.done()
        comm.barrier()
        comm.send(np.ones(2), 1 - comm.rank)
        assert waiting.wait(10).tolist() == [1, 1]

    in_threads(2, body, url)


@pytest.mark.parametrize("count", [4, 600_000], ids=["small", "large"])
def test_started_sends_keep_their_order_and_tell_errors_when_waited_for(url: str, count: int) -> None:
    def body(comm: sync.Communicator) -> None:
        peer = 1 - comm.rank
        for round in range(5):
            works = [comm.start.send(np.full(count, 10.0 * round + i), peer) for i in range(3)]
            for i in range(3):
                assert (comm.recv(peer) == 10.0 * round + i).all()
            for work in works:
                assert work.wait(10) is None
        refused = comm.start.send(np.zeros(3), comm.rank)
        with pytest.raises(TensorContractError, match="does not send to itself"):
            refused.wait()
        comm.barrier()

    in_threads(2, body, url)


def test_started_calls_come_before_later_blocking_ones(url: str) -> None:
    def body(comm: sync.Communicator) -> None:
        for round in range(30):
            if comm.rank == 0:
                started = comm.start.all_reduce_sum(np.array([round]))
                gathered = comm.all_gather_int(np.array([comm.rank]))
                total = started.wait()
            else:  # the same calls in the same order
                total = comm.all_reduce_sum(np.array([round]))
                gathered = comm.all_gather_int(np.array([comm.rank]))
            assert total.tolist() == [2 * round]
            assert gathered.tolist() == [0, 1]

    in_threads(2, body, url)


@pytest.mark.parametrize("turns", range(6))
def test_a_started_receive_cancelled_at_any_moment_loses_no_message(url: str, turns: int) -> None:
    def body(comm: sync.Communicator) -> list[float]:
        if comm.rank == 0:
            for i in range(20):
                comm.send(np.full(3, float(i)), 1)
            comm.barrier()
            return []
        got = list[float]()
        for _ in range(20):
            work = comm.start.recv(0)
            for _ in range(turns * turns * 20):
                pass
            work.cancel()
            with suppress(RudaError):
                got.append(float(work.wait(5)[0]))
        while len(got) < 20:
            got.append(float(comm.recv(0, timeout=5)[0]))
        comm.barrier()
        return got

    assert in_threads(2, body, url)[1] == [float(i) for i in range(20)]


def test_threads_share_a_communicator(url: str) -> None:
    def body(comm: sync.Communicator) -> None:
        def worker(i: int) -> None:
            with comm.channel(f"thread {i}") as channel:
                for _ in range(20):
                    assert channel.all_reduce_sum(np.array([float(i)]))[0] == 2 * i

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(worker, range(4)))

    in_threads(2, body, url)


async def test_inside_a_running_loop(url: str) -> None:
    loop = asyncio.get_running_loop()

    def rank_main(rank: int) -> float:
        with sync.connect(url, rank=rank, world_size=2, timeout=10) as comm:
            return float(comm.all_reduce_sum(np.ones(1))[0])

    assert await asyncio.gather(*(loop.run_in_executor(None, rank_main, r) for r in range(2))) == [2, 2]
    # And in the loop's own thread, as in a notebook cell.
    with sync.connect(fresh_url("memory"), rank=0, world_size=1) as comm:
        assert comm.all_reduce_sum(np.ones(1))[0] == 1


def test_on_its_own_loop_it_refuses() -> None:
    with sync.connect(fresh_url("memory"), rank=0, world_size=1) as comm:

        async def misuse() -> None:
            comm.barrier()

        with pytest.raises(RuntimeError, match="own loop"):
            comm._loop.run(misuse())


def test_closed() -> None:
    comm = sync.connect(fresh_url("memory"), rank=0, world_size=1)
    comm.close()
    comm.close()
    assert comm.closed
    with pytest.raises(CommunicatorClosedError):
        comm.barrier()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_forked_child_is_refused() -> None:
    with sync.connect(fresh_url("memory"), rank=0, world_size=1) as comm:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
                text = b"it went on"
            except CommunicatorClosedError as error:
                text = str(error).encode()
            except BaseException as error:
                text = repr(error).encode()
            os.write(writer, text)
            os._exit(0)
        os.waitpid(child, 0)
        assert b"does not survive a fork" in os.read(reader, 4096)
        comm.barrier()


def test_interrupt_ends_a_wait_at_once() -> None:
    script = textwrap.dedent("""
        import numpy as np, sys, threading
        from ruda_async import sync

        def say(*words):  # in one write: two threads share the output
            sys.stdout.write(" ".join(map(str, words)) + "\\n")
            sys.stdout.flush()

        def other():
            with sync.connect("memory://interrupted", rank=1, world_size=2) as comm:
                comm.channel("gate").barrier()
                try:
                    comm.all_reduce_sum(np.ones(1))
                except Exception as error:
                    say("peer saw", type(error).__name__)
                say("next", comm.all_reduce_sum(np.ones(1))[0])

        thread = threading.Thread(target=other)
        thread.start()
        with sync.connect("memory://interrupted", rank=0, world_size=2) as comm:
            say("ready")
            try:
                comm.barrier()
            except KeyboardInterrupt:
                say("interrupted")
            comm.channel("gate").barrier()
            say("next", comm.all_reduce_sum(np.ones(1))[0])
        thread.join()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # let it enter the wait; the interrupt may come at any time
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - sent < 1
        rest = process.communicate(timeout=20)[0].splitlines()
        assert sorted(rest) == ["next 2.0", "next 2.0", "peer saw CollectiveCancelledError"]
        assert process.returncode == 0
    finally:
        process.kill()


def test_script_that_forgets_to_close_leaves_in_order() -> None:
    script = textwrap.dedent("""
        import numpy as np
        from ruda_async import sync
        comm = sync.connect("memory://forgetful", rank=0, world_size=1)
        comm.all_reduce_sum(np.ones(1))
        print("done")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_no_thread_stays_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        with sync.connect(fresh_url("memory"), rank=0, world_size=1) as comm:
            comm.barrier()
    assert threading.active_count() == before
