"""Ranks as real processes: `run` and `spawn`, and what is left when things go wrong."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launch_ranks
import pytest

from ruda_async import CollectiveTimeoutError, ConfigError, PeerLostError, RudaError, spawn
from ruda_async.launch import SpawnError
from ruda_async.launch.output import Lines, Screen, Source
from ruda_async.launch.plan import prepare

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="the tests watch processes as Linux does"
)

LIMIT = 30.0


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("RUDA_")]:
        monkeypatch.delenv(key)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a program for the ranks; it knows its `rank`."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text("import os, sys\nrank = int(os.environ['RUDA_RANK'])\n" + textwrap.dedent(text))
        return str(path)

    return write


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "ruda_async", "run", *args]


def launch(*args: str, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*args), input=stdin, capture_output=True, timeout=LIMIT, **options)


@contextlib.contextmanager
def launched(*args: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a session of its own, killed at the end whatever happens."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with subprocess.Popen(command(*args), start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def read_lines(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(count))


def gone(pid: int, seconds: float = LIMIT) -> bool:
    """Whether the process ends (or has ended) within `seconds`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select((fd,), (), (), seconds)[0])
    finally:
        os.close(fd)


# ---------------------------------------------------------------------- run: programs and codes


def test_all_ranks_join_and_get_arguments(script: Callable[[str], str]) -> None:
    path = script("""
        import numpy as np
        from ruda_async import sync
        with sync.connect(timeout=20) as comm:
            print(comm.all_reduce_sum(np.array([comm.rank + 1.0])).item(), sys.argv[1:])
    """)
    done = launch("-n", "3", path, "--lr", "0.1", "-n", "5")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        b"[rank %d] 6.0 ['--lr', '0.1', '-n', '5']" % rank for rank in range(3)
    ]
    assert done.stderr == b""


def test_what_can_be_run(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print('main', *sys.argv[1:])\n")
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for args in ([str(package), "-x"], ["-m", "package", "-x"], ["--", "echo", "main", "-x"]):
        done = launch("-n", "2", *args, env=environ)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [b"[rank 0] main -x", b"[rank 1] main -x"]


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """What one rank opens to read and another to write, so that they wait for each other."""
    os.mkfifo(path := tmp_path / "fifo")
    return str(path)


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(3)", 3, b"exited with code 3"),
        ("os.kill(os.getpid(), 9)", 137, b"was ended by SIGKILL"),
        ("raise KeyError('x')", 1, b"exited with code 1"),
    ],
)
def test_the_first_failure_ends_the_others(
    script: Callable[[str], str], fifo: str, end: str, code: int, how: bytes
) -> None:
    path = script(f"""
        import subprocess, threading
        if rank == 0:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            print(os.getpid(), child.pid, file=open({fifo!r}, "w"), flush=True)
            threading.Event().wait()
        print(open({fifo!r}).readline().strip(), flush=True)
        {end}
    """)
    done = launch("-n", "2", path)
    assert done.returncode == code
    assert b"ruda-async: rank 1 " + how + b"; ending the other ranks" in done.stderr
    assert done.stderr.count(b"ruda-async:") == 1
    pids = pids_of(done.stdout.splitlines())
    assert len(pids) == 2
    assert all(gone(pid, 0) for pid in pids)


def test_the_others_may_go_on(script: Callable[[str], str]) -> None:
    path = script("""
        if rank == 1:
            os.kill(os.getpid(), 9)
        if rank == 2:
            sys.exit(3)
        for line in sys.stdin:  # told that both are gone
            pass
        print("done", flush=True)
        sys.exit(5)
    """)
    with launched("-n", "3", "--keep-going", path, stdin=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        notes = sorted(process.stderr.readline() for _ in range(2))
        process.stdin.close()
        process.stdin = None
        output, more = process.communicate(timeout=LIMIT)
    assert notes == [
        b"ruda-async: rank 1 was ended by SIGKILL; the others go on\n",
        b"ruda-async: rank 2 exited with code 3; the others go on\n",
    ]
    assert output == b"[rank 0] done\n"
    assert process.returncode == 5
    assert b"rank 0 exited with code 5" in more


def test_ranks_that_ignore_sigterm_are_killed(script: Callable[[str], str], fifo: str) -> None:
    path = script(f"""
        import signal, threading
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open({fifo!r}, "w").close()
            threading.Event().wait()
        open({fifo!r}).read()
        sys.exit(5)
    """)
    start = time.monotonic()
    done = launch("-n", "2", "--grace", "0.2", path)
    assert done.returncode == 5
    assert time.monotonic() - start < 15
    assert b"rank 0 did not end within 0.2 s of SIGTERM and is killed" in done.stderr


def test_a_launcher_inside_a_rank(script: Callable[[str], str]) -> None:
    path = script("""
        import subprocess
        inner = "import os; print(os.environ['RUDA_RANK'], os.environ['RUDA_WORLD_SIZE'])"
        if rank == 0:
            sys.exit(subprocess.call(
                [sys.executable, "-m", "ruda_async", "run", "-n", "3", "--", sys.executable, "-c", inner]))
    """)
    done = launch("-n", "2", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] [rank %d] %d 3" % (r, r) for r in range(3)]


# ---------------------------------------------------------------------- run: output and input


def test_lines_are_whole_and_complete(script: Callable[[str], str]) -> None:
    path = script("""
        for i in range(300):
            for piece in (f"{rank}:{i}:", "x" * (i * 37 % 5000), f":{rank}"):
                sys.stdout.write(piece)
                sys.stdout.flush() if i % 50 == 0 else None
            sys.stdout.write("\\n")
        sys.stderr.write("no end of line")
    """)
    done = launch("-n", "3", path)
    assert done.returncode == 0
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for line in done.stdout.splitlines():
        match = re.fullmatch(rb"\[rank (\d)\] \1:(\d+):(x*):\1", line)
        assert match, line[:80]
        assert len(match[3]) == int(match[2]) * 37 % 5000
        found[int(match[1])].append(int(match[2]))
    assert all(numbers == list(range(300)) for numbers in found.values())
    assert sorted(done.stderr.splitlines()) == [b"[rank %d] no end of line" % r for r in range(3)]
    assert done.stderr.endswith(b"\n")


def test_without_a_prefix_every_byte_passes(script: Callable[[str], str]) -> None:
    path = script("os.write(1, bytes(range(256)) * 1000)")
    done = launch("-n", "1", "--no-prefix", path)
    assert done.stdout == bytes(range(256)) * 1000
    assert done.returncode == 0


def test_standard_input_is_for_rank_0(script: Callable[[str], str]) -> None:
    done = launch("-n", "2", script("print(sys.stdin.read().upper())"), stdin=b"words")
    assert sorted(done.stdout.split(b"\n")) == [b"", b"[rank 0] WORDS", b"[rank 1] "]


def test_a_terminal_is_typed_into_rank_0(script: Callable[[str], str]) -> None:
    path = script("""
        if rank == 0:
            print("you said", input("name? "))
    """)
    ours, theirs = pty.openpty()
    shown = b""
    try:
        take_terminal = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        code = take_terminal + "from ruda_async.cli import main; sys.exit(main())"
        with subprocess.Popen(
            [sys.executable, "-c", code, "run", "-n", "2", path],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                typed = False
                while b"you said Ada" not in shown and select.select((ours,), (), (), LIMIT)[0]:
                    shown += os.read(ours, 4096)
                    if b"name? " in shown and not typed:
                        os.write(ours, b"Ada\n")
                        typed = True
                assert process.wait(LIMIT) == 0, shown
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"[rank 0] name? " in shown
    assert b"you said Ada" in shown


def test_a_reader_that_leaves_ends_the_job(script: Callable[[str], str]) -> None:
    path = script("""
        while True:
            print("again")
    """)
    with launched("-n", "2", path) as process:
        read_lines(process, 3)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(LIMIT) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def show(*pieces: bytes, plain: bool = False, every: float = 0.0) -> bytes:
    """What one rank's output in these pieces looks like."""
    lines, shown = Lines(plain), b""
    for i, piece in enumerate(pieces):
        shown += lines.feed(piece, i * every)
        if lines.patience(i * every) == 0:
            shown += lines.overdue(i * every)
    return shown + lines.finish()


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ((b"a", b"b\nc", b"\n"), b"ab\nc\n"),
        ((b"10%\r20%\r", b"30%\r", b"done\n"), b"done\n"),
        ((b"10%\r", b"20%\r\n"), b"20%\n"),
        ((b"dos\r", b"\nline\r\n"), b"dos\nline\n"),
        ((b"50%\r",), b"50%"),
        ((b"abc\r", b"def\n"), b"def\n"),
        ((b"\n\n",), b"\n\n"),
        ((b"x" * 200_000, b"\n"), b"x" * 200_000 + b"\n"),
    ],
)
def test_lines(pieces: tuple[bytes, ...], shown: bytes) -> None:
    assert show(*pieces) == shown
    assert show(*pieces, plain=True) == b"".join(pieces)


def test_progress_is_shown_now_and_then() -> None:
    states = [b"\r%d%%" % i for i in range(100)]
    shown = show(*states, b"\n", every=0.1).splitlines()
    assert shown[-1] == b"99%"
    assert len(shown) == 2
    assert re.fullmatch(rb"\d+%", shown[0])


def test_an_open_line_is_ended_before_another_rank_writes(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as sink, (tmp_path / "err").open("w+b") as other:
        screen, a, b = Screen(), Source(sink, b"[0] "), Source(sink, b"[1] ")
        c = Source(other, b"[0] ")
        screen.show(a, b"name? ")
        screen.show(c, b"elsewhere\n")
        screen.show(a, b"Ada\nage? ")
        screen.show(b, b"hello\n")
        screen.show(a, b"7")
        screen.end_line(a)
        screen.show(b, b"x\n\ny\n")
        sink.seek(0)
        assert sink.read() == b"[0] name? Ada\n[0] age? \n[1] hello\n[0] 7\n[1] x\n[1] \n[1] y\n"


# ---------------------------------------------------------------------- run: interrupts and orphans

WAITING = """
    import signal, subprocess, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        print(os.getpid(), child.pid, flush=True)
        while True:  # a signal that comes just before a sleep does not end it
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("bye", rank, flush=True)
        raise SystemExit(130)
"""


def pids_of(lines: list[bytes]) -> list[int]:
    return [int(word) for line in lines for word in line.partition(b"] ")[2].split()]


def test_ctrl_c_reaches_every_rank_once(script: Callable[[str], str]) -> None:
    with launched("-n", "2", "--grace", "20", script(WAITING)) as process:
        pids = pids_of(read_lines(process, 2))
        os.killpg(process.pid, signal.SIGINT)
        assert read_lines(process, 2) == [b"[rank 0] bye 0", b"[rank 1] bye 1"]
        assert process.wait(LIMIT) == 130
        assert process.stderr is not None
        assert b"ruda_async" not in process.stderr.read()
        assert len(pids) == 4
        assert all(gone(pid, 0) for pid in pids)


def test_a_second_ctrl_c_kills(script: Callable[[str], str]) -> None:
    path = script("""
        import signal, time
        signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
        print(os.getpid(), os.getpid(), flush=True)
        while True:
            time.sleep(0.1)
    """)
    with launched("-n", "2", "--grace", "1000", path) as process:
        pids = pids_of(read_lines(process, 2))
        os.killpg(process.pid, signal.SIGINT)
        assert read_lines(process, 2) == [b"[rank 0] no", b"[rank 1] no"]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT) == 137
        assert all(gone(pid, 0) for pid in pids)


def test_sigterm_is_passed_on(script: Callable[[str], str]) -> None:
    with launched("-n", "2", script(WAITING)) as process:
        pids = pids_of(read_lines(process, 2))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 143
        assert all(gone(pid, 0) for pid in pids)


def test_nothing_outlives_a_killed_launcher(script: Callable[[str], str]) -> None:
    with launched("-n", "2", script(WAITING)) as process:
        pids = pids_of(read_lines(process, 2))
        process.kill()
        process.wait()
        assert len(pids) == 4
        assert all(gone(pid) for pid in pids)


# ---------------------------------------------------------------------- run: the secret and the socket

FACTS = """
    keys = ("RUDA_SECRET", "RUDA_URL", "RUDA_LISTEN_FD", "RUDA_WORLD_SIZE", "RUDA_LOCAL_RANK")
    with open(f"{sys.argv[1]}/{rank}", "w") as file:
        print(*(os.environ.get(key) or "-" for key in keys), file=file)
        if rank == 0 and os.environ["RUDA_LISTEN_FD"]:
            import socket
            sock = socket.socket(fileno=int(os.environ["RUDA_LISTEN_FD"]))
            print(sock.getsockname()[1], sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), file=file)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            print(open(f"/proc/{pid}/cmdline").read(), end=" ")
        except OSError:  # gone, or not ours to see
            pass
    print()
"""


def test_the_secret_is_shared_and_shown_nowhere(script: Callable[[str], str], tmp_path: Path) -> None:
    facts = tmp_path / "facts"
    facts.mkdir()
    done = launch("-n", "2", "--url", "tcp://127.0.0.1:0", script(FACTS), str(facts))
    assert done.returncode == 0, done.stderr
    (first, listening), (second,) = ((facts / rank).read_text().splitlines() for rank in "01")
    secret, url, fd, world_size, local_rank = first.split()
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret.encode() not in done.stdout + done.stderr
    assert b"ruda_async" in done.stdout  # the launcher's own command line was looked at
    assert second.split() == [secret, url, "-", "2", "1"]
    assert (world_size, local_rank) == ("2", "0")
    assert fd != "-"
    assert listening == f"{url.rpartition(':')[2].partition('/')[0]} 1"


def test_a_secret_that_is_set_is_kept(script: Callable[[str], str], tmp_path: Path) -> None:
    done = launch("-n", "2", script(FACTS), str(tmp_path), env=os.environ | {"RUDA_SECRET": "mine"})
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text().split()[0] for rank in "01"] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("url", "pattern"),
    [
        ("tcp://127.0.0.1:0/j?timeout=9", r"tcp://127\.0\.0\.1:\d{4,5}/j\?timeout=9"),
        ("tcp://", r"tcp://127\.0\.0\.1:\d{4,5}"),
        ("tcp://127.0.0.1?timeout=9", r"tcp://127\.0\.0\.1:\d{4,5}\?timeout=9"),
        ("tcp://10.0.0.5:29500/j", r"tcp://10\.0\.0\.5:29500/j"),
        (None, r"\w+://.*job-\d+-\w+"),
    ],
)
def test_the_plan_has_a_real_port(url: str | None, pattern: str) -> None:
    with prepare(url, 2, environ={}) as plan:
        assert re.fullmatch(pattern, plan.url)
        assert "RUDA_SECRET" in plan.variables(0)
        assert plan.variables(0)["RUDA_SECRET"] not in repr(plan)
        if plan.listener is not None:
            assert f":{plan.listener.getsockname()[1]}" in plan.url


def test_the_plan_honours_the_url_of_the_environment_outside_of_a_job() -> None:
    environ = {"RUDA_URL": "tcp://127.0.0.1:29999/outer"}
    assert prepare(None, 2, environ=environ).url == "tcp://127.0.0.1:29999/outer"
    with prepare(None, 2, environ=environ | {"RUDA_RANK": "0", "RUDA_WORLD_SIZE": "2"}) as plan:
        assert "outer" not in plan.url


@pytest.mark.parametrize(
    ("url", "world_size", "text"),
    [
        ("tcp://127.0.0.1:0", 0, "world_size=0 is out of range"),
        ("tcp://127.0.0.1:0", True, "world_size=True"),
        ("memory://x", 2, "memory:// links ranks of one process.*threads=True"),
        ("tcp://127.0.0.1:0?rank=1", 2, r"names a rank, .*leave rank= out"),
        ("tcp://127.0.0.1:0?world_size=3", 2, "says world_size=3.*told 2"),
        ("tcp://127.0.0.1:0?heartbeet=3", 2, "did you mean 'heartbeat'"),
        ("tcp://192.0.2.1:0", 2, "cannot listen on '192.0.2.1'"),
        ("lab", 2, "names no transport"),
        ("tcpp://x:1", 2, "did you mean 'tcp'"),
    ],
)
def test_mistakes_before_anything_starts(url: str, world_size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        spawn(launch_ranks.rank, world_size, url)


# ---------------------------------------------------------------------- spawn


@pytest.mark.parametrize("threads", [False, True])
def test_results_come_in_rank_order(threads: bool) -> None:
    assert spawn(launch_ranks.add_up, 3, args=(10,), threads=threads) == [(r, 33.0) for r in range(3)]


@pytest.mark.parametrize("threads", [False, True])
def test_coroutine_functions(threads: bool) -> None:
    assert spawn(launch_ranks.add_up_async, 2, args=(10,), threads=threads) == [(0, 21.0), (1, 21.0)]


def test_connecting_again_meets_at_the_same_socket() -> None:
    assert spawn(launch_ranks.connect_twice, 2, "tcp://127.0.0.1:0") == [[2.0, 2.0]] * 2
    assert spawn(launch_ranks.connect_twice, 2, "tcp://127.0.0.1:0", threads=True) == [[2.0, 2.0]] * 2


def test_ranks_see_their_variables_and_the_parent_keeps_its_own() -> None:
    names = ("RUDA_RANK", "RUDA_LOCAL_RANK", "RUDA_WORLD_SIZE")
    assert spawn(launch_ranks.variables, 2, args=names) == [("0", "0", "2"), ("1", "1", "2")]
    assert not [key for key in os.environ if key.startswith("RUDA_")]


def test_an_exception_comes_back_with_its_rank_and_traceback() -> None:
    with pytest.raises(SpawnError, match="rank 1 failed: LookupError: oops on rank 1") as caught:
        spawn(launch_ranks.fail_on, 2, args=(1, "oops"))
    assert isinstance(caught.value, RudaError)
    assert (caught.value.rank, caught.value.exitcode) == (1, None)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in fail_on" in caught.value.__notes__[0]
    assert "The traceback of rank 1" in caught.value.__notes__[0]


def test_an_exception_in_a_thread() -> None:
    with pytest.raises(SpawnError, match="rank 1 failed: LookupError: the reason") as caught:
        spawn(launch_ranks.fail_among_peers, 2, threads=True)
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("fn", [launch_ranks.fail_among_peers, launch_ranks.blame])
def test_the_cause_is_reported_and_not_its_echo(fn: Callable[..., None]) -> None:
    args = (1,) if fn is launch_ranks.blame else ()
    with pytest.raises(SpawnError, match="rank 1 failed: LookupError: the reason"):
        spawn(fn, 2, args=args)


def test_blame_without_a_story_stands() -> None:
    with pytest.raises(SpawnError, match="rank 0 failed") as caught:
        spawn(launch_ranks.blame, 1, args=(7,))
    assert isinstance(caught.value.__cause__, PeerLostError)


def test_a_killed_rank_is_reported_by_its_signal() -> None:
    with pytest.raises(SpawnError, match="rank 1 was ended by SIGKILL") as caught:
        spawn(launch_ranks.die, 2, args=(1,))
    assert (caught.value.rank, caught.value.exitcode) == (1, -signal.SIGKILL)


def test_a_killed_rank_is_noticed_though_its_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ruda_async.launch.spawn"], "_GRACE", 1000.0)  # to wait it out would hang
    file = tmp_path / "child"
    try:
        with pytest.raises(SpawnError, match="rank 0 was ended by SIGKILL"):
            spawn(launch_ranks.die_with_a_forked_child, 1, args=(str(file),), timeout=LIMIT)
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 4])
def test_a_rank_that_leaves_is_a_failure(code: int) -> None:
    with pytest.raises(SpawnError, match=f"exited with code {code} before it returned") as caught:
        spawn(launch_ranks.leave, 1, args=(code,))
    assert caught.value.exitcode == code


def test_what_cannot_be_pickled_is_said() -> None:
    with pytest.raises(ConfigError, match=r"cannot hand .*lambda.*another process.*threads=True"):
        spawn(lambda: 1, 1)
    with pytest.raises(SpawnError, match=r"what it returned \(lock\) cannot be pickled"):
        spawn(launch_ranks.return_unpicklable, 1)
    with pytest.raises(SpawnError, match="rank 0 failed: RuntimeError: Picky: 1 and 2"):
        spawn(launch_ranks.raise_picky, 1)
    with pytest.raises(SpawnError, match=r"rank 0 failed: RuntimeError: .*Wordless"):
        spawn(launch_ranks.raise_wordless, 1)
    with pytest.raises(SpawnError) as caught:
        spawn(launch_ranks.raise_ruda, 1)
    assert isinstance(caught.value.__cause__, RudaError)
    assert caught.value.__cause__.rank == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
@pytest.mark.parametrize("threads", [False, True])
def test_a_time_limit_out_of_range(seconds: float, threads: bool) -> None:
    with pytest.raises(ConfigError, match=r"timeout=.* is out of range"):
        spawn(launch_ranks.rank, 1, timeout=seconds, threads=threads)


def test_the_time_limit_names_who_is_missing() -> None:
    with pytest.raises(CollectiveTimeoutError, match="ranks 0, 1 of 2 had not returned") as caught:
        spawn(launch_ranks.fail_on, 2, args=(-1, ""), timeout=0.1)
    assert caught.value.missing == (0, 1)
    with pytest.raises(CollectiveTimeoutError):
        spawn(threading.Event().wait, 1, timeout=0.1, threads=True)


PARENT = """
import sys
sys.path[:0] = {path!r}
import launch_ranks, ruda_async
if __name__ == "__main__":
    try:
        ruda_async.spawn(launch_ranks.announce_and_wait, 2)
    except KeyboardInterrupt:
        sys.exit(42)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 42), (signal.SIGKILL, -9)])
def test_ranks_go_with_their_parent(tmp_path: Path, number: signal.Signals, code: int) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT.format(path=sys.path))
    with subprocess.Popen(
        [sys.executable, str(program)], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            pids = [int(line) for line in read_lines(process, 2)]
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as the terminal does
            else:
                process.kill()
            assert process.wait(LIMIT) == code
            assert all(gone(pid) for pid in pids)
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()
