"""Ranks that are late, die or hang: who is named, and when, and who may come again."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from rendezvous_support import (
    HOST,
    answer,
    assert_met,
    expected,
    join_record,
    joined,
    nothing_left,
    results,
    start,
    until_joined,
)
from support import free_port

from ruda_async.errors import CollectiveTimeoutError
from ruda_async.rendezvous import limits
from ruda_async.transport.handshake import write_all


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
    monkeypatch.setattr(limits, "GRACE", 0.2)
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
