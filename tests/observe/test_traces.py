"""Flight records of real processes, read back: who waits for whom, and one time line."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from support import fresh_url

from ruda_async.cli import main
from ruda_async.observe.explain import explain
from ruda_async.observe.merge import merge
from ruda_async.observe.reading import Record, load

PROGRAM = Path(__file__).parent / "astray_ranks.py"

pytestmark = pytest.mark.timeout(180)


@contextmanager
def running(
    case: str, astray: int, folder: Path, scheme: str = "tcp"
) -> Iterator[list[subprocess.Popen[str]]]:
    url = fresh_url(scheme)
    ranks = []
    for rank in range(4):
        variables = {
            "RUDA_URL": url,
            "RUDA_RANK": str(rank),
            "RUDA_WORLD_SIZE": "4",
            "RUDA_TRACE_DIR": str(folder),
            "RUDA_TRACE_SIGNAL": "1",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(PROGRAM), case, str(astray)],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def until(process: subprocess.Popen[str], line: str) -> list[str]:
    """Read up to a line of output; the lines before it."""
    stream: IO[str] | None = process.stdout
    assert stream is not None
    before = []
    for text in stream:
        if text.strip() == line:
            return before
        before.append(text.strip())
    raise AssertionError(f"ended without {line!r}: {before}")


def records_of(folder: Path, ranks: set[int]) -> list[Record]:
    """The records, once there is one of each rank; they are written behind the ranks' backs."""
    deadline = time.monotonic() + 30
    while True:
        files = sorted(folder.glob("*.json"))
        if ranks <= {int(re.findall(r"rank(\d+)", file.name)[0]) for file in files}:
            return load(files)
        assert time.monotonic() < deadline, files
        time.sleep(0.05)


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_a_rank_in_another_call(tmp_path: Path, scheme: str) -> None:
    with running("elsewhere", 2, tmp_path, scheme) as ranks:
        for rank in (0, 1, 3):
            assert until(ranks[rank], "over") == ["CollectiveTimeoutError"]
        records = records_of(tmp_path, {0, 1, 2, 3})
    found = explain(records)
    assert found.culprits == (2,), found.text
    assert "channel 'batch-7': ranks 0, 1, 3 wait in all_reduce_sum #1" in found.text
    assert re.search(
        r"rank 2 never entered all_reduce_sum #1: "
        r"it is in broadcast #0 on channel 'other', entered [\d.]+ s ago",
        found.text,
    ), found.text
    check_trace(merge(records), 4)


@pytest.mark.parametrize("astray", [0, 3])
def test_a_rank_that_stands_still(tmp_path: Path, astray: int, capsys: pytest.CaptureFixture[str]) -> None:
    with running("stopped", astray, tmp_path) as ranks:
        until(ranks[astray], "ready")
        others = [rank for rank in range(4) if rank != astray]
        for rank in others:
            assert until(ranks[rank], "over") == ["CollectiveTimeoutError"]
        records = records_of(tmp_path, set(others))
    assert [record.rank for record in records] == others
    assert main(["trace", "explain", *map(str, tmp_path.glob("*.json"))]) == 0
    text = capsys.readouterr().out
    assert f"none of rank {astray}" in text
    assert f"rank {astray} never entered all_reduce_sum #1: it left no record" in text
    assert f"look first at rank {astray} (no record" in text
    assert main(["trace", "explain", "--json", str(tmp_path)]) == 0  # the folder stands for its files
    assert json.loads(capsys.readouterr().out)["culprits"] == [astray]
    (tmp_path / "empty").mkdir()
    assert main(["trace", "explain", str(tmp_path / "empty")]) == 2
    assert "empty has no *.json" in capsys.readouterr().err


def test_ranks_that_wait_in_a_circle(tmp_path: Path) -> None:
    with running("circle", -1, tmp_path) as ranks:
        for process in ranks:
            assert until(process, "over") == ["CollectiveTimeoutError"]
        records = records_of(tmp_path, {0, 1, 2, 3})
    found = explain(records)
    assert "wait in a circle" in found.text, found.text
    assert len(found.culprits) >= 2


def test_records_on_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running("signal", 1, tmp_path, "shm") as ranks:
        for process in ranks:
            until(process, "ready")
        # Its own record says that a rank waits; "ready" came just before.
        deadline = time.monotonic() + 60
        while True:
            for process in ranks:
                process.send_signal(signal.SIGUSR2)
            records = records_of(tmp_path, {0, 1, 2, 3})
            if all(any(call.state == "in flight" for call in record.calls) for record in records):
                break
            assert time.monotonic() < deadline
        assert all(process.poll() is None for process in ranks)
    found = explain(records)
    assert found.culprits, found.text
    assert "rank 1 waits in recv from rank 2 (tag 0) on channel 'main'" in found.text
    output = tmp_path / "trace.out"
    assert main(["trace", "merge", *map(str, tmp_path.glob("*.json")), "-o", str(output)]) == 0
    assert "4 ranks" in capsys.readouterr().err
    trace = json.loads(output.read_text())
    check_trace(trace, 4)
    # Four processes of one host: the same collective overlaps on all of them.
    last = [e for e in trace["traceEvents"] if e["name"] == "all_reduce_sum #19"]
    assert len(last) == 4
    assert max(e["ts"] for e in last) <= min(e["ts"] + e["dur"] for e in last)


def check_trace(trace: dict[str, Any], world_size: int) -> None:
    """The rules of the Trace Event Format for the kinds of events that are used."""
    json.dumps(trace, allow_nan=False)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    assert {e["pid"] for e in events} == set(range(world_size))
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        assert event["ph"] in "XMi"
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in "gpt"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named
    for spans in threads.values():  # complete events of a thread nest or follow each other
        spans.sort()
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert end <= begin + 0.002
