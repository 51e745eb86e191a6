"""What a transport promises of messages, as scenarios that every rank runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ..base import TakenBack, Transport, UnexpectedMessage
from .scenario import awaited, meet, pattern, room, scenario

__all__: list[str] = []


@scenario(2)
async def identity(t: Transport) -> None:
    """Rank, world size, capabilities and facts are there."""
    assert 0 <= t.rank < t.world_size == 2
    assert t.capabilities.eager_bytes >= 0
    assert t.capabilities.segment_bytes > 0
    assert t.describe()["rank"] == t.rank
    await meet(t)
    counters = t.stats()
    assert set(counters) == {1 - t.rank}
    assert counters[1 - t.rank]["messages_sent"] >= 1


@scenario(2)
async def sizes(t: Transport) -> None:
    """Payloads of every size arrive whole: empty, one byte, around the eager limit, many megabytes."""
    eager = t.capabilities.eager_bytes
    peer = 1 - t.rank
    for nbytes in (0, 1, 7, 4096, max(eager - 1, 0), eager, eager + 1, 3 * eager + 5, 9_000_001):
        buffer = room(nbytes)
        receive = t.recv_into(peer, 5, (buffer,), b"h")
        sending = t.send(peer, 5, (pattern(t.rank, nbytes),), b"h")
        await receive
        await sending
        assert buffer == pattern(peer, nbytes), nbytes


@scenario(2)
async def many_buffers(t: Transport) -> None:
    """A message may be gathered from and scattered over several buffers, cut differently on each side."""
    peer = 1 - t.rank
    for nbytes in (10, 300_000):
        whole = pattern(t.rank, nbytes)
        sending = t.send(peer, 6, (whole[:3], whole[3:3], whole[3 : nbytes // 2], whole[nbytes // 2 :]))
        buffer = room(nbytes)
        await t.recv_into(peer, 6, (buffer[: nbytes - 1], buffer[nbytes - 1 :]))
        await sending
        assert buffer == pattern(peer, nbytes)
    many = pattern(t.rank, 600)
    sending = t.send(peer, 6, tuple(many[i : i + 1] for i in range(600)))
    buffer = room(600)
    await t.recv_into(peer, 6, tuple(buffer[i : i + 2] for i in range(0, 600, 2)))
    await sending
    assert buffer == pattern(peer, 600)


@scenario(2)
async def order_within_a_tag(t: Transport) -> None:
    """Messages of one tag keep their order, early or awaited, small and large mixed."""
    peer, count = 1 - t.rank, 40
    lengths = [(i * 37) % 50 if i % 5 else 150_000 + i for i in range(count)]
    sends = [t.send(peer, 9, (pattern(i, lengths[i]),), bytes([i])) for i in range(count)]
    for i in range(count):
        buffer = room(lengths[i])
        await t.recv_into(peer, 9, (buffer,), bytes([i]))
        assert buffer == pattern(i, lengths[i]), i
    for sending in sends:
        await sending


@scenario(2)
async def reversed_tags(t: Transport) -> None:
    """Twenty tags in flight, received in reverse order, with large payloads: no deadlock."""
    peer = 1 - t.rank
    sends = [t.send(peer, 100 + i, (pattern(i, 200_000 + i),)) for i in range(20)]
    for i in reversed(range(20)):
        buffer = room(200_000 + i)
        await t.recv_into(peer, 100 + i, (buffer,))
        assert buffer == pattern(i, 200_000 + i)
    for sending in sends:
        await sending


@scenario(2)
async def both_ways_at_once(t: Transport) -> None:
    """Each sends the other 16 MiB, more than links hold, at the same time."""
    peer, nbytes = 1 - t.rank, 16 << 20
    buffer = room(nbytes)
    receive = t.recv_into(peer, 3, (buffer,))
    sending = t.send(peer, 3, (pattern(t.rank, nbytes),))
    await receive
    await sending
    assert buffer == pattern(peer, nbytes)


@scenario(2)
async def small_overtakes_large(t: Transport) -> None:
    """A small message is not held up by a large one that nobody receives yet."""
    peer = 1 - t.rank
    large = t.send(peer, 20, (pattern(t.rank, 4 << 20),))
    await t.send(peer, 21, (pattern(7, 8),))
    small = room(8)
    await t.recv_into(peer, 21, (small,))
    assert small == pattern(7, 8)
    buffer = room(4 << 20)
    await t.recv_into(peer, 20, (buffer,))
    assert buffer == pattern(peer, 4 << 20)
    await large


@scenario(2)
async def flood_of_early_messages(t: Transport) -> None:
    """More early bytes than any budget: nothing is lost, and early memory stays bounded."""
    nbytes, count = 60_000, 600
    if t.rank == 0:
        sends = [t.send(1, 30, (pattern(i, nbytes),)) for i in range(count)]
        await t.send(1, 31, (room(0),))
        for sending in sends:
            await sending
    else:
        await t.recv_into(0, 31, (room(0),))
        assert t.stats()[0]["early_bytes"] <= 20 << 20
        buffer = room(nbytes)
        for i in range(count):
            await t.recv_into(0, 30, (buffer,))
            assert buffer == pattern(i, nbytes), i
        assert t.stats()[0]["early_bytes"] == 0
    await meet(t)


@scenario(2)
async def sent_means_free(t: Transport) -> None:
    """A buffer may be changed as soon as its send has finished."""
    peer = 1 - t.rank
    for nbytes in (16, 500_000):
        mine = room(nbytes)
        mine[:] = pattern(t.rank, nbytes)
        buffer = room(nbytes)
        receive = t.recv_into(peer, 8, (buffer,))
        await t.send(peer, 8, (mine,))
        mine[:] = bytes(nbytes)
        await receive
        assert buffer == pattern(peer, nbytes)


@scenario(2)
async def probes(t: Transport) -> None:
    """A probe tells head and length and takes nothing, before and after the message came."""
    peer = 1 - t.rank
    waiting = t.probe(peer, 40)
    await t.send(peer, 40, (pattern(t.rank, 100),), b"first")
    big = t.send(peer, 40, (pattern(t.rank, 1 << 20),), b"second")
    envelope = await waiting
    assert envelope == (b"first", 100)
    assert _at_once(t.probe(peer, 40)) == (b"first", 100)
    await t.recv_into(peer, 40, (room(100),), b"first")
    assert await t.probe(peer, 40) == (b"second", 1 << 20)
    buffer = room(1 << 20)
    await t.recv_into(peer, 40, (buffer,), b"second")
    assert buffer == pattern(peer, 1 << 20)
    await big


def _at_once(waiting: Awaitable[Any]) -> Any:
    """The result of what needs no turn of the event loop."""
    try:
        next(waiting.__await__())
    except StopIteration as done:
        return done.value
    raise AssertionError("a probe of a message that is here has to wait")


async def _expect_unexpected(
    t: Transport,
    tag: int,
    room_for: int,
    asked: bytes,
    head: bytes,
    nbytes: int,
    posted: Awaitable[Any] | None,
) -> None:
    """The receive, posted already or now, fails and says what came."""
    try:
        await (posted or t.recv_into(1 - t.rank, tag, (room(room_for),), asked))
    except UnexpectedMessage as error:
        assert error.head == head
        assert error.nbytes == nbytes
    else:
        raise AssertionError("a message with another head or length was taken")


@scenario(2)
async def unexpected_messages(t: Transport) -> None:
    """Another head or length fails the receive, says what came, and uses the message up."""
    peer = 1 - t.rank
    for nbytes in (24, 700_000):
        for posted_first in (False, True):
            receives: list[Awaitable[None]] = []
            if posted_first:
                receives = [
                    t.recv_into(peer, 50, (room(nbytes),), b"mine"),
                    t.recv_into(peer, 51, (room(nbytes + 8),), b"same"),
                ]
            await meet(t)
            sends = [
                t.send(peer, 50, (pattern(1, nbytes),), b"theirs"),
                t.send(peer, 51, (pattern(2, nbytes),), b"same"),
                t.send(peer, 51, (pattern(3, nbytes),), b"good"),
            ]
            if not posted_first:
                await t.probe(peer, 51)
            first, second = receives or (None, None)
            await _expect_unexpected(t, 50, nbytes, b"mine", b"theirs", nbytes, first)
            await _expect_unexpected(t, 51, nbytes + 8, b"same", b"same", nbytes, second)
            buffer = room(nbytes)
            await t.recv_into(peer, 51, (buffer,), b"good")
            assert buffer == pattern(3, nbytes)
            for sending in sends:
                await sending
            await meet(t)


@scenario(2)
async def cancelled_receives(t: Transport) -> None:
    """A receive withdrawn before its message leaves it, in order, for the next one."""
    peer = 1 - t.rank
    for nbytes in (32, 1 << 20):
        untouched = room(nbytes)
        for _ in range(3):
            receive = asyncio.ensure_future(awaited(t.recv_into(peer, 60, (untouched,))))
            await asyncio.sleep(0)
            receive.cancel()
            try:
                await receive
            except asyncio.CancelledError:
                pass
            else:
                raise AssertionError("the cancelled receive was swallowed")
        await meet(t)
        sends = [t.send(peer, 60, (pattern(i, nbytes),)) for i in range(3)]
        for i in range(3):
            buffer = room(nbytes)
            await t.recv_into(peer, 60, (buffer,))
            assert buffer == pattern(i, nbytes)
        for sending in sends:
            await sending
        assert untouched == room(nbytes)
        await meet(t)


@scenario(2)
async def receive_cancelled_in_the_middle(t: Transport) -> None:
    """A receive withdrawn while its payload comes: the next receive gets the whole message."""
    nbytes = 48 << 20
    if t.rank == 0:
        await t.send(1, 61, (pattern(5, nbytes),))
        await t.send(1, 61, (pattern(6, 10),))
    else:
        first = room(nbytes)
        receive = asyncio.ensure_future(awaited(t.recv_into(0, 61, (first,))))
        await asyncio.sleep(0)  # a task that never ran has nothing to cancel
        while not receive.done() and first[0] == 0xAA and first[1] == 0xAA:
            await asyncio.sleep(0)
        receive.cancel()
        await asyncio.wait((receive,))
        if receive.cancelled():
            seen = bytes(first[-4096:])
            buffer = room(nbytes)
            await t.recv_into(0, 61, (buffer,))
            assert buffer == pattern(5, nbytes)
            assert bytes(first[-4096:]) == seen
        buffer = room(10)
        await t.recv_into(0, 61, (buffer,))
        assert buffer == pattern(6, 10)
    await meet(t)


@scenario(2)
async def cancelled_sends(t: Transport) -> None:
    """A large send withdrawn before its receive never happened; later ones arrive."""
    nbytes = 2 << 20
    if t.rank == 0:
        sending = asyncio.ensure_future(awaited(t.send(1, 70, (pattern(1, nbytes),))))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait((sending,))
        assert sending.cancelled()
        await meet(t)
        await t.send(1, 70, (pattern(2, nbytes),))
    else:
        await meet(t)
        buffer = room(nbytes)
        await t.recv_into(0, 70, (buffer,))
        assert buffer == pattern(2, nbytes)
    await meet(t)


@scenario(2)
async def sends_cancelled_in_the_middle(t: Transport) -> None:
    """A receive gets all of one message, or learns that it was taken back, and the next gets the next."""
    nbytes, moments = 4 << 20, range(0, 24, 3)
    if t.rank == 0:
        for turns in moments:
            sending = asyncio.ensure_future(awaited(t.send(1, 71, (pattern(turns, nbytes),))))
            for _ in range(1 + turns):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait((sending,))
        await t.send(1, 71, (pattern(99, nbytes),))
    else:
        last = -1
        while last != 99:
            buffer = room(nbytes)
            try:
                await t.recv_into(0, 71, (buffer,))
            except TakenBack as error:
                assert (error.peer, error.tag) == (0, 71)
                continue
            came = next(i for i in (*moments, 99) if i > last and pattern(i, 64) == buffer[:64])
            assert buffer == pattern(came, nbytes)
            last = came
    await meet(t)


@scenario(2)
async def failing_a_tag(t: Transport) -> None:
    """`fail` ends what waits for a tag with its error, and drops the tag's messages; others go on."""
    peer = 1 - t.rank

    class Stop(Exception):
        pass

    receive = t.recv_into(peer, 80, (room(100),))
    probing = t.probe(peer, 81)
    large = t.send(peer, 82, (pattern(1, 8 << 20),))
    other = t.recv_into(peer, 83, (room(4),))
    for tag in (80, 81, 82):
        t.fail(tag, Stop("now"))
    for waiting in (receive, probing, large):
        try:
            await waiting
        except Stop:
            pass
        else:
            raise AssertionError("a failed tag went on")
    await t.send(peer, 83, (pattern(t.rank, 4),))
    await other
    await meet(t)


@scenario(2)
async def stale_messages(t: Transport) -> None:
    """Messages that `is_stale` names are dropped on arrival, small and large, and take no memory."""
    peer = 1 - t.rank
    t.is_stale = lambda tag: tag == 90
    await meet(t)
    await t.send(peer, 90, (pattern(1, 5000),))
    sending = asyncio.ensure_future(awaited(t.send(peer, 90, (pattern(1, 3 << 20),))))
    await t.send(peer, 91, (pattern(2, 10),))
    buffer = room(10)
    await t.recv_into(peer, 91, (buffer,))
    assert buffer == pattern(2, 10)
    assert t.stats()[peer]["early_bytes"] == 0
    sending.cancel()
    await asyncio.wait((sending,))
    await meet(t)
