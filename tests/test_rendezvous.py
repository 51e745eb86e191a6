"""How ranks find each other, over real sockets, all ranks in one loop (and once in processes)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruda_async import rendezvous
from ruda_async.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    ConfigError,
    ProtocolError,
    RudaError,
)
from ruda_async.rendezvous import MAX_PAYLOAD, Meeting, exchange, meet
from ruda_async.transport import wire
from ruda_async.transport.handshake import prove, read_exactly, write_all
from ruda_async.transport.job import Job, Secret

HOST = "127.0.0.1"
CONTEXT = b"ruda-async rendezvous"


def free_port(family: int = socket.AF_INET, host: str = HOST) -> int:
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def make_job(rank: int, world_size: int, timeout: float = 20.0, **fields: Any) -> Job:
    known = {"name": "lab", "host": None, "port": None, "parameters": None, "secret": Secret(b"")}
    deadline = time.monotonic() + timeout
    return Job(rank=rank, world_size=world_size, timeout=timeout, deadline=deadline, **(known | fields))


def start(
    rank: int, world_size: int, address: Any, timeout: float = 20.0, **fields: Any
) -> asyncio.Task[Meeting]:
    """One rank of a meeting, as a task; its payload is its number."""
    payload = b"payload %d" % rank
    return asyncio.create_task(meet(make_job(rank, world_size, timeout, **fields), payload, address))


def expected(world_size: int) -> list[bytes]:
    return [b"payload %d" % rank for rank in range(world_size)]


async def results(*tasks: asyncio.Task[Meeting]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def assert_met(meetings: list[Any], world_size: int) -> None:
    for meeting in meetings:
        if isinstance(meeting, BaseException):
            raise meeting
        assert meeting.payloads == expected(world_size)
        assert meeting.session == meetings[0].session
        assert len(meeting.session) == 16


async def connected(port: int) -> socket.socket:
    """A connection to a rank 0 that is about to listen."""
    loop = asyncio.get_running_loop()
    while True:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, (HOST, port))
            return sock
        except OSError:
            sock.close()


async def joined(port: int, record: dict[str, Any] | bytes) -> socket.socket:
    """A connection that has proved the (empty) secret and sent a record."""
    sock = await connected(port)
    await prove(sock, Secret(b""), server=False, context=CONTEXT, deadline=time.monotonic() + 20)
    data = record if isinstance(record, bytes) else wire.pack_record(record)
    await write_all(asyncio.get_running_loop(), sock, data)
    return sock


def join_record(number: int, size: int, **changes: Any) -> dict[str, Any]:
    payload = b"payload %d" % number
    known = {"protocol": 1, "job": "lab", "rank": number, "world_size": size, "payload": payload}
    return known | changes


async def answer(sock: socket.socket) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    prefix = await read_exactly(loop, sock, 4)
    return wire.unpack_record(
        prefix + await read_exactly(loop, sock, wire.record_bytes(prefix, 1 << 20)), 1 << 20
    )


async def until_joined(port: int, rank: int, world_size: int, spare: int) -> None:
    """Return once `rank` has its place; asks rank 0 who is missing, as the rank `spare`."""
    loop = asyncio.get_running_loop()
    missing = [rank]
    while rank in missing:
        with await joined(port, join_record(spare, world_size)) as sock:
            await write_all(loop, sock, b"?")
            missing = (await answer(sock))["ranks"]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No task and no descriptor more than before."""
    gc.collect()
    tasks, descriptors = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))
    yield
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ---------------------------------------------------------------------- meeting


@pytest.mark.parametrize("world_size", [2, 3, 8, 20])
async def test_all_ranks_get_all_payloads_and_one_session(world_size: int) -> None:
    address = (HOST, free_port())
    with nothing_left():
        meetings = await results(*(start(rank, world_size, address) for rank in range(world_size)))
        assert_met(meetings, world_size)


async def test_exchange_returns_the_payloads_alone() -> None:
    address = (HOST, free_port())
    calls = [exchange(make_job(rank, 2), b"payload %d" % rank, address) for rank in range(2)]
    assert await asyncio.gather(*calls) == [expected(2)] * 2


async def test_one_rank_does_no_input_or_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", None)
        meetings = [await meet(make_job(0, 1), b"mine", ("no such host", 0)) for _ in range(2)]
    assert [m.payloads for m in meetings] == [[b"mine"]] * 2
    assert meetings[0].session != meetings[1].session


async def test_payloads_up_to_the_limit_travel_and_larger_ones_do_not() -> None:
    address = (HOST, free_port())
    payloads = [os.urandom(MAX_PAYLOAD), b"", os.urandom(MAX_PAYLOAD)]
    calls = [exchange(make_job(rank, 3), payloads[rank], address) for rank in range(3)]
    assert await asyncio.gather(*calls) == [payloads] * 3
    for world_size in (1, 2):
        with pytest.raises(ValueError, match="65537 bytes is over the limit of 65536"):
            await meet(make_job(0, world_size), bytes(MAX_PAYLOAD + 1), address)


def test_any_start_order_works() -> None:
    @settings(max_examples=10, deadline=None)
    @given(st.permutations(range(4)), st.lists(st.integers(0, 12), min_size=4, max_size=4))
    def check(order: list[int], pauses: list[int]) -> None:
        async def run() -> None:
            address = (HOST, free_port())
            tasks = []
            for rank, pause in zip(order, pauses, strict=True):
                for _ in range(pause):  # turns of the loop, in which earlier ranks get on
                    await asyncio.sleep(0.001)
                tasks.append(start(rank, 4, address))
            assert_met(await results(*tasks), 4)

        asyncio.run(run())

    check()


async def test_ranks_wait_for_a_late_rank_0_and_for_a_late_last_rank() -> None:
    address = (HOST, free_port())
    early = [start(1, 4, address), start(2, 4, address)]
    await asyncio.wait(early, timeout=0.4)
    early.append(start(0, 4, address))
    await asyncio.wait(early, timeout=0.2)
    assert not any(task.done() for task in early)
    assert_met(await results(*early, start(3, 4, address)), 4)


async def test_ten_meetings_in_a_row_on_one_port() -> None:
    address = (HOST, free_port())
    sessions = set()
    for _ in range(10):
        meetings = await results(*(start(rank, 3, address) for rank in range(3)))
        assert_met(meetings, 3)
        sessions.add(meetings[0].session)
        # Free again for anybody, though its connections are in TIME_WAIT.
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen()
    assert len(sessions) == 10


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.2"])
async def test_other_loopback_addresses(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = (host, free_port(family, host))
    except OSError:
        pytest.skip(f"this machine has no {host}")
    assert_met(await results(*(start(rank, 2, address) for rank in range(2))), 2)


async def test_a_network_address_works_with_a_secret() -> None:
    port = free_port()
    secret = Secret(b"long and random")
    server = start(0, 2, ("0.0.0.0", port), secret=secret)
    assert_met(await results(server, start(1, 2, (HOST, port), secret=secret)), 2)


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_unix_sockets(kind: str, tmp_path: Any) -> None:
    if kind == "abstract" and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    address = str(tmp_path / "meet") if kind == "path" else f"\0ruda-test-{os.getpid()}-{free_port()}"
    for _ in range(3):
        assert_met(await results(*(start(rank, 3, address) for rank in (2, 0, 1))), 3)
        assert not list(tmp_path.iterdir())


async def test_the_socket_file_of_a_dead_rank_0_is_replaced_and_another_file_is_not(tmp_path: Any) -> None:
    path = tmp_path / "meet"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    assert_met(await results(*(start(rank, 2, str(path)) for rank in range(2))), 2)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="in use"):
        await meet(make_job(0, 2), b"", str(path))
    assert path.read_text() == "precious"


async def test_a_listening_socket_of_the_launcher_is_used_and_stays_open() -> None:
    with socket.create_server((HOST, 0)) as inherited:
        address = inherited.getsockname()[:2]
        for _ in range(2):
            tasks = [start(1, 2, address), start(0, 2, (HOST, 0), listen_fd=inherited.fileno())]
            assert_met(await results(*tasks), 2)


async def test_a_descriptor_that_does_not_listen_is_named() -> None:
    with socket.socket() as sock, nothing_left():
        with pytest.raises(ConfigError, match=f"descriptor {sock.fileno()} .*RUDA_LISTEN_FD"):
            await meet(make_job(0, 2, listen_fd=sock.fileno()), b"", (HOST, 0))
        with pytest.raises(ConfigError, match="RUDA_LISTEN_FD"):
            await meet(make_job(0, 2, listen_fd=99_999), b"", (HOST, 0))
    reader, writer = os.pipe()
    with nothing_left(), pytest.raises(ConfigError, match="RUDA_LISTEN_FD"):
        await meet(make_job(0, 2, listen_fd=reader), b"", (HOST, 0))
    os.close(reader)
    os.close(writer)


async def test_real_processes(tmp_path: Any) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import asyncio, os, sys, time\n"
        "from ruda_async.rendezvous import exchange\n"
        "from ruda_async.transport.job import Job, Secret\n"
        "rank, port = map(int, sys.argv[1:])\n"
        "job = Job('lab', rank, 3, None, None, None, Secret(b'k'), time.monotonic() + 40, 40)\n"
        "got = asyncio.run(exchange(job, b'rank %d' % rank, ('127.0.0.1', port)))\n"
        "print(got == [b'rank 0', b'rank 1', b'rank 2'])\n"
    )
    port = str(free_port())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(program), str(rank), port, stdout=asyncio.subprocess.PIPE, env=environment
        )
        for rank in (2, 1, 0)
    ]
    outputs = [(await process.communicate())[0] for process in processes]
    assert outputs == [b"True\n"] * 3
    assert [process.returncode for process in processes] == [0] * 3


# ---------------------------------------------------------------------- who does not come


async def test_the_deadline_names_the_missing_ranks_to_all_who_came() -> None:
    address = (HOST, free_port())
    with nothing_left():
        errors = await results(*(start(rank, 5, address, timeout=0.5) for rank in (0, 1, 3)))
    for error in errors:
        assert type(error) is CollectiveTimeoutError
        assert error.missing == (2, 4)
        assert "ranks 2, 4 of 5 did not come" in str(error)
    assert "timeout=0.5 s" in str(errors[0])


async def test_a_rank_with_a_shorter_deadline_learns_who_is_missing_and_the_others_go_on() -> None:
    address = (HOST, free_port())
    patient = [start(0, 4, address), start(1, 4, address)]
    (error,) = await results(start(2, 4, address, timeout=0.3))
    assert type(error) is CollectiveTimeoutError
    assert error.missing == (3,)
    assert "rank 3 of 4 did not come" in str(error)
    assert_met(await results(*patient, start(2, 4, address), start(3, 4, address)), 4)


async def test_ranks_that_gave_up_are_told_from_those_that_never_came() -> None:
    address = (HOST, free_port())
    patient = [start(0, 4, address, timeout=0.8), start(1, 4, address)]
    await results(start(2, 4, address, timeout=0.3))
    for error in await results(*patient):
        assert error.missing == (3,)
        assert "rank 3 of 4 did not come" in str(error)
        assert "rank 2 came and left at their own deadline" in str(error)
    patient = [start(0, 4, address, timeout=1.0), start(1, 4, address)]
    for rank in (2, 3):
        await results(start(rank, 4, address, timeout=0.2))
    for error in await results(*patient):
        assert error.missing == (2, 3)


async def test_a_rank_that_never_reached_rank_0_names_the_address_and_the_last_error() -> None:
    port = free_port()
    with nothing_left():
        (error,) = await results(start(2, 3, (HOST, port), timeout=0.2))
    assert type(error) is CollectiveTimeoutError
    assert error.missing == (0,)
    assert "rank 2 of 3: rank 0 was not reached within timeout=0.2 s" in str(error)
    assert f"({HOST}:{port}: Connection refused)" in str(error)


async def test_a_port_that_happens_to_reach_itself_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialling a free port of the ephemeral range now and then gets that very port as its source."""
    loop = asyncio.get_running_loop()
    address = (HOST, free_port())
    connect, own, tried = loop.sock_connect, [], asyncio.Event()

    async def to_itself(sock: socket.socket, target: Any) -> None:
        if not own:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
        await connect(sock, target)
        own.append(sock.getsockname() == sock.getpeername())
        tried.set()

    with monkeypatch.context() as patch:
        patch.setattr(loop, "sock_connect", to_itself)
        rank = start(1, 2, address)
        await tried.wait()
    assert own[0]
    assert_met(await results(rank, start(0, 2, address)), 2)


async def test_a_peer_that_takes_connections_and_never_answers() -> None:
    with socket.create_server((HOST, 0)) as silent:
        (error,) = await results(start(1, 2, silent.getsockname(), timeout=0.2))
    assert type(error) is CollectiveTimeoutError
    assert error.missing == (0,)
    assert "did not answer" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_deadline_in_the_past(rank: int) -> None:
    (error,) = await results(start(rank, 2, (HOST, free_port()), timeout=-1))
    assert type(error) is CollectiveTimeoutError
    assert error.missing == (1 - rank,)


async def test_a_rank_that_crashes_before_the_meeting_may_be_started_again() -> None:
    port = free_port()
    others = [start(0, 5, (HOST, port)), start(1, 5, (HOST, port))]
    with await joined(port, join_record(2, 5, payload=b"of the first life")):
        await until_joined(port, 2, 5, spare=3)
    others += [start(rank, 5, (HOST, port)) for rank in (2, 3, 4)]
    assert_met(await results(*others), 5)


async def test_a_rank_that_crashes_between_welcome_and_go_may_be_started_again() -> None:
    port = free_port()
    others = [start(0, 3, (HOST, port)), start(1, 3, (HOST, port))]
    with await joined(port, join_record(2, 3, payload=b"of the first life")) as sock:
        welcome = await answer(sock)
        assert welcome["payloads"][2] == b"of the first life"
    meetings = await results(*others, start(2, 3, (HOST, port)))
    assert_met(meetings, 3)
    assert meetings[0].session != welcome["session"]


async def test_nobody_leaves_before_the_last_has_confirmed() -> None:
    loop = asyncio.get_running_loop()
    port = free_port()
    others = [start(0, 3, (HOST, port)), start(1, 3, (HOST, port))]
    with await joined(port, join_record(2, 3)) as sock:
        assert (await answer(sock))["payloads"] == expected(3)
        await asyncio.wait(others, timeout=0.1)
        assert not any(task.done() for task in others)
        await write_all(loop, sock, b"+")
        assert await answer(sock) == {"kind": "go"}
        assert_met(await results(*others), 3)


async def test_a_rank_that_does_not_confirm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GRACE", 0.2)
    port = free_port()
    others = [start(rank, 3, (HOST, port), timeout=0.2) for rank in range(2)]
    with await joined(port, join_record(2, 3)):
        errors = await results(*others)
    assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2
    assert [error.missing for error in errors] == [(2,)] * 2


async def test_a_rank_0_that_crashes_may_be_started_again() -> None:
    port = free_port()
    waiting = start(1, 4, (HOST, port))
    first = start(0, 4, (HOST, port))
    await until_joined(port, 1, 4, spare=2)
    first.cancel()
    await results(first)
    assert_met(await results(waiting, *(start(rank, 4, (HOST, port)) for rank in (0, 2, 3))), 4)


# ---------------------------------------------------------------------- who does not fit


async def test_a_second_rank_of_one_number_is_refused_and_the_first_goes_on() -> None:
    port = free_port()
    first = [start(0, 4, (HOST, port)), start(1, 4, (HOST, port))]
    await until_joined(port, 1, 4, spare=2)
    (error,) = await results(start(1, 4, (HOST, port)))
    assert type(error) is ConfigError
    assert error.rank == 1
    assert "a second rank 1" in str(error)
    assert f"the first came from {HOST}:" in str(error)
    assert_met(await results(*first, start(2, 4, (HOST, port)), start(3, 4, (HOST, port))), 4)


async def test_a_refused_second_rank_is_mentioned_when_time_is_up() -> None:
    address = (HOST, free_port())
    errors = await results(*(start(rank, 4, address, timeout=0.5) for rank in (0, 2, 2)))
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["CollectiveTimeoutError", "CollectiveTimeoutError", "ConfigError"]
    assert type(errors[0]) is CollectiveTimeoutError
    assert errors[0].missing == (1, 3)
    assert "a second rank 2" in str(errors[0])


@pytest.mark.parametrize(("world_size", "rank"), [(3, 2), (5, 4), (5, 1)])
async def test_another_world_size_ends_it_for_all_at_once(world_size: int, rank: int) -> None:
    port = free_port()
    tasks = [start(0, 4, (HOST, port)), start(3, 4, (HOST, port))]
    await until_joined(port, 3, 4, spare=2)
    began = time.monotonic()
    errors = await results(*tasks, start(rank, world_size, (HOST, port)))
    assert time.monotonic() - began < 5
    for error in errors:
        assert type(error) is ConfigError
        assert error.rank == rank
        assert f"rank {rank} from {HOST}:" in str(error)
        assert f"world_size={world_size}" in str(error)
        assert "world_size=4" in str(error)


async def test_ranks_that_are_just_coming_in_are_told_too() -> None:
    address = (HOST, free_port())
    errors = await results(*(start(rank, 9 if rank == 5 else 8, address) for rank in range(8)))
    assert [(type(error), error.rank) for error in errors] == [(ConfigError, 5)] * 8


async def test_another_job_is_refused_by_name_and_the_one_that_meets_goes_on() -> None:
    port = free_port()
    ours = [start(0, 3, (HOST, port)), start(1, 3, (HOST, port))]
    (error,) = await results(start(2, 3, (HOST, port), name="other"))
    assert type(error) is ConfigError
    assert f"job 'lab' meets at {HOST}:{port}" in str(error)
    assert "'other'" in str(error)
    assert_met(await results(*ours, start(2, 3, (HOST, port))), 3)


async def test_a_port_in_use_is_named_with_the_remedy() -> None:
    port = free_port()
    first = start(0, 2, (HOST, port))
    with await connected(port):
        pass
    (error,) = await results(start(0, 2, (HOST, port)))
    assert type(error) is ConfigError
    assert f"{HOST}:{port}: Address already in use" in str(error)
    assert "another rank 0" in str(error)
    assert "another port" in str(error)
    assert_met(await results(first, start(1, 2, (HOST, port))), 2)
    with socket.create_server((HOST, port)), nothing_left():
        (error,) = await results(start(0, 2, (HOST, port)))
    assert type(error) is ConfigError


async def test_a_host_that_is_not_this_machine() -> None:
    (error,) = await results(start(0, 2, ("192.0.2.1", free_port()), secret=Secret(b"x")))
    assert type(error) is ConfigError
    assert "192.0.2.1" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
async def test_port_0_needs_a_launcher(rank: int) -> None:
    with pytest.raises(ConfigError, match="ruda-async run"):
        await meet(make_job(rank, 2), b"", (HOST, 0))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "2001:db8::1", "::ffff:10.0.0.5"])
async def test_a_network_address_without_a_secret_is_refused(host: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="RUDA_SECRET"):
        await meet(make_job(rank, 2), b"", (host, 29500))


async def test_an_inherited_network_socket_without_a_secret_is_refused() -> None:
    with socket.create_server(("0.0.0.0", 0)) as inherited, pytest.raises(ConfigError, match="RUDA_SECRET"):
        await meet(make_job(0, 2, listen_fd=inherited.fileno()), b"", (HOST, 0))


async def test_names_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="not a host name"):
        await meet(make_job(0, 2), b"", ("a" * 70 + ".example", 1))
    with pytest.raises(ConfigError, match="job name"):
        await meet(make_job(0, 2, name="\udcff"), b"", (HOST, 1))
    with pytest.raises(ConfigError, match="job name of 2000 bytes"):
        await meet(make_job(0, 2, name="é" * 1000), b"", (HOST, 1))


# ---------------------------------------------------------------------- secrets


async def test_another_secret_is_refused_at_once_and_mentioned_when_time_is_up() -> None:
    address = (HOST, free_port())
    server = start(0, 3, address, timeout=1.0, secret=Secret(b"right"))
    friend = start(1, 3, address, timeout=1.0, secret=Secret(b"right"))
    began = time.monotonic()
    for wrong in (b"wrong", b""):
        (error,) = await results(start(2, 3, address, secret=Secret(wrong)))
        assert type(error) is AuthenticationError
        assert "RUDA_SECRET" in str(error)
    assert time.monotonic() - began < 5
    for late in await results(server, friend):
        assert type(late) is CollectiveTimeoutError
        assert late.missing == (2,)
        assert "did not prove this job's secret" in str(late)
        assert "right" not in str(late)


async def test_one_secret_lets_all_in() -> None:
    address = (HOST, free_port())
    tasks = [start(rank, 3, address, secret=Secret(b"right")) for rank in range(3)]
    assert_met(await results(*tasks), 3)


# ---------------------------------------------------------------------- several ports


async def test_candidate_ports_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.3)
    with socket.create_server((HOST, 0)) as taken:
        ports = (taken.getsockname()[1], free_port(), free_port())
        tasks = [start(rank, 2, (HOST, 1), ports=ports) for rank in range(2)]
        # Rank 1 finds a silent service first, and goes on when that has had its time.
        assert_met(await results(*tasks), 2)


@pytest.mark.parametrize("secret", [b"", b"another"])
async def test_another_job_or_service_on_a_candidate_port_is_passed_over(secret: bytes) -> None:
    ports = (free_port(), free_port())
    theirs = start(0, 2, (HOST, ports[0]), name="theirs", secret=Secret(secret))
    with await connected(ports[0]):
        ours = [start(rank, 2, (HOST, 1), ports=ports) for rank in range(2)]
        assert_met(await results(*ours), 2)
    assert_met(await results(theirs, start(1, 2, (HOST, ports[0]), name="theirs", secret=Secret(secret))), 2)


async def test_no_candidate_port_is_free() -> None:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as two:
        ports = (one.getsockname()[1], two.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            await meet(make_job(0, 2, ports=ports), b"", (HOST, 1))
    assert all(f"{HOST}:{port}: Address already in use" in str(caught.value) for port in ports)


async def test_candidate_ports_that_others_use_are_listed_when_time_is_up() -> None:
    ports = (free_port(), free_port())
    theirs = start(0, 2, (HOST, ports[0]), name="theirs")
    with await connected(ports[0]):
        (error,) = await results(start(1, 2, (HOST, 1), ports=ports, timeout=0.5))
    assert type(error) is CollectiveTimeoutError
    assert f"{HOST}:{ports[0]}: job 'theirs' meets at" in str(error)
    assert f"{HOST}:{ports[1]}: Connection refused" in str(error)
    theirs.cancel()
    await results(theirs)


# ---------------------------------------------------------------------- strangers


async def test_strangers_hold_nothing_up() -> None:
    loop = asyncio.get_running_loop()
    port = free_port()
    tasks = [start(0, 3, (HOST, port)), start(1, 3, (HOST, port))]
    with contextlib.ExitStack() as stack:
        for said in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"RUDA\x01half",
            b"RUDA\x05" + bytes(32),
        ):
            sock = stack.enter_context(await connected(port))
            await loop.sock_sendall(sock, said)
        sock = await connected(port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()  # with a reset
        began = time.monotonic()
        assert_met(await results(*tasks, start(2, 3, (HOST, port))), 3)
        assert time.monotonic() - began < 5


async def test_a_flood_of_silent_connections_is_bounded_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_MAX_STRANGERS", 6)
    port = free_port()
    server = start(0, 2, (HOST, port))
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(await connected(port)) for _ in range(40)]
        assert_met(await results(server, start(1, 2, (HOST, port))), 2)
        del flood
    # And while it goes on:
    server = start(0, 2, (HOST, port))
    with contextlib.ExitStack() as stack:
        before = len(asyncio.all_tasks())
        for _ in range(100):
            sock = stack.enter_context(await connected(port))
            assert len(asyncio.all_tasks()) - before <= 2 + 6 + 4
        # The oldest were sent away: whatever the flood, the newest is heard.
        await prove(sock, Secret(b""), server=False, context=CONTEXT, deadline=time.monotonic() + 10)
        assert_met(await results(server, start(1, 2, (HOST, port))), 2)


async def test_strangers_are_sent_away_when_their_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.05)
    port = free_port()
    server = start(0, 2, (HOST, port))
    with await connected(port) as sock:
        async with asyncio.timeout(5):
            assert await loop.sock_recv(sock, 1) == b""
    assert_met(await results(server, start(1, 2, (HOST, port))), 2)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (join_record(1, 2, protocol=2), "speaks version 2 of the rendezvous and rank 0 version 1"),
        (join_record(1, 2, rank="1"), "values that no rank sends"),
        (join_record(1, 2, rank=True), "values that no rank sends"),
        (join_record(2, 2), "values that no rank sends"),
        (join_record(-1, 2), "values that no rank sends"),
        (join_record(1, 2, payload="text"), "values that no rank sends"),
        (join_record(1, 2, payload=bytes(MAX_PAYLOAD + 1)), "values that no rank sends"),
        (join_record(1, 2, extra=1), "a JOIN has the fields"),
        ({"protocol": 1}, "a JOIN has the fields"),
        (join_record(0, 2), "a second rank 0"),
    ],
)
async def test_a_malformed_join_is_refused_with_the_reason(record: dict[str, Any], text: str) -> None:
    port = free_port()
    server = start(0, 2, (HOST, port))
    with await joined(port, record) as sock:
        refused = await answer(sock)
        assert refused["kind"] == "refused"
        assert text in refused["text"]
    assert_met(await results(server, start(1, 2, (HOST, port))), 2)


def test_random_and_mutated_joins_raise_nothing_but_protocol_errors() -> None:
    keys = st.sampled_from(["protocol", "job", "rank", "world_size", "payload", "more"])
    values = st.none() | st.integers() | st.text() | st.binary() | st.just(1) | st.lists(st.integers())

    @given(st.dictionaries(keys, values), st.booleans())
    def check(changes: dict[str, Any], whole: bool) -> None:
        try:
            join = rendezvous._Join.of((join_record(1, 2) if whole else {}) | changes)
        except ProtocolError:
            return
        assert 0 <= join.rank < join.world_size
        assert type(join.job) is str
        assert type(join.payload) is bytes

    check()


def test_random_bytes_after_the_proof_do_not_disturb_the_meeting() -> None:
    mutated = st.binary(max_size=60) | st.binary(max_size=60).map(lambda b: struct.pack("<I", len(b)) + b)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(mutated, min_size=1, max_size=3))
    def check(strangers: list[bytes]) -> None:
        async def run() -> None:
            port = free_port()
            server = start(0, 2, (HOST, port))
            for said in strangers:
                (await joined(port, said)).close()
            assert_met(await results(server, start(1, 2, (HOST, port))), 2)

        asyncio.run(run())

    check()


@pytest.mark.parametrize(
    ("said", "text"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "HTTP/1.1 400"), (b"\x02", "another version of ruda-async")],
)
async def test_a_service_that_is_no_rank_0_is_named_at_once(said: bytes, text: str) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        address = listener.getsockname()
        rank = start(1, 2, address)
        service, _ = await loop.sock_accept(listener)
        with service:
            await loop.sock_sendall(service, said)
            (error,) = await results(rank)
    assert type(error) is ProtocolError
    assert text in str(error)
    assert f"{HOST}:{address[1]}" in str(error)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"kind": "go"}, ProtocolError),
        ({"kind": "nonsense"}, ProtocolError),
        ({}, ProtocolError),
        ({"kind": "welcome", "session": b"s", "payloads": [b"one"]}, ProtocolError),
        ({"kind": "welcome", "session": b"s", "payloads": [b"one", "two"]}, ProtocolError),
        ({"kind": "refused"}, ProtocolError),
        ({"kind": "refused", "code": "SystemExit", "text": "x", "ranks": []}, ProtocolError),
        ({"kind": "refused", "code": ["config"], "text": "x", "ranks": [1]}, ProtocolError),
        ({"kind": "refused", "code": "config", "text": "x", "ranks": [1]}, ConfigError),
        ({"kind": "refused", "code": "timeout", "text": "x", "ranks": [3, 4]}, CollectiveTimeoutError),
    ],
)
async def test_what_rank_0_says_is_checked(record: dict[str, Any], kind: type[RudaError]) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        rank = start(1, 2, listener.getsockname())
        sock, _ = await loop.sock_accept(listener)
        with sock:
            sock.setblocking(False)
            await prove(sock, Secret(b""), server=True, context=CONTEXT, deadline=time.monotonic() + 20)
            assert await answer(sock) == join_record(1, 2)
            await write_all(loop, sock, wire.pack_record(record))
            (error,) = await results(rank)
    assert type(error) is kind


# ---------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 30, 100])
async def test_cancelling_leaves_nothing_behind(turns: int) -> None:
    port = free_port()
    with nothing_left():
        tasks = [start(rank, 6, (HOST, port)) for rank in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert [type(result) for result in await results(*tasks)] == [asyncio.CancelledError] * 5
    with socket.create_server((HOST, port)):
        pass


async def test_running_out_of_descriptors_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = 3
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise OSError(24, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    address = (HOST, free_port())
    assert_met(await results(*(start(rank, 3, address) for rank in range(3))), 3)
    assert refusals == 0
