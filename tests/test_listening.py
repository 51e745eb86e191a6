"""Nobody listens beyond this host unless told to; and a port is open no longer than it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from typing import Any

import pytest
from mesh_support import run_each
from support import free_port

import ruda_async
from ruda_async import AsyncCommunicator, ConfigError
from ruda_async.rendezvous import limits


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts at which this process begins to listen."""
    hosts: list[str] = []
    listen = socket.socket.listen

    def noting(self: socket.socket, *args: Any) -> None:
        hosts.append(self.getsockname()[0])
        listen(self, *args)

    monkeypatch.setattr(socket.socket, "listen", noting)
    return hosts


async def gather(comm: AsyncCommunicator) -> int:
    await comm.barrier()
    return comm.world_size


@pytest.mark.parametrize("place", ["tcp://:{port}/job", "tcp://localhost:{port}", "tcp://127.0.0.1:{port}"])
async def test_loopback_is_the_default(bound: list[str], place: str) -> None:
    assert await run_each([{}] * 3, gather, place.format(port=free_port())) == [3] * 3
    assert len(bound) == 4  # the meeting's, and one for each rank's links
    assert all(ipaddress.ip_address(host).is_loopback for host in bound)


async def test_all_addresses_are_refused_without_a_secret(bound: list[str]) -> None:
    with pytest.raises(ConfigError, match="can be reached from the network, and this job has no secret"):
        await ruda_async.connect(f"tcp://0.0.0.0:{free_port()}", rank=0, world_size=2, timeout=5)


async def test_no_port_stays_open() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        for where in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(where, 1).close()
        await comm.barrier()

    ports: list[tuple[str, int]] = []
    real = socket.socket.listen

    def noting(self: socket.socket, *args: Any) -> None:
        ports.append(self.getsockname()[:2])
        real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", noting)
        assert await run_each([{}] * 2, body, f"tcp://127.0.0.1:{free_port()}") == [None, None]
    assert len(ports) == 3


async def test_a_trickle_of_bytes_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow handshakes: one byte at a time does not buy more time than silence does."""
    monkeypatch.setattr(limits, "PATIENCE", 0.4)
    url = f"tcp://127.0.0.1:{(port := free_port())}"
    rank_0 = asyncio.ensure_future(ruda_async.connect(url, rank=0, world_size=2, timeout=20))
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)

    async def trickle() -> None:
        for byte in b"RUDA\x01" + bytes(32):
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.1)  # the pace is what is tested

    began = time.monotonic()
    slow = asyncio.ensure_future(trickle())
    with contextlib.suppress(ConnectionError):
        assert await reader.read(1) == b""  # rank 0 hangs up in the middle
    assert time.monotonic() - began >= 0.3
    assert not slow.done()
    slow.cancel()
    writer.close()
    second = await ruda_async.connect(url, rank=1, world_size=2, timeout=20)
    first = await rank_0
    await asyncio.gather(first.close(), second.close())
