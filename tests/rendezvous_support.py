"""Ranks of a meeting as tasks of one loop, and strangers to it, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from ruda_async.rendezvous import Meeting, meet
from ruda_async.rendezvous.records import CONTEXT
from ruda_async.transport import wire
from ruda_async.transport.handshake import prove, read_exactly, write_all
from ruda_async.transport.job import Job, Secret

HOST = "127.0.0.1"


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
