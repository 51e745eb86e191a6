"""All ranks come: in any order, over every kind of address, and once in processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_support import HOST, assert_met, expected, make_job, nothing_left, results, start
from support import free_port

from ruda_async.errors import ConfigError
from ruda_async.rendezvous import MAX_PAYLOAD, exchange, meet
from ruda_async.transport.job import Secret


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
