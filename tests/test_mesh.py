"""Linking up after the meeting: strangers at the listener, ranks that die just then, addresses, terms."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from mesh_support import run_each
from ruda_tcp.mesh import _Peer
from support import free_port, fresh_url

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    AuthenticationError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProtocolError,
)
from ruda_async.transport import Job, Meeting, Secret, mesh, prove

#: Between the meeting and the links, on every rank.
Hook = Callable[[Job, Meeting], Awaitable[None]]


@pytest.fixture
def after_meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook], None]:
    """Have a hook run on each rank once it knows where the others listen, before it links up."""
    meet = Job.meet

    def install(hook: Hook) -> None:
        async def hooked(job: Job, payload: bytes, address: Any = None) -> Meeting:
            meeting = await meet(job, payload, address)
            await hook(job, meeting)
            return meeting

        monkeypatch.setattr(Job, "meet", hooked)

    return install


async def dial(meeting: Meeting, rank: int) -> socket.socket:
    """A connection to the listener of `rank`."""
    host, port, _, _ = msgpack.unpackb(meeting.payloads[rank])
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return sock


async def add_up(comm: AsyncCommunicator) -> float:
    """The sum of all ranks' numbers from 1 on, by way of every link."""
    await comm.barrier()
    return float((await comm.all_reduce_sum(np.full(3, comm.rank + 1.0)))[0])


# ---------------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"RUDA\x01half", b"RUDA\x05" + bytes(32), None],
    ids=["silence", "http", "tls", "half a handshake", "another version", "a reset"],
)
async def test_strangers_hold_nothing_up(said: bytes | None, after_meeting: Callable[[Hook], None]) -> None:
    with contextlib.ExitStack() as stack:

        async def knock(job: Job, meeting: Meeting) -> None:
            for rank in range(job.rank):  # before this rank itself dials there
                sock = stack.enter_context(await dial(meeting, rank))
                if said is None:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()
                else:
                    await asyncio.get_running_loop().sock_sendall(sock, said)

        after_meeting(knock)
        began = time.monotonic()
        assert await run_each([{}] * 3, add_up, fresh_url("tcp")) == [6, 6, 6]
        assert time.monotonic() - began < mesh.STRANGER_SECONDS


async def test_a_flood_of_silent_connections_does_not_lock_ranks_out(
    after_meeting: Callable[[Hook], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "MAX_STRANGERS", 4)
    most = 0
    with contextlib.ExitStack() as stack:

        async def flood(job: Job, meeting: Meeting) -> None:
            nonlocal most
            before = len(asyncio.all_tasks())
            for _ in range(60 if job.rank else 0):
                stack.enter_context(await dial(meeting, 0))
                most = max(most, len(asyncio.all_tasks()) - before)

        after_meeting(flood)
        assert await run_each([{}] * 2, add_up, fresh_url("tcp")) == [3, 3]
    assert most < 4 + 2 + 6  # strangers heard at once, and the ranks' own tasks


async def test_running_out_of_descriptors_passes(
    after_meeting: Callable[[Hook], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, refusals = socket.socket.accept, 3

    def scarce(self: socket.socket) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise OSError(24, "Too many open files")
        return accept(self)

    async def use_up(job: Job, meeting: Meeting) -> None:
        monkeypatch.setattr(socket.socket, "accept", scarce)

    after_meeting(use_up)
    assert await run_each([{}] * 2, add_up, fresh_url("tcp")) == [3, 3]
    assert refusals == 0


async def test_a_connection_that_gives_no_higher_rank_is_sent_away(
    after_meeting: Callable[[Hook], None],
) -> None:
    closed = []

    async def claim(job: Job, meeting: Meeting) -> None:
        if job.rank == 1:
            for number in (0, 3, 2**32 - 1):
                with await dial(meeting, 0) as sock:
                    context = b"mesh|" + meeting.session
                    await prove(sock, job.secret, server=False, context=context, deadline=job.deadline)
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(sock, struct.pack("<I", number))
                    closed.append(await loop.sock_recv(sock, 1))

    after_meeting(claim)
    assert await run_each([{}] * 3, add_up, fresh_url("tcp")) == [6, 6, 6]
    assert closed == [b""] * 3


@pytest.mark.parametrize("wrong", ["secret", "session"])
async def test_a_connection_without_the_proof_is_mentioned_when_time_is_up(
    wrong: str, after_meeting: Callable[[Hook], None]
) -> None:
    ours = []

    async def intrude(job: Job, meeting: Meeting) -> None:
        if job.rank == 1:
            secret = Secret(b"guessed") if wrong == "secret" else job.secret
            context = b"mesh|" + (bytes(16) if wrong == "session" else meeting.session)
            with await dial(meeting, 0) as sock:
                ours.append(sock.getsockname()[1])
                with pytest.raises(AuthenticationError):
                    await prove(sock, secret, server=False, context=context, deadline=job.deadline)
            raise RuntimeError("dies")

    after_meeting(intrude)
    late, died = await run_each([{"secret": "long-and-random"}] * 2, add_up, fresh_url("tcp"), timeout=0.5)
    assert type(died) is RuntimeError
    assert type(late) is CollectiveTimeoutError
    assert late.missing == (1,)
    assert f"a connection from 127.0.0.1:{ours[0]} did not prove the secret" in str(late)
    assert "long-and-random" not in str(late)


async def test_another_service_at_a_ranks_address_is_a_lost_rank(
    after_meeting: Callable[[Hook], None],
) -> None:
    """Rank 0's listener is gone and something else took its port."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.setblocking(False)

        async def divert(job: Job, meeting: Meeting) -> None:
            if job.rank == 0:
                raise RuntimeError("dies")
            told = msgpack.unpackb(meeting.payloads[0])
            meeting.payloads[0] = msgpack.packb(["127.0.0.1", impostor.getsockname()[1], *told[2:]])

        async def greet() -> None:
            sock, _ = await loop.sock_accept(impostor)
            with sock:
                await loop.sock_sendall(sock, b"220 mail ready\r\n")

        after_meeting(divert)
        greeting = asyncio.create_task(greet())
        _, lost = await run_each([{}] * 2, add_up, fresh_url("tcp"))
        await greeting
    assert type(lost) is PeerLostError
    assert lost.rank == 0
    assert "220 m" in str(lost)


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb(["127.0.0.1", 1, 2]),
        msgpack.packb(["a.host.name", 1, 2, 3]),
        msgpack.packb([b"127.0.0.1", 1, 2, 3]),
        msgpack.packb(["127.0.0.1", 65536, 2, 3]),
        msgpack.packb(["127.0.0.1", -1, 2, 3]),
        msgpack.packb(["127.0.0.1", True, 2, 3]),
        msgpack.packb(["127.0.0.1", 1, 2.0, 3]),
        msgpack.packb(["127.0.0.1", 1, 2, None]),
        msgpack.packb(["1" * 300, 1, 2, 3]),
    ],
)
def test_what_a_rank_tells_of_itself_is_checked(told: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 5 sent no usable address") as caught:
        _Peer.unpack(told, 5)
    assert caught.value.rank == 5


# ---------------------------------------------------------------------- ranks that die or hang


@pytest.mark.parametrize("end", ["dies", "hangs"])
@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_rank_that_goes_between_meeting_and_links_is_named(
    victim: int, end: str, after_meeting: Callable[[Hook], None]
) -> None:
    async def go(job: Job, meeting: Meeting) -> None:
        if job.rank == victim:
            if end == "hangs":  # with its listener open, until the others have given up
                await released.wait()
            raise RuntimeError("gone")

    async def released_by_the_last(rank: int) -> Any:
        nonlocal left
        try:
            async with ruda_async.connect(url, rank=rank, world_size=3, timeout=0.6) as comm:
                return await add_up(comm)
        except Exception as error:
            return error
        finally:
            left -= 1
            if left == 1:
                released.set()

    after_meeting(go)
    released, left, url = asyncio.Event(), 3, fresh_url("tcp")
    began = time.monotonic()
    errors = await asyncio.gather(*(released_by_the_last(rank) for rank in range(3)))
    assert time.monotonic() - began < 3
    assert type(errors[victim]) is RuntimeError
    for rank in {0, 1, 2} - {victim}:
        error = errors[rank]
        if rank > victim and end == "dies":  # its listener is gone, which shows at once
            assert type(error) is PeerLostError
            assert error.rank == victim
            assert f"rank {rank} cannot reach rank {victim} at 127.0.0.1 port" in str(error)
        else:
            assert type(error) is CollectiveTimeoutError
            assert victim in error.missing
            assert re.search(rf"ranks? .*\b{victim}\b.* did not link up within timeout=0.6 s", str(error))


async def test_a_lost_rank_shows_at_once_though_another_hangs(after_meeting: Callable[[Hook], None]) -> None:
    """Rank 0, the first that rank 2 dials, hangs; rank 1 is dead."""
    never, dead = asyncio.Event(), asyncio.Event()

    async def go(job: Job, meeting: Meeting) -> None:
        if job.rank == 0:
            await never.wait()
        if job.rank == 2:
            await dead.wait()
            return
        raise RuntimeError("dies")

    async def rank_main(rank: int) -> None:
        try:
            async with ruda_async.connect(url, rank=rank, world_size=3, timeout=20):
                pass
        except RuntimeError:
            dead.set()

    after_meeting(go)
    url = fresh_url("tcp")
    ranks = [asyncio.create_task(rank_main(rank)) for rank in range(3)]
    try:
        async with asyncio.timeout(5):
            with pytest.raises(PeerLostError) as caught:
                await ranks[2]
        assert caught.value.rank == 1
    finally:
        for rank in ranks:
            rank.cancel()
        await asyncio.gather(*ranks, return_exceptions=True)


async def test_failing_leaves_no_task_and_no_descriptor(after_meeting: Callable[[Hook], None]) -> None:
    async def go(job: Job, meeting: Meeting) -> None:
        if job.rank == 2:
            stray = await dial(meeting, 0)
            stray.close()
            raise RuntimeError("dies")

    after_meeting(go)
    await run_each([{}] * 3, add_up, fresh_url("tcp"), timeout=0.3)
    before = len(asyncio.all_tasks()), len(os.listdir("/dev/fd"))
    errors = await run_each([{}] * 3, add_up, fresh_url("tcp"), timeout=0.3)
    assert all(isinstance(error, Exception) for error in errors)
    assert (len(asyncio.all_tasks()), len(os.listdir("/dev/fd"))) == before


# ---------------------------------------------------------------------- addresses


@pytest.fixture
def announced(after_meeting: Callable[[Hook], None]) -> dict[int, str]:
    """The address that each rank named to the others; filled while they link up."""
    hosts: dict[int, str] = {}

    async def read(job: Job, meeting: Meeting) -> None:
        hosts.update({rank: msgpack.unpackb(told)[0] for rank, told in enumerate(meeting.payloads)})

    after_meeting(read)
    return hosts


def bindable(host: str) -> bool:
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.bind((host, 0))
        return True
    return False


async def test_a_host_name_stands_for_its_address(announced: dict[int, str]) -> None:
    url = f"tcp://localhost:{free_port()}/names"
    assert await run_each([{}] * 3, add_up, url) == [6, 6, 6]
    assert set(announced.values()) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ({}, ["127.0.0.1"] * 3),
        ({1: "127.0.0.2"}, ["127.0.0.1", "127.0.0.2", "127.0.0.1"]),
        ({0: "127.0.0.3", 2: "127.0.0.2"}, ["127.0.0.3", "127.0.0.1", "127.0.0.2"]),
        ({1: "localhost"}, None),
        # All addresses: the others hear the one that rank 0 sees, and rank 0 is dialled as in the URL.
        ({1: "0.0.0.0"}, ["127.0.0.1", "127.0.0.1", "127.0.0.1"]),
        ({0: "0.0.0.0"}, ["0.0.0.0", "127.0.0.1", "127.0.0.1"]),
    ],
)
async def test_bind_says_where_a_rank_listens(
    bind: dict[int, str], expected: list[str] | None, announced: dict[int, str]
) -> None:
    if not all(bindable(host) for host in bind.values()):
        pytest.skip(f"this machine has not all of {', '.join(bind.values())}")
    options = [{"bind": bind[rank]} if rank in bind else {} for rank in range(3)]
    assert await run_each(options, add_up, fresh_url("tcp")) == [6, 6, 6]
    if expected is not None:
        assert [announced[rank] for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        ("192.0.2.1", r"rank 1 cannot listen on '192.0.2.1': .*; give this host's own address as bind="),
        ("no-such-host.invalid", r"rank 1: the host 'no-such-host.invalid' is not found: .*bind="),
        ("a" * 70 + ".example", r"rank 1: the host 'a+.example' is not found: .*bind="),
    ],
)
async def test_an_address_that_is_not_this_hosts_is_named(bind: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await ruda_async.connect(fresh_url("tcp"), rank=1, world_size=2, timeout=5, bind=bind)
