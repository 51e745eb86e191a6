"""When flight records are written, where, and how many."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveTimeoutError, PeerLostError
from ruda_async.observe import dump, dump_on_signal, flight, signals
from ruda_async.observe.reading import load


async def until_written(folder: Path, count: int) -> list[Path]:
    """The records, once there are so many; a thread writes them."""
    deadline = time.monotonic() + 30
    while len(found := sorted(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def test_a_timeout_is_written_by_every_rank(url: str, tmp_path: Path) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            assert isinstance(await outcome(comm.barrier(timeout=0.2)), CollectiveTimeoutError)
            await until_written(tmp_path, 3)
        await comm.channel("end").barrier()

    await run_ranks(3, body, url=url, trace_dir=tmp_path)
    records = load(tmp_path.glob("*.json"))
    assert [record.rank for record in records] == [0, 1, 2]
    assert "0.2 s" in records[0].reason
    assert "rank 0 gave up" in records[1].reason


async def test_a_transfer_that_times_out_is_written(tmp_path: Path) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            assert isinstance(await outcome(comm.recv(1, tag=9, timeout=0.2)), CollectiveTimeoutError)
            (path,) = await until_written(tmp_path, 1)
            (late,) = json.loads(path.read_text())["operations"]
            assert (late["operation"], late["peer"], late["tag"]) == ("recv", 1, 9)
            assert late["outcome"] == "CollectiveTimeoutError"
        await comm.channel("end").barrier()

    await run_ranks(2, body, trace_dir=tmp_path)


async def test_a_lost_rank_is_written_by_the_others(url: str, tmp_path: Path) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 2:
            comm.abort("dies")
            return
        error = None
        while error is None:
            error = await outcome(comm.barrier())
        assert isinstance(error, PeerLostError)
        await until_written(tmp_path, 2)

    await run_ranks(3, body, url=url, trace_dir=tmp_path)
    for record in load(tmp_path.glob("*.json")):
        assert record.rank in (0, 1)
        assert 2 in record.lost


async def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUDA_TRACE_DIR", raising=False)

    async def body(comm: AsyncCommunicator) -> None:
        await outcome(comm.barrier(timeout=0.1) if comm.rank else asyncio.sleep(0))
        await comm.channel("end").barrier()

    await run_ranks(2, body)
    assert list(tmp_path.iterdir()) == []


async def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made" / "when needed"
    monkeypatch.setenv("RUDA_TRACE_DIR", str(folder))

    async def body(comm: AsyncCommunicator) -> None:
        path = dump(comm, reason="for the test")
        assert path.parent == folder
        assert f"rank{comm.rank}-{os.getpid()}-" in path.name
        assert json.loads(path.read_text())["reason"] == "for the test"
        assert dump(comm, tmp_path).parent == tmp_path

    await run_ranks(2, body)


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(flight, "MAX_FILES", 3)
    flight._written.clear()
    yield 3
    flight._written.clear()


async def test_the_number_of_files_is_bounded(tmp_path: Path, few_files: int) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for i in range(10):
            dump(comm, tmp_path, reason=str(i))

    await run_ranks(1, body)
    reasons = sorted(json.loads(path.read_text())["reason"] for path in tmp_path.iterdir())
    assert reasons == ["7", "8", "9"]


async def test_many_timeouts_at_once_are_one_record(tmp_path: Path) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            calls = [comm.channel(f"c{i}").barrier(timeout=0.2) for i in range(50)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, CollectiveTimeoutError) for result in results)
        await comm.channel("end").barrier()
        await comm.close()  # what is due is written now

    await run_ranks(2, body, trace_dir=tmp_path)
    files = await until_written(tmp_path, 2)
    assert len([path for path in files if "rank0" in path.name]) <= 2


async def test_a_folder_that_cannot_be_written_is_logged_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    logged = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no flight record" in record.getMessage():
                logged.set()

    heard = Heard()
    flight.log.addHandler(heard)

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank:
            folder.rmdir()  # it was made when the job was set up
            folder.touch()
            assert isinstance(await outcome(comm.barrier(timeout=0.1)), CollectiveTimeoutError)
        await comm.channel("end").barrier()

    try:
        await run_ranks(2, body, trace_dir=folder)
        assert await asyncio.to_thread(logged.wait, 20)
    finally:
        flight.log.removeHandler(heard)


async def test_log_records_carry_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ruda_async")

    async def body(comm: AsyncCommunicator) -> None:
        await outcome(comm.channel("c").all_reduce_sum("bad" if comm.rank else np.ones(2)))

    await run_ranks(2, body)
    found = [record for record in caplog.records if hasattr(record, "ruda_operation")]
    assert {record.ruda_rank for record in found} == {0, 1}  # type: ignore[attr-defined]
    for record in found:
        assert record.ruda_channel == "c"  # type: ignore[attr-defined]
        assert record.ruda_operation == "all_reduce_sum"  # type: ignore[attr-defined]
        assert record.ruda_sequence == 0  # type: ignore[attr-defined]
        assert record.ruda_outcome == "TensorContractError"  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the signal


@pytest.fixture
def former() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, handler)


@pytest.mark.usefixtures("former")
async def test_a_signal_writes_the_records_of_all_communicators(tmp_path: Path) -> None:
    assert dump_on_signal(folder=tmp_path)
    assert not dump_on_signal()  # there is one already

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            await until_written(tmp_path, 2)
        await comm.barrier()

    await run_ranks(2, body)
    assert [record.reason for record in load(tmp_path.glob("*.json"))] == ["asked for by a signal"] * 2


@pytest.mark.usefixtures("former")
def test_the_programs_own_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(number: int, frame: object) -> None: ...

    monkeypatch.setenv(signals.VARIABLE, "1")
    signal.signal(signal.SIGUSR2, own)
    ruda_async.connect("memory://x", rank=0, world_size=1)
    assert signal.getsignal(signal.SIGUSR2) is own
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ruda_async.connect("memory://x", rank=0, world_size=1)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


@pytest.mark.usefixtures("former")
def test_the_handler_is_opted_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signals.VARIABLE, raising=False)
    ruda_async.connect("memory://x", rank=0, world_size=1)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    monkeypatch.setenv(signals.VARIABLE, "1")
    thread = threading.Thread(target=ruda_async.connect, args=("memory://x",))
    thread.start()
    thread.join(20)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    ruda_async.connect("memory://x", rank=0, world_size=1)
    assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


@pytest.mark.timeout(120)
def test_the_launcher_installs_it_and_passes_the_folder_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, ruda_async\n"
        "with ruda_async.sync.connect(timeout=40) as comm:\n"
        "    comm.barrier()\n"
        "    os.kill(os.getpid(), signal.SIGUSR2)\n"
        "    comm.barrier()\n"
    )
    command = [sys.executable, "-m", "ruda_async", "run", "-n", "2", "--trace-dir", str(tmp_path / "t")]
    subprocess.run([*command, str(program)], check=True, timeout=100)
    records = load((tmp_path / "t").glob("*.json"))
    assert [record.rank for record in records] == [0, 1]
    assert records[0].job == records[1].job


def test_a_job_that_ends_by_a_timeout_leaves_its_record(tmp_path: Path) -> None:
    """The process ends right after the error; the record is whole all the same."""
    url = fresh_url("tcp")
    code = (
        "import sys, ruda_async\n"
        "with ruda_async.sync.connect(sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=40,\n"
        "                             trace_dir=sys.argv[3]) as comm:\n"
        "    comm.barrier()\n"
        "    comm.barrier(timeout=0.5) if comm.rank else comm.recv(1)\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, url, str(r), str(tmp_path)], stderr=subprocess.PIPE)
        for r in range(2)
    ]
    errors = [process.communicate(timeout=50)[1] for process in ranks]
    assert b"CollectiveTimeoutError" in errors[1]
    records = {record.rank: record for record in load(tmp_path.glob("*.json"))}
    assert 1 in records
    assert "0.5 s" in records[1].reason
