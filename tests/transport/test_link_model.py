"""Two ends of one link, every order of sends, receives, cancels and deliveries: no message is lost.

The bytes between them lie in this test's hands, so that frames cross each other in ways that sockets
show once in a million calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ruda_async.transport.base import Buffer
from ruda_async.transport.framed.activity import Activity, Looking
from ruda_async.transport.framed.link import Link
from ruda_async.transport.framed.stream import Terms
from ruda_async.transport.pulse import Pulse

#: Bytes up to which messages need no word of the receiver's; the tags' messages lie on both sides.
EAGER = 64
SIZES = {1: 8, 2: 65, 3: 4000, 4: 600_000}
TERMS = Terms(eager_bytes=EAGER, early_bytes=4096)


class Pipe:
    """Bytes on their way, of which the test lets through what it likes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.released = 0


class Stream:
    """One end: what it writes goes into `out`; what the test released of `into` can be read."""

    def __init__(self, out: Pipe, into: Pipe) -> None:
        self._out, self._into = out, into
        self.readable: Callable[[], None] = lambda: None
        self.writable: Callable[[], None] | None = None

    def write(self, buffers: Sequence[Buffer | bytes]) -> int:
        data = b"".join(buffers)  # type: ignore[arg-type]
        room = 100_000 - len(self._out.data)
        if room <= 0 and data:
            raise BlockingIOError
        self._out.data += data[:room]
        return min(room, len(data))

    def read_into(self, buffer: memoryview) -> int:
        size = min(len(buffer), self._into.released)
        if not size:
            raise BlockingIOError
        buffer[:size] = self._into.data[:size]
        del self._into.data[:size]
        self._into.released -= size
        return size

    def await_bytes(self) -> bool:
        return False

    def on_readable(self, callback: Callable[[], None]) -> None:
        self.readable = callback

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self.writable = callback

    def end(self) -> None: ...

    def close(self) -> None: ...

    def describe(self) -> str:
        return "a test"


class Side:
    """A link's end, with what was asked of it."""

    def __init__(self, peer: int, out: Pipe, into: Pipe) -> None:
        self.stream = Stream(out, into)
        self.into = into
        self.activity = Activity()
        loop = asyncio.get_running_loop()
        self.link = Link(
            peer, self.stream, TERMS, TERMS, loop, self.activity, lambda tag: False, Pulse(loop, 0)
        )
        self.sent: dict[int, list[tuple[int, asyncio.Future[None]]]] = {tag: [] for tag in SIZES}
        self.received: dict[int, list[tuple[bytearray, asyncio.Future[None]]]] = {tag: [] for tag in SIZES}

    def send(self, tag: int) -> None:
        number = len(self.sent[tag]) % 255 + 1
        awaitable = self.link.sender.send(tag, [memoryview(bytes([number]) * SIZES[tag])], b"")
        self.sent[tag].append((number, future_of(awaitable)))

    def receive(self, tag: int) -> None:
        buffer = bytearray(SIZES[tag])
        awaitable = self.link.receiver.recv_into(tag, [memoryview(buffer)], b"")
        self.received[tag].append((buffer, future_of(awaitable)))

    def deliver(self, limit: int) -> None:
        """Let the peer's next bytes come, and what waits leave."""
        self.into.released = min(limit, len(self.into.data))
        if self.into.released:
            self.stream.readable()
        if self.stream.writable is not None:
            self.stream.writable()

    def check(self) -> None:
        assert not self.link.over.done(), self.link.sender.refusal


def future_of(awaitable: Awaitable[None]) -> asyncio.Future[None]:
    """The future behind what the link returned; done if the link was."""
    if isinstance(awaitable, Looking):
        return awaitable._future
    if isinstance(awaitable, asyncio.Future):
        return awaitable
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


Step = tuple[str, int, int, int]
KINDS = ("send", "receive", "receive", "unsend", "unreceive", "deliver", "deliver", "turn")
#: How much is let through: a byte, a frame and a bit, a small payload, a part of a large one, all.
AMOUNTS = (1, 32, 33, 96, 2000, 1 << 30)


def stories(tags: list[int]) -> st.SearchStrategy[list[Step]]:
    """Steps on few tags, where they get into each other's way."""
    step = st.tuples(
        st.sampled_from(KINDS), st.integers(0, 1), st.sampled_from(tags), st.sampled_from(AMOUNTS)
    )
    return st.lists(step, min_size=4, max_size=50)


STORIES = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2, unique=True).flatmap(stories)


def apply(step: Step, sides: Sequence[Side]) -> None:
    """One step of the generated story, all but the turns of the loop."""
    what, who, tag, number = step
    side = sides[who]
    if what == "send":
        side.send(tag)
    elif what == "receive":
        side.receive(tag)
    elif what == "unsend":
        cancel([future for _, future in side.sent[tag]], number)
    elif what == "unreceive":
        cancel([future for _, future in side.received[tag]], number)
    elif what == "deliver":
        side.deliver(number)
    side.check()


def cancel(futures: Sequence[asyncio.Future[None]], which: int) -> None:
    """Cancel one of those that wait, if any does."""
    waiting = [future for future in futures if not future.done()]
    if waiting:
        waiting[which % len(waiting)].cancel()


async def settle(sides: Sequence[Side]) -> None:
    """Let everything through that can go."""
    for _ in range(40):
        await asyncio.sleep(0)
        for side in sides:
            side.activity.push()
            side.deliver(1 << 30)
            side.check()


async def until_done(
    waiting: Sequence[tuple[object, asyncio.Future[None]]], partner: Callable[[], None], sides: Sequence[Side]
) -> None:
    """Give each of those that wait a partner."""
    for _ in range(len(waiting) + 1):
        if all(future.done() for _, future in waiting):
            return
        partner()
        await settle(sides)
    raise AssertionError("some wait for ever")


async def play(steps: Sequence[Step]) -> None:
    """Apply the steps; then receive all that was sent, send all that is waited for, and compare."""
    ways = Pipe(), Pipe()
    sides = Side(1, ways[0], ways[1]), Side(0, ways[1], ways[0])
    for step in steps:
        if step[0] == "turn":
            await asyncio.sleep(0)
        else:
            apply(step, sides)
    await settle(sides)
    for source, target in (sides, sides[::-1]):
        for tag in SIZES:
            # One at a time: both queues must be empty in the end, and each step shows that none is stuck.
            await until_done(source.sent[tag], lambda target=target, tag=tag: target.receive(tag), sides)
            await until_done(target.received[tag], lambda source=source, tag=tag: source.send(tag), sides)
            source.send(tag)
            await settle(sides)
            for _ in range(len(source.sent[tag])):  # small ones that came early are still to be read
                target.receive(tag)
                await settle(sides)
                if target.received[tag][-1][0][0] == source.sent[tag][-1][0]:
                    break
            compare(source.sent[tag], target.received[tag])


def compare(
    sent: Sequence[tuple[int, asyncio.Future[None]]],
    received: Sequence[tuple[bytearray, asyncio.Future[None]]],
) -> None:
    """Every send that was not cancelled has arrived, whole, once; in order if nothing was cancelled.

    A message and a receive that have met are a pair, and what loses its partner finds another among those
    that have none.
    """
    arrived = []
    for buffer, future in received:
        if future.cancelled() or future.exception() is not None:
            continue
        assert buffer == bytes([buffer[0]]) * len(buffer)
        arrived.append(buffer[0])
    numbers = [number for number, _ in sent]
    if not any(future.cancelled() for _, future in (*sent, *received)):
        assert arrived == sorted(arrived)
    assert len(set(arrived)) == len(arrived)
    assert set(arrived) <= set(numbers)
    certain = {number for number, future in sent if not future.cancelled()}
    lost = certain - set(arrived)
    assert not lost, (lost, arrived)


#: An announcement is used for a message that was asked for since, when the offer before it is taken back.
ASKED_TWICE: list[Step] = [
    ("send", 1, 4, 1),
    ("receive", 0, 4, 1),
    ("send", 1, 4, 1),
    ("unsend", 1, 4, 0),
    ("send", 1, 4, 1),
    ("turn", 0, 4, 1),
    ("deliver", 0, 4, 33),
    ("deliver", 1, 4, 96),
    ("deliver", 0, 4, 33),
    ("receive", 0, 4, 1),
]


@settings(deadline=None, max_examples=400)
@given(STORIES)
@example(ASKED_TWICE)
def test_no_order_of_frames_loses_a_message_or_the_link(steps: list[Step]) -> None:
    """Cancelled sends may or may not arrive; all others do, and the link never breaks."""
    asyncio.run(play(steps))
