"""Whatever strangers send, or do not send, a meeting goes on; what is malformed is said so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_support import (
    HOST,
    answer,
    assert_met,
    connected,
    join_record,
    joined,
    results,
    start,
)
from support import free_port

from ruda_async.errors import CollectiveTimeoutError, ConfigError, ProtocolError, RudaError
from ruda_async.rendezvous import MAX_PAYLOAD, limits
from ruda_async.rendezvous.records import CONTEXT, Join
from ruda_async.transport import wire
from ruda_async.transport.handshake import prove, write_all
from ruda_async.transport.job import Secret


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
    monkeypatch.setattr(limits, "MAX_STRANGERS", 6)
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
    monkeypatch.setattr(limits, "PATIENCE", 0.05)
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
            join = Join.of((join_record(1, 2) if whole else {}) | changes)
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
