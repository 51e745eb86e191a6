"""The command line: errors in one line, exit codes, and the doctor."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import FakePlugin, FakeWrapper, Nothing

from ruda_async import ConfigError, __version__
from ruda_async.cli import COMMANDS, doctor, main
from ruda_async.transport import registry
from ruda_async.transport.registry import register_plugin, unregister_plugin


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("RUDA_")]:
        monkeypatch.delenv(key)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The doctor sees one that works, and these."""
    memory = registry.plugins()["memory"]
    fakes = [
        FakePlugin("absent", unavailable="no hardware; buy some"),
        FakePlugin("broken", rank_per="task", example="broken://example", parameters=Nothing),
        FakeWrapper("slow"),
    ]
    for plugin in fakes:
        register_plugin(plugin)
    shown = {plugin.scheme: registry.plugins()[plugin.scheme] for plugin in fakes} | {"memory": memory}
    monkeypatch.setattr(doctor, "plugins", lambda: shown)
    yield shown
    for plugin in fakes:
        unregister_plugin(plugin.scheme)


# ---------------------------------------------------------------------- errors and codes


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["run", "-n", "2", "--url", "nowhere://x", "--", "true"], "unknown scheme 'nowhere'"),
        (["run", "-n", "0", "--", "true"], "world_size=0 is out of range"),
        (["run", "-n", "2", "--url", "memory://x", "--", "true"], "threads=True"),
        (["run", "-n", "2", "--grace", "nan", "--", "true"], "grace=nan is out of range"),
        (["run", "-n", "2", "--grace", "-1", "--", "true"], "grace=-1 is out of range"),
        (["tune", "--rounds", "0"], "rounds=0 is out of range"),
        (["run", "-n", "2"], "nothing to run; give a script"),
        (["run", "-n", "2", "--"], "nothing to run"),
        (["run", "-n", "2", "-m"], "-m needs a module"),
        (["run", "-n", "2", "no-such-file.py"], "'no-such-file.py' is neither a Python file"),
        (["run", "-n", "2", "--", "no-such-program"], "'no-such-program' is neither"),
        (["run", "-n", "2", "/"], "the folder '/' has no __main__.py"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("ruda-async: ")
    assert err.count("\n") == 1
    assert text in err


def test_traceback_on_request() -> None:
    with pytest.raises(ConfigError, match="world_size=0"):
        main(["--traceback", "run", "-n", "0", "--", "true"])


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert main(["doctor"]) == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["run"], ["doctor", "--nonsense"]])
def test_usage_errors(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: ruda-async" in capfd.readouterr().err


_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no full disk to be had")


@_full
@pytest.mark.parametrize(
    ("argv", "code"), [(["doctor", "--no-test"], 2), (["run", "-n", "2", "--", "echo", "x"], 141)]
)
def test_a_full_disk_is_one_line(argv: list[str], code: int) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ruda_async", *argv], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == code
    assert b"No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_output_may_be_closed(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m ruda_async doctor --no-test {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_locale_without_the_characters() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruda_async", "doctor", "--no-test"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"faults+?://" in done.stdout


def test_help_offers_the_commands_that_are_there(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capfd.readouterr().out
    assert COMMANDS["run"] in out
    assert "doctor" in out


def test_a_command_without_a_module_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "imaginary", "do nothing at all")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "imaginary" not in capfd.readouterr().out


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_each_command_explains_itself(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: ruda-async {command}" in capfd.readouterr().out


def test_module_entry_point() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "ruda_async", "--version"), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ruda-async {__version__}\n"


def test_run_passes_the_code_on(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["run", "-n", "2", "--", "sh", "-c", "echo hello; exit 0"]) == 0
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"[rank 0] hello", b"[rank 1] hello"]
    assert main(["run", "-n", "1", "--", "sh", "-c", "exit 6"]) == 6


# ---------------------------------------------------------------------- doctor


def test_doctor_json(known: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["versions"]["ruda-async"] == __version__
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["numpy"]
    found = {transport["scheme"]: transport for transport in report["transports"]}
    assert {scheme: entry["status"] for scheme, entry in found.items()} == {
        "memory": "works",
        "absent": "unavailable",
        "broken": "failed",
        "slow": "wrapper",
    }
    assert 0 < found["memory"]["latency"] < 1
    assert found["absent"]["detail"] == "no hardware; buy some"
    assert "broken carries nothing" in found["broken"]["detail"]
    assert found["slow"]["parameters"][0]["name"] == "delay_ms"


def test_doctor_is_content_without_failures(known: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    del known["broken"]
    assert main(["doctor", "--parameters"]) == 0
    out = capfd.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "works" in lines["memory://"]
    assert "µs" in lines["memory://"]
    assert "no hardware; buy some" in lines["absent://"]
    assert "delay_ms" in lines
    assert "secret_file" in lines


def test_doctor_tests_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = registry.plugins()["tcp"]
    monkeypatch.setattr(doctor, "plugins", lambda: {"tcp": tcp})
    (found,) = doctor.examine()["transports"]
    assert (found["status"], found["detail"]) == ("works", "")
    assert 0 < found["latency"] < 1


def test_doctor_without_tests_connects_nothing(known: dict[str, Any]) -> None:
    report = doctor.examine(test=False)
    assert {t["scheme"]: t["status"] for t in report["transports"]}["broken"] == "usable"


def test_doctor_survives_a_plugin_that_raises(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]) -> None:
    def careless(self: FakePlugin) -> str | None:
        raise OSError("no such device")

    monkeypatch.setattr(FakePlugin, "unavailable", careless)
    found = {t["scheme"]: t for t in doctor.examine(test=False)["transports"]}
    assert found["absent"]["status"] == "failed"
    assert "OSError: no such device" in found["absent"]["detail"]


def test_doctor_finds_a_wrong_sum(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]) -> None:
    import numpy as np

    from ruda_async import sync

    monkeypatch.setattr(sync.Communicator, "all_reduce_sum", lambda self, value: np.array([-1.0]))
    found = {t["scheme"]: t for t in doctor.examine()["transports"]}
    assert found["memory"]["status"] == "failed"
    assert "all_reduce_sum of 0 and 1 gave -1" in found["memory"]["detail"]


def test_doctor_imports_nothing_that_it_lists() -> None:
    code = (
        "import sys; from ruda_async.cli import doctor; doctor.examine(test=False); "
        "print([m for m in ('torch', 'uvloop', 'mpi4py', 'ucxx', 'rich') if m in sys.modules])"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_on_a_terminal_draws_tables() -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    try:
        process = subprocess.run(
            (sys.executable, "-m", "ruda_async", "doctor", "--no-test"),
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "100", "TERM": "xterm"},
            timeout=30,
        )
        assert process.returncode == 0, process.stderr
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "┃" in shown
    assert "memory://" in shown


@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [
        (None, "usable", "not tested without them"),
        ("print('ruda-async probe: [0.25, []]')", "works", ""),
        (
            "import sys; print('no node is free'); sys.exit(3)",
            "failed",
            "code 3, and said last: no node is free",
        ),
        ("pass", "failed", "code 0, and said last: nothing"),
        ("import time; time.sleep(60)", "failed", "took over 2 s"),
    ],
    ids=["no engine", "works", "refuses", "says nothing", "does not end"],
)
def test_doctor_has_an_engine_start_its_ranks(
    monkeypatch: pytest.MonkeyPatch, script: str | None, status: str, detail: str
) -> None:
    plugin: Any = FakePlugin("engine", rank_per="engine", example="engine://example", parameters=Nothing)
    asked = []

    def command(ranks: int) -> list[str] | None:
        asked.append(ranks)
        return None if script is None else [sys.executable, "-c", script]

    plugin.command = command
    register_plugin(plugin)
    known = {"engine": registry.plugins()["engine"]}
    monkeypatch.setattr(doctor, "plugins", lambda: known)
    monkeypatch.setattr(doctor, "LIMIT", 2.0 if status == "failed" and "took" in detail else 30.0)
    try:
        (found,) = doctor.examine()["transports"]
    finally:
        unregister_plugin("engine")
    assert asked == [2]
    assert found["status"] == status
    assert detail in found["detail"]
    assert found["latency"] == (0.25 if status == "works" else None)
