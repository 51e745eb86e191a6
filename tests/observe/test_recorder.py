"""What a communicator counts and remembers of its calls."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
from support import fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveTimeoutError, PeerLostError, TensorContractError
from ruda_async.observe.recorder import RING, Recorder, Transfer


class FakeChannel:
    label = (7, "seven", (0, 1))


def call_of(name: str, seconds: float, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    call = Transfer(FakeChannel(), name, 1, 0)
    call.started = 100.0
    monkeypatch.setattr("ruda_async.observe.recorder.monotonic", lambda: 100.0 + seconds)
    recorder.succeeded(call)


def test_percentiles_are_near_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.random.default_rng(5).lognormal(math.log(300e-6), 1.5, 4000)
    recorder = Recorder()
    for seconds in times:
        call_of("send", float(seconds), monkeypatch, recorder)
    found = recorder.operations()["send"]
    assert found["count"] == 4000 == sum(n for _, n in found["histogram"])
    assert found["seconds_total"] == pytest.approx(times.sum())
    assert found["seconds_max"] == pytest.approx(times.max())
    for key, part in (("seconds_p50", 50), ("seconds_p90", 90), ("seconds_p99", 99)):
        true = float(np.percentile(times, part))
        assert true / 1.25 < found[key] < true * 1.25, key  # type: ignore[literal-required]
    for (low, _), (bound, n) in zip([(0.0, 0), *found["histogram"]], found["histogram"], strict=False):
        assert n == ((times >= bound / math.sqrt(2)) & (times < bound)).sum()
        assert low < bound


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_times_beyond_any_use_are_counted_too(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    recorder = Recorder()
    call_of("recv", seconds, monkeypatch, recorder)
    found = recorder.operations()["recv"]
    assert found["count"] == 1
    assert found["seconds_p99"] <= found["seconds_max"] == pytest.approx(seconds, abs=1e-9)


def test_the_ring_is_of_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    for i in range(RING + 10):
        call_of(f"op{i}", 1e-3, monkeypatch, recorder)
    assert len(recorder.ring) == RING
    assert recorder.ring[0][2] == "op10"


async def test_counters_by_operation(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        x = np.full(1000, comm.rank + 1.0)
        for _ in range(3):
            await comm.all_reduce_sum(x)
        await comm.channel("other").all_gather_float(x)
        await outcome(comm.all_gather_int(x))
        if comm.rank == 0:
            await comm.send(np.arange(5.0), 1, tag=3)
        else:
            await comm.recv(0, tag=3)
        await comm.barrier()
        stats = comm.stats()
        assert set(stats) == set(ruda_async.observe.Stats.__annotations__)
        operations = stats["operations"]
        for found in operations.values():
            assert set(found) == set(ruda_async.observe.OperationStats.__annotations__)
        assert operations["all_reduce_sum"]["count"] == 3
        assert operations["all_reduce_sum"]["bytes_sent"] == 3 * 8000
        assert operations["all_reduce_sum"]["bytes_received"] == 3 * 8000
        assert operations["all_gather_float"]["count"] == 1
        assert operations["all_gather_float"]["bytes_sent"] == 8000
        assert operations["all_gather_int"]["failed"] == 1
        assert operations["all_gather_int"]["count"] == 0
        assert operations["barrier"]["bytes_sent"] == 0
        moved = operations["send" if comm.rank == 0 else "recv"]
        assert moved["count"] == 1
        assert moved["bytes_sent" if comm.rank == 0 else "bytes_received"] == 40
        assert stats["completed"] == 6
        assert stats["failed"] == 1
        assert stats["in_flight"] == 0
        assert stats["oldest_seconds"] == 0
        assert 0 < operations["all_reduce_sum"]["seconds_p50"] <= operations["all_reduce_sum"]["seconds_max"]

    await run_ranks(2, body, url=url)


async def test_counters_outlive_their_channel() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        channel = comm.channel("brief")
        await channel.barrier()
        await channel.close()
        assert comm.stats()["completed"] == 1

    await run_ranks(2, body)


async def test_what_is_in_flight() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            barrier = asyncio.ensure_future(comm.barrier())
            receive = asyncio.ensure_future(comm.recv(1))
            await comm.channel("step").barrier()
            stats = comm.stats()
            assert stats["in_flight"] == 2
            assert stats["oldest_seconds"] > 0
            record = comm.flight_record()
            waiting = {c["operation"]: c for c in record["operations"] if c["state"] == "in flight"}
            assert set(waiting) == {"barrier", "recv"}
            assert waiting["recv"]["peer"] == 1
            assert waiting["barrier"]["missing"] == [1]
            await comm.channel("step").barrier()
            await barrier
            assert (await receive).tolist() == [1.0, 2.0]
        else:
            await comm.channel("step").barrier()
            await comm.channel("step").barrier()
            await comm.send(np.array([1.0, 2.0]), 0)
            await comm.barrier()

    await run_ranks(2, body)


async def test_a_record_says_what_was_called() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.all_reduce(np.ones((2, 3), np.float32), "max")
        bad = await outcome(comm.all_reduce(np.ones(3), "summ" if comm.rank else "sum"))
        assert isinstance(bad, TensorContractError)
        good, refused = comm.flight_record()["operations"]
        assert (good["operation"], good["sequence"], good["state"]) == ("all_reduce", 0, "done")
        assert (good["dtype"], good["shape"]) == ("float32", [2, 3])
        assert good["arguments"]["operator"] == "max"
        assert good["bytes_sent"] == 24
        assert good["entered"] <= good["finished"]
        assert refused["state"] == "failed"
        assert refused["outcome"] == "TensorContractError"
        assert "summ" in refused["error"]
        assert comm.last_failure() is None  # bad input is no reason for a record of its own

    await run_ranks(2, body)


async def test_a_timeout_leaves_a_record_in_memory() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        side = comm.channel("side")
        if comm.rank == 0:
            error = await outcome(comm.barrier(timeout=0.3))
            assert isinstance(error, CollectiveTimeoutError)
        await side.barrier()
        while (record := comm.last_failure()) is None:  # rank 1 hears of it in a turn of its own
            await asyncio.sleep(0)
        assert "0.3 s" in record["reason"]
        if comm.rank == 0:
            (late,) = [
                c for c in record["operations"] if c["operation"] == "barrier" and c["channel_name"] == "main"
            ]
            assert late["missing"] == [1]

    await run_ranks(2, body)


async def test_who_catches_an_error_finds_its_record() -> None:
    """Before the loop turns, and also where the record before is younger than the least time between two."""

    async def body(comm: AsyncCommunicator) -> None:
        side = comm.channel("side")
        for call, operation in ((comm.barrier, "barrier"), (comm.all_gather_object, "all_gather_object")):
            if comm.rank == 0:
                arguments = (1,) if operation != "barrier" else ()
                with pytest.raises(CollectiveTimeoutError):
                    await call(*arguments, timeout=0.05)
                record = comm.last_failure()
                assert record is not None
                assert operation in record["reason"]
                assert operation in [c["operation"] for c in record["operations"]]
        await side.barrier()

    await run_ranks(2, body)


async def test_a_lost_rank_leaves_its_record_with_the_error() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            comm.abort("it is gone")
            return
        with pytest.raises(PeerLostError):
            await comm.barrier()
        record = comm.last_failure()
        assert record is not None
        assert record["reason"] == "rank 1 aborted: it is gone"
        assert [c["state"] for c in record["operations"]] == ["done", "failed"]
        while not (record := comm.last_failure())["lost"]:  # the record that stays  # type: ignore[index]
            await asyncio.sleep(0)
        assert list(record["lost"]) == ["1"]

    await run_ranks(2, body)


def test_the_blocking_twin_counts_too() -> None:
    url = fresh_url("memory")
    results: list[object] = []

    def rank_main(rank: int) -> None:
        with ruda_async.sync.connect(url, rank=rank, world_size=2, timeout=20) as comm:
            comm.all_reduce_sum(np.ones(4))
            results.append(comm.stats()["operations"]["all_reduce_sum"]["count"])
            results.append(len(comm.flight_record()["operations"]))
            results.append(comm.last_failure())

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results, key=str) == [1, 1, 1, 1, None, None]
