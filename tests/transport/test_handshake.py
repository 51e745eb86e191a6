"""The proof of the job secret, between real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Coroutine, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.errors import AuthenticationError, CollectiveTimeoutError, ProtocolError
from ruda_async.transport import handshake
from ruda_async.transport.handshake import address_text, prove, read_exactly, read_into, write_all
from ruda_async.transport.job import Secret

SECRET = Secret(b"a long random value")
CONTEXT = b"mesh|session 1"


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TCP connection: the accepted one and the dialling one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with server, client:
        server.setblocking(False)
        client.setblocking(False)
        yield server, client


def proof(
    sock: socket.socket,
    *,
    server: bool,
    secret: Secret = SECRET,
    context: bytes = CONTEXT,
    seconds: float = 20,
) -> Coroutine[None, None, None]:
    return prove(sock, secret, server=server, context=context, deadline=time.monotonic() + seconds)


async def both(server, client) -> list[BaseException | None]:
    return await asyncio.gather(server, client, return_exceptions=True)


@pytest.mark.parametrize("value", [b"s", b"x" * 1000, b"\0\xff", b""])
async def test_equal_secrets_prove_and_leave_the_stream_clean(value: bytes) -> None:
    loop = asyncio.get_running_loop()
    with pair() as (a, b):
        done = await both(
            proof(a, server=True, secret=Secret(value)), proof(b, server=False, secret=Secret(value))
        )
        assert done == [None, None]
        await write_all(loop, a, b"from the server")
        await write_all(loop, b, b"from the client")
        assert await read_exactly(loop, b, 15) == b"from the server"
        assert await read_exactly(loop, a, 15) == b"from the client"


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ({"secret": Secret(b"one")}, {"secret": Secret(b"two")}),
        ({"secret": Secret(b"one")}, {"secret": Secret(b"")}),
        ({"secret": Secret(b"")}, {"secret": Secret(b"two")}),
        ({"context": b"mesh|session 1"}, {"context": b"mesh|session 2"}),
        ({"context": b"rendezvous"}, {"context": b"mesh"}),
    ],
)
async def test_other_secrets_and_contexts_fail_on_both_sides(server: dict, client: dict) -> None:
    with pair() as (a, b):
        errors = await both(proof(a, server=True, **server), proof(b, server=False, **client))
    assert [type(error) for error in errors] == [AuthenticationError] * 2
    for error in errors:
        assert "check that RUDA_SECRET" in str(error)
        assert "127.0.0.1:" in str(error)
        assert "one" not in str(error).replace("this one", "")
        assert "two" not in str(error)


async def test_the_side_without_a_secret_is_told_so() -> None:
    with pair() as (a, b):
        errors = await both(
            proof(a, server=True, secret=Secret(b"")), proof(b, server=False, secret=Secret(b"set"))
        )
    assert "not set on this one" in str(errors[0])
    assert "not set" not in str(errors[1])


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the kernel does not say whose a process is")
async def test_a_process_of_another_user_is_refused_on_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    with a, b:
        a.setblocking(False)
        b.setblocking(False)
        assert await both(proof(a, server=True), proof(b, server=False)) == [None, None]
        us = os.getuid()
        monkeypatch.setattr(handshake, "_CREDENTIALS", FakeCredentials(us + 1))
        done = await both(proof(a, server=True), proof(b, server=False))
        assert [type(error) for error in done] == [AuthenticationError, AuthenticationError]
        assert f"user {us + 1}" in str(done[0])


class FakeCredentials:
    """Says that every peer is a process of `user`."""

    size = struct.calcsize("3i")

    def __init__(self, user: int) -> None:
        self.user = user

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        assert len(data) == self.size
        return 1, self.user, 1


async def test_the_messages_are_the_documented_ones() -> None:
    """A client written from the documentation alone, so that both sides cannot change together."""
    loop = asyncio.get_running_loop()
    with pair() as (a, b):
        server = asyncio.create_task(proof(a, server=True))
        nonce = bytes(range(32))
        await write_all(loop, b, b"RUDA\x01" + nonce)
        answer = await read_exactly(loop, b, 65)
        nonces = nonce + answer[1:33]
        key = SECRET.reveal()
        assert answer[0] == 1
        assert answer[33:] == hmac.new(key, b"server" + nonces + CONTEXT, hashlib.sha256).digest()
        await write_all(loop, b, hmac.new(key, b"client" + nonces + CONTEXT, hashlib.sha256).digest())
        assert await read_exactly(loop, b, 1) == b"\x01"
        await server


async def test_a_servers_own_code_sent_back_is_refused() -> None:
    loop = asyncio.get_running_loop()
    with pair() as (a, b):
        server = asyncio.create_task(proof(a, server=True))
        await write_all(loop, b, b"RUDA\x01" + bytes(32))
        answer = await read_exactly(loop, b, 65)
        await write_all(loop, b, answer[33:])
        assert await read_exactly(loop, b, 1) == b"\x00"
        with pytest.raises(AuthenticationError):
            await server


async def test_a_recorded_proof_is_of_no_use_again() -> None:
    loop = asyncio.get_running_loop()
    recorded = b""

    async def relay(source: socket.socket, target: socket.socket, keep: bool) -> None:
        nonlocal recorded
        while data := await loop.sock_recv(source, 100):
            recorded += data if keep else b""
            await write_all(loop, target, data)

    with pair() as (a, a_wire), pair() as (b_wire, b):
        relays = [
            asyncio.create_task(relay(b_wire, a_wire, True)),
            asyncio.create_task(relay(a_wire, b_wire, False)),
        ]
        assert await both(proof(a, server=True), proof(b, server=False)) == [None, None]
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
    assert len(recorded) == 37 + 32
    with pair() as (a, b):
        server = asyncio.create_task(proof(a, server=True))
        await write_all(loop, b, recorded)
        with pytest.raises(AuthenticationError):
            await server


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "b'GET / HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "speaks TLS, and this rank does not"),
        (b"\x1b[31mred\x07" + bytes(60), r"\\x1b\[31mred"),
        (b"RUDA\x09" + bytes(32), "version 9 of the handshake and this rank version 1"),
    ],
)
async def test_a_server_names_what_is_no_handshake(said: bytes, text: str) -> None:
    with pair() as (a, b):
        b.send(said)
        with pytest.raises(ProtocolError, match=text) as caught:
            await proof(a, server=True)
        host, port = b.getsockname()
    assert f"{host}:{port}" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "b'HTTP/1.1 400 Bad"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "speaks TLS, and this rank does not"),
        (b"\x02", r"b'\\x02'.*another version of ruda-async"),
    ],
)
async def test_a_client_names_what_is_no_answer(said: bytes, text: str) -> None:
    with pair() as (a, b):
        a.send(said)
        with pytest.raises(ProtocolError, match=text) as caught:
            await proof(b, server=False)
    assert str(caught.value).isprintable()


async def test_another_version_is_told_ours() -> None:
    loop = asyncio.get_running_loop()
    with pair() as (a, b):
        b.send(b"RUDA\x07" + bytes(32))
        with pytest.raises(ProtocolError):
            await proof(a, server=True)
        a.close()
        assert await loop.sock_recv(b, 100) == b"\x01"


@pytest.mark.parametrize("said", [b"", b"RU", b"RUDA\x01", b"RUDA\x01" + bytes(31), b"RUDA\x01" + bytes(40)])
async def test_a_client_that_closes_early_is_a_connection_error(said: bytes) -> None:
    with pair() as (a, b):
        b.send(said)
        b.close()
        with pytest.raises(ConnectionError):
            await proof(a, server=True)


@pytest.mark.parametrize("said", [b"", b"\x01", b"\x01" + bytes(63)])
async def test_a_server_that_closes_early_is_a_connection_error(said: bytes) -> None:
    with pair() as (a, b):
        a.send(said)
        a.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            await proof(b, server=False)


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize("seconds", [0.05, 0.0, -1.0])
async def test_silence_ends_at_the_deadline(server: bool, seconds: float) -> None:
    with pair() as (a, b):
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"127\.0\.0\.1:\d+ did not finish"):
            await proof(a if server else b, server=server, seconds=seconds)
        assert time.monotonic() - start < 5


async def test_a_trickle_of_bytes_does_not_move_the_deadline() -> None:
    with pair() as (a, b):
        task = asyncio.create_task(proof(a, server=True, seconds=0.15))
        for byte in b"RUDA\x01" + bytes(32):
            if task.done():
                break
            b.send(bytes((byte,)))
            await asyncio.wait({task}, timeout=0.02)
        with pytest.raises(CollectiveTimeoutError):
            await task


@pytest.mark.parametrize("server", [True, False])
async def test_cancelling_is_clean(server: bool) -> None:
    loop = asyncio.get_running_loop()
    with pair() as (a, b):
        mine, other = (a, b) if server else (b, a)
        task = asyncio.create_task(proof(mine, server=server))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Nobody reads behind the caller's back: these bytes are all still there.
        other.send(b"RUDA\x01 later")
        if not server:
            assert await read_exactly(loop, other, 37)
        assert await read_exactly(loop, mine, 11) == b"RUDA\x01 later"


def test_random_strangers_cause_network_errors_only() -> None:
    @given(
        st.binary(max_size=120) | st.binary(max_size=100).map(lambda tail: b"RUDA\x01" + tail), st.booleans()
    )
    def check(said: bytes, server: bool) -> None:
        async def run() -> None:
            with pair() as (a, b):
                mine, other = (a, b) if server else (b, a)
                other.send(said)
                other.shutdown(socket.SHUT_WR)
                with pytest.raises((ProtocolError, AuthenticationError, ConnectionError)):
                    await proof(mine, server=server)

        asyncio.run(run())

    check()


# ---------------------------------------------------------------------- helpers


async def test_long_data_goes_through_small_kernel_buffers() -> None:
    loop = asyncio.get_running_loop()
    data = bytes(range(256)) * 2048
    with pair() as (a, b):
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        _, received = await asyncio.gather(write_all(loop, a, data), read_exactly(loop, b, len(data)))
        assert received == data
        buffer = bytearray(len(data))
        await asyncio.gather(write_all(loop, a, data), read_into(loop, b, memoryview(buffer)))
        assert buffer == data


async def test_reading_nothing_and_reading_past_the_end() -> None:
    loop = asyncio.get_running_loop()
    with pair() as (a, b):
        assert await read_exactly(loop, a, 0) == b""
        b.send(b"abc")
        b.close()
        with pytest.raises(ConnectionError, match="2 bytes still to come"):
            await read_exactly(loop, a, 5)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("10.0.0.5", 29500), "10.0.0.5:29500"),
        (("fe80::1", 7, 0, 2), "[fe80::1]:7"),
        ("/run/job.sock", "unix:/run/job.sock"),
        (b"\0job", "unix:@job"),
        ("\0job", "unix:@job"),
        ("", "a unix socket"),
    ],
)
def test_addresses_read_as_people_write_them(address: object, text: str) -> None:
    assert address_text(address) == text
