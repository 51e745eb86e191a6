"""Whole runs of tiny plans."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import FakePlugin

from ruda_async import ConfigError
from ruda_async.bench.driver import run_plan
from ruda_async.bench.peers import find_mpiexec, why_missing
from ruda_async.bench.plan import OPERATIONS, Plan
from ruda_async.bench.progress import Progress, terminal_progress
from ruda_async.bench.results import Report
from ruda_async.cli import bench, main
from ruda_async.installing import how_to_install
from ruda_async.operations import AsyncOperations
from ruda_async.transport.registry import register_plugin, unregister_plugin

TINY: dict[str, Any] = {"sizes": (8, 4096), "rounds": 2, "block": 0.001, "timeout": 20.0}


def subjects(report: Report) -> set[str]:
    return {row.subject for row in report.rows}


def assert_sound(report: Report) -> None:
    assert not report.faults
    for row in report.rows:
        assert 0 < row.min <= row.median <= row.p90 <= row.p99
        assert row.rounds == 2
        assert row.calls >= 6
        assert (row.bus_bandwidth > 0) == (row.operation != "barrier")
        assert row.name == "ruda" or not row.ratios
        assert all(value > 0 for value in row.ratios.values())


def test_tasks_and_threads_of_one_process() -> None:
    report = run_plan(
        Plan(
            urls=("memory://bench",),
            modes=("async", "sync"),
            in_flight=(1, 2),
            peers=("numpy", "raw"),
            **TINY,
        )
    )
    assert_sound(report)
    assert subjects(report) == {"memory async", "memory async x2", "memory sync", "memory sync x2", "numpy"}
    assert {(row.operation, row.nbytes) for row in report.rows if row.mode == "async"} >= {
        ("all_reduce", 8), ("all_reduce", 4096), ("barrier", 0), ("send", 4096)
    }  # fmt: skip
    assert {row.operation for row in report.rows} == set(OPERATIONS)
    assert all((row.stall is not None) == (row.mode == "async") for row in report.rows)
    assert all("numpy" in r.ratios for r in report.rows if r.name == "ruda" and r.operation != "barrier")
    assert report.notes == ["numpy: barrier left out: a barrier has no local work"]


def test_results_may_be_reused_and_half_precision_summed() -> None:
    pytest.importorskip("ml_dtypes")
    report = run_plan(
        Plan(urls=("memory://bench",), worlds=(3,), peers=(), dtype="bfloat16", reuse=True, **TINY)
    )
    assert_sound(report)
    assert all(row.reuse and row.dtype == "bfloat16" for row in report.rows)


def test_processes_beside_raw_sockets() -> None:
    operations = ("all_reduce", "all_to_all_v", "barrier")
    report = run_plan(Plan(operations=operations, modes=("async", "sync"), peers=("raw", "numpy"), **TINY))
    assert_sound(report)
    assert subjects(report) == {"tcp async", "tcp sync", "raw", "numpy"}
    assert all("raw" in row.ratios for row in report.rows if row.name == "ruda")


@pytest.mark.skipif(why_missing("gloo") is not None, reason="torch is not installed")
def test_processes_beside_gloo() -> None:
    report = run_plan(Plan(peers=("gloo",), **{**TINY, "sizes": (8,)}))
    assert_sound(report)
    assert {row.operation for row in report.rows if row.name == "gloo"} == set(OPERATIONS)


@pytest.mark.skipif(why_missing("mpi") is not None, reason="mpi4py or mpiexec is not installed")
def test_processes_beside_mpi() -> None:
    report = run_plan(Plan(peers=("mpi",), **TINY))
    assert_sound(report)
    assert {row.operation for row in report.rows if row.name == "mpi"} == set(OPERATIONS)


@pytest.mark.skipif(why_missing("mpi") is not None, reason="mpi4py or mpiexec is not installed")
def test_ranks_that_mpiexec_starts() -> None:
    """Over `mpi://`, beside MPI itself and a transport that needs no engine."""
    urls = ("mpi://bench", "tcp://127.0.0.1:0")
    plan = Plan(operations=("all_reduce", "send"), urls=urls, modes=("async", "sync"), peers=("mpi",), **TINY)
    report = run_plan(plan)
    assert_sound(report)
    assert subjects(report) == {"mpi async", "mpi sync", "tcp async", "tcp sync", "mpi"}


def test_without_an_engine_its_transport_is_left_out() -> None:
    plugin: Any = FakePlugin("engine", rank_per="engine", example="engine://example")
    register_plugin(plugin)
    try:
        urls = ("engine://bench", "memory://bench")
        report = run_plan(Plan(operations=("barrier",), urls=urls, modes=("async",), peers=(), **TINY))
    finally:
        unregister_plugin("engine")
    assert subjects(report) == {"memory async"}
    assert report.notes == ["left out: engine:// is for ranks that another engine starts, and none is here"]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's sums of 1024 elements have one wrong, deep inside."""
    right = AsyncOperations.all_reduce

    async def wrong(self: Any, value: Any, *args: Any, **options: Any) -> Any:
        result = await right(self, value, *args, **options)
        if self.rank == 1 and len(value) == 1024:
            result[700] += 1
        return result

    monkeypatch.setattr(AsyncOperations, "all_reduce", wrong)


@pytest.mark.usefixtures("fault")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_wrong_result_is_caught(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    command = ["bench", "all_reduce", "--url", "memory://bench", "--mode", mode, "--peers", "none"]
    command += ["--sizes", "8,4k", "--rounds", "2", "--block", "0.001", "--json", str(file)]
    assert main(command) == 1
    (row,) = [row for row in Report.from_json(file.read_text()).rows if row.fault]
    assert row.nbytes == 4096
    assert row.fault.startswith("rank 1: element 700 of the result is")
    assert "WRONG RESULT: all_reduce, 4096 bytes, 2 ranks, memory" in capsys.readouterr().out


def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "markdown")}
    command = ["bench", "broadcast,barrier", "--url", "memory://bench", "--sizes", "8:32:4", "--out"]
    command += ["--quick", "--peers", "numpy", "--rounds", "2", "--block", "0.001"]
    for name, path in files.items():
        command += [f"--{name}", str(path)]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "broadcast, 2 ranks as tasks, float32" in shown.out
    assert "[3/3] barrier, 2 ranks as tasks" in shown.err
    data = json.loads(files["json"].read_text())
    assert set(data) == {"format", "machine", "rows", "notes"}
    assert str(tmp_path) not in files["json"].read_text()
    assert "<!doctype html>" in files["html"].read_text()
    again = tmp_path / "again.md"
    assert main(["bench", "--load", str(files["json"]), "--markdown", str(again)]) == 0
    assert again.read_text() == files["markdown"].read_text()


_SHORT = ["--url", "memory://bench", "--sizes", "8", "--quick", "--peers", "none", "--rounds", "1"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no full disk to be had")
def test_a_full_disk_costs_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "page.html"
    command = ["bench", "barrier", *_SHORT, "--block", "0.001", "--json", "/dev/full", "--html", str(html)]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert "barrier, 2 ranks as tasks" in shown.out
    assert "cannot write '/dev/full': No space left on device" in shown.err
    assert "<!doctype html>" in html.read_text()


def test_files_that_cannot_be_written_or_read_are_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ruda_async.bench.driver.run_plan", lambda *_: pytest.fail("it was measured"))
    kept, binary = tmp_path / "kept.json", tmp_path / "binary"
    kept.write_text("of yesterday")
    assert main(["bench", "--json", str(kept), "--html", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]
    assert kept.read_text() == "of yesterday"
    binary.write_bytes(b"\xff\xfe\x00")
    assert main(["bench", "--load", str(binary)]) == 2
    assert "is not a result of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_reduce", "--sizes", "x"], "'x' is not a size"),
        (["--world", "two"], "'two' is not a list of whole numbers"),
        (["--load", "not-there.json"], "cannot be read"),
        (["--json", "not-there/x.json"], "folder"),
        (["--url", "tcp://127.0.0.1:1"], "write port 0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_is_missing_is_said_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def nothing(name: str, package: str | None = None) -> Any:
        return None if name in ("torch", "mpi4py", "uvloop") else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    assert how_to_install("torch") in str(why_missing("gloo"))
    assert how_to_install("mpi", "mpich") in str(why_missing("mpi"))
    plan = Plan(operations=("barrier",), urls=("memory://b",), modes=("async", "uvloop"), peers=(), **TINY)
    report = run_plan(plan)
    assert subjects(report) == {"memory async"}
    assert report.notes == [f"left out: mode uvloop needs uvloop; {how_to_install('uvloop')}"]
    with pytest.raises(ConfigError, match="nothing is left"):
        run_plan(Plan(operations=("barrier",), urls=("memory://b",), modes=("uvloop",), peers=()))


def test_mpiexec_is_looked_for_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mpiexec() == str(program)


def test_a_bar_only_where_somebody_looks() -> None:
    assert type(terminal_progress()).__name__ == "LineProgress"


def test_a_rich_bar_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from ruda_async.bench.progress import BarProgress

    progress: Progress = BarProgress()
    run_plan(Plan(operations=("barrier",), urls=("memory://b",), peers=("numpy",), **TINY), progress)


def test_empty_memory_needs_a_communicator_that_gives_it() -> None:
    from ruda_async import AsyncCommunicator

    plan = Plan(operations=("all_reduce",), urls=("memory://b",), peers=(), empty=True, reuse=True, **TINY)
    if hasattr(AsyncCommunicator, "empty"):
        assert_sound(run_plan(plan))
    else:
        with pytest.raises(Exception, match=r"comm\.empty"):
            run_plan(plan)


def test_every_argument_reaches_the_plan() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    text = (
        "send --sizes 8 --world 2,3 --url a://x --url b://y --mode sync,async --dtype int8 --in-flight 1,4 "
        "--peers raw --rounds 9 --block 0.5 --row 7 --out --empty --timeout 3"
    )
    assert bench._plan(parser.parse_args(text.split())) == Plan(
        ("send",), (8,), (2, 3), ("a://x", "b://y"), ("sync", "async"), "int8", (1, 4), ("raw",), 9, 0.5,
        True, True, 7, 3.0,
    )  # fmt: skip
