"""What a transport promises of memory whose send or receive was withdrawn: its caller has it back at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..base import Ready, TakenBack, Transport
from .scenario import meet, pattern, room, scenario

__all__: list[str] = []

_ROUNDS = 6


@scenario(2)
async def memory_of_a_withdrawn_receive(t: Transport) -> None:
    """A receive withdrawn while its payload comes: what its caller does to the memory harms no message."""
    nbytes = 12 << 20
    for number in range(_ROUNDS):
        if t.rank == 0:
            await t.send(1, 62, (pattern(number, nbytes),), b"large")
            await t.send(1, 62, (room(0),), b"next")
        else:
            await t.probe(0, 62)
            memory = room(nbytes)
            if not await _receive_or_spoil(t, memory, after=number * nbytes // (2 * _ROUNDS)):
                assert memory == pattern(number, nbytes), number
            elif (await t.probe(0, 62)).head == b"large":  # else all of it had come when it was cancelled
                again = room(nbytes)
                await t.recv_into(0, 62, (again,), b"large")
                assert again == pattern(number, nbytes), number
                assert memory == bytes(nbytes), number
            await t.recv_into(0, 62, (room(0),), b"next")
        await meet(t)


async def _receive_or_spoil(t: Transport, memory: memoryview, after: int) -> bool:
    """Receive, but cancel that once the byte `after` has come, and overwrite the memory; whether it was."""
    task = asyncio.current_task()
    assert task is not None
    untouched = room(16)
    looking: asyncio.Handle | None = None

    def look() -> None:
        nonlocal looking
        if memory[after : after + 16] == untouched:
            looking = loop.call_soon(look)
        else:
            looking = None
            task.cancel()

    loop = asyncio.get_running_loop()
    looking = loop.call_soon(look)
    try:
        await t.recv_into(0, 62, (memory,), b"large")
    except asyncio.CancelledError:
        memory[:] = bytes(len(memory))
        task.uncancel()
        return True
    finally:
        if looking is not None:
            looking.cancel()
    return False


@scenario(2)
async def memory_of_a_withdrawn_send(t: Transport) -> None:
    """Sends withdrawn while payloads leave: each arrives whole or not at all, as it was when it began."""
    nbytes, tags = 300_000, range(100, 140)
    for number in range(_ROUNDS):
        if t.rank == 0:
            sends = [asyncio.ensure_future(_send_and_spoil(t, tag, nbytes)) for tag in tags]
            await t.recv_into(1, 72, (room(0),))  # all are asked for
            for _ in range(number):
                await asyncio.sleep(0)
            for sending in sends:
                sending.cancel()
            await asyncio.wait(sends)
        else:
            for tag in tags:
                await t.probe(0, tag)
            memories = {tag: room(nbytes) for tag in tags}
            receives = {tag: t.recv_into(0, tag, (memory,)) for tag, memory in memories.items()}
            await t.send(0, 72, (room(0),))
            for tag, receive in receives.items():
                try:
                    await receive
                except TakenBack:
                    continue
                assert memories[tag] == pattern(tag, nbytes), (number, tag)
        await meet(t)


async def _send_and_spoil(t: Transport, tag: int, nbytes: int) -> None:
    """Send a pattern, and overwrite it as soon as the send is over."""
    memory = pattern(tag, nbytes)
    try:
        await t.send(1, tag, (memory,))
    finally:
        memory[:] = bytes(nbytes)


@scenario(2)
async def memory_of_a_failed_tag(t: Transport) -> None:
    """`fail` ends sends that a full link holds up, at once, and their memory is the caller's."""

    class Stop(Exception):
        pass

    if t.rank == 0:
        nbytes = 30_000
        memories = [pattern(i, nbytes) for i in range(400)]
        sends = [t.send(1, 85, (memory,)) for memory in memories]
        t.fail(85, Stop("now"))
        for memory in memories:
            memory[:] = bytes(nbytes)
        for sending in sends:
            try:
                await sending
            except Stop:
                continue
            assert type(sending) is Ready, "a failed send went on"
    await meet(t)
    if t.rank == 1:
        buffer, untouched = room(30_000), set(range(400))
        while t.stats()[0]["early_bytes"]:
            await t.recv_into(0, 85, (buffer,))
            came = next(i for i in untouched if pattern(i, 32) == buffer[:32])
            assert buffer == pattern(came, 30_000), came
            untouched.remove(came)
    await meet(t)


@scenario(2)
async def memory_of_failed_receives(t: Transport) -> None:
    """`fail` in the midst of payloads: once what it returns is done, nothing is written any more."""

    class Stop(Exception):
        pass

    nbytes = 24 << 20
    if t.rank == 0:
        sends = [t.send(1, 86, (pattern(i, nbytes),)) for i in range(2)]
        for sending in sends:
            await sending
        await t.send(1, 87, (pattern(3, nbytes),))
    else:
        memories = [room(nbytes) for _ in range(2)]
        receives = [t.recv_into(0, 86, (memory,)) for memory in memories]
        while memories[0][:16] == room(16):
            await asyncio.sleep(0)
        for busy in t.fail(86, Stop("now")) or ():
            await busy
        for memory in memories:
            memory[:] = bytes(nbytes)
        t.is_stale = lambda tag: tag == 86
        last = room(nbytes)
        await t.recv_into(0, 87, (last,))  # nothing that was under way is so any more
        assert last == pattern(3, nbytes)
        for memory in memories:
            assert memory == bytes(nbytes)
        for receive in receives:
            with suppress(Stop):
                await receive
    await meet(t)
