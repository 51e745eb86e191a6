"""One UCX worker on one event loop: operations, small messages, and who drives it when."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import select
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from ruda_async.transport import Buffer, Spin, blocking

from .driver import Driver

__all__ = ["CONTROL_BYTES", "Engine", "Operation"]

#: Seconds that UCX is driven before the loop gets its turn. One call of UCX copies half a megabyte at most.
_TURN = 300e-6
#: Seconds between two looks while an operation is under way, should UCX not say that there is progress.
_TICK = 1e-3
#: Misses in a row after which the next twice as many waits do not look first.
_LUCK = 8
#: Tags of payloads have this bit; those of small messages have not.
_PAYLOAD = 1 << 63
#: The rank that sent it, in the tag of a small message.
_RANK_MASK = (1 << 16) - 1
#: No small message is longer, whatever its sender says: larger eager limits are refused at set-up.
CONTROL_BYTES = 1 << 26


class Operation:
    """One UCX request under way; `buffer` stays alive as long as UCX may touch it."""

    __slots__ = ("buffer", "done", "peer", "request")

    def __init__(self, peer: int, request: Any, buffer: Any, done: Callable[[int], None] | None) -> None:
        self.peer = peer
        self.request = request
        self.buffer = buffer
        #: Called with the UCX status once, 0 for success; None when nobody cares any more.
        self.done = done


class Engine:
    """See the module.

    Args:
        api: ucxx's low-level module.
        context: a UCX context.
        mode: ``"blocking"``, ``"polling"`` or ``"thread"``.
        spin: how long a waiting rank looks for a message before it sleeps.
        error_handling: whether endpoints report that their peer is dead; as that of all peers.
    """

    def __init__(self, api: Any, context: Any, mode: str, spin: Spin, error_handling: bool) -> None:
        self._api = api
        self._array = _array_type()
        self._context = context
        self._error_handling = error_handling
        self._worker = api.UCXWorker(context)
        self._loop = asyncio.get_running_loop()
        self._spin = spin
        self._luck = _LUCK
        self._running: list[Operation] = []
        #: Small messages that are not whole yet, and those behind them, by peer.
        self._arriving: dict[int, deque[tuple[Any, bytearray]]] = {}
        #: What is of no use any more, but UCX may still touch.
        self._abandoned: list[Any] = []
        self._fences: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        #: Since somebody set it to False, everything that had come was taken in at least once.
        self.caught_up = True
        self._kicked = False
        self._turning = False
        self._tick: asyncio.TimerHandle | None = None
        self._closed = False
        self._on_control: Callable[[int, bytearray], None] | None = None
        self._control_tag: Any = None
        self._control_mask = api.UCXXTagMask(~_RANK_MASK & ((1 << 64) - 1))
        self._next_payload = secrets.randbits(63)
        self.address = bytes(self._worker.address)
        self._worker.init_blocking_progress_mode()
        self._fd: int = self._worker.epoll_file_descriptor
        self.mode = mode
        self._driver: Driver | None = None
        if mode == "thread":
            self._driver = Driver(self._worker, self._fd, self._loop, self.turn)
        elif mode == "blocking":
            self._loop.add_reader(self._fd, self.turn)

    # ------------------------------------------------------------------ set-up

    def endpoint(self, address: bytes) -> Any:
        """An endpoint to the worker of that address. Raises what ucxx raises."""
        remote = self._api.UCXAddress.create_from_buffer(address)
        return self._api.UCXEndpoint.create_from_worker_address(self._worker, remote, self._error_handling)

    def listener(self, on_request: Callable[[int], None]) -> Any:
        """A UCX listener on a port that UCX picks; `on_request` is told of connections, on any thread."""
        return self._api.UCXListener.create(self._worker, 0, on_request)

    def dial(self, host: str, port: int) -> Any:
        """An endpoint to another worker's listener. Raises what ucxx raises."""
        return self._api.UCXEndpoint.create(self._worker, host, port, self._error_handling)

    def accept(self, listener: Any, request: int) -> Any:
        """An endpoint to the worker that has dialled. Raises what ucxx raises."""
        return listener.create_endpoint_from_conn_request(request, self._error_handling)

    def start(self, key: int, on_control: Callable[[int, bytearray], None]) -> None:
        """Hand small messages to `on_control(rank, message)`, in the order they were sent.

        Args:
            key: 47 bits that only ranks of this job know; a small message is one that carries them.
        """
        self._on_control = on_control
        self._control_tag = self._api.UCXXTag(control_tag(key, 0))
        self.kick()

    def tag(self, value: int) -> Any:
        """A tag for `send`."""
        return self._api.UCXXTag(value)

    def fresh_tag(self) -> int:
        """A tag for one payload to this worker, which nobody can guess."""
        self._next_payload = (self._next_payload + 1) & (_PAYLOAD - 1)
        return _PAYLOAD | self._next_payload

    # ------------------------------------------------------------------ operations

    def send(
        self, peer: int, endpoint: Any, data: Any, tag: Any, done: Callable[[int], None] | None = None
    ) -> None:
        """Start a tagged send of contiguous memory."""
        request = endpoint.tag_send(self._array(data), tag)
        if done is None and request.completed and not request.status:
            return
        self._running.append(Operation(peer, request, data, done))
        self.kick()

    def receive(self, peer: int, target: Buffer, tag: int, done: Callable[[int], None]) -> Operation:
        """Start a tagged receive that fills `target` exactly."""
        request = self._worker.tag_recv(self._array(target), self._api.UCXXTag(tag))
        operation = Operation(peer, request, target, done)
        self._running.append(operation)
        self.kick()
        return operation

    def cancel(self, operation: Operation) -> None:
        """Withdraw a receive for which nothing was sent: its memory is not touched any more."""
        if operation in self._running:
            self._running.remove(operation)
        operation.done = None
        operation.request = operation.buffer = None  # the request's end cancels it in UCX

    def forget(self, peer: int) -> None:
        """The peer is lost: what is under way with it is not waited for, nor told of.

        UCX has no way to take back what it has begun, so the memory is kept until the worker is released.
        """
        for operation in self._running:
            if operation.peer == peer:
                operation.done = None
                self._abandoned.append(operation)
        self._running = [operation for operation in self._running if operation.peer != peer]
        self._abandoned.extend(self._arriving.pop(peer, ()))

    def when(self, ready: Callable[[], bool], act: Callable[[], None]) -> None:
        """Call `act` once `ready()` is true: now, or on a later turn."""
        if ready():
            act()
        else:
            self._fences.append((ready, act))
            self.kick()

    # ------------------------------------------------------------------ driving

    def kick(self) -> None:
        """There is something to drive: do so when the loop turns."""
        if not self._kicked and not self._closed:
            self._kicked = True
            self._loop.call_soon(self._on_kick)

    def _on_kick(self) -> None:
        self._kicked = False
        self.turn()

    def turn(self) -> bool:
        """Drive UCX until nothing moves, for a fraction of a millisecond at most; False if more moves."""
        if self._closed or self._turning:
            return True
        idle = self._drive(monotonic() + _TURN)
        if self._closed:
            return True
        # Armed, UCX makes its descriptor readable at the next event; it refuses while there is one already.
        if not idle or self.mode == "polling" or (self.mode == "blocking" and not self._worker.arm()):
            self.kick()
        elif (self._running or self._arriving or self._fences) and self._tick is None:
            self._tick = self._loop.call_later(_TICK, self._on_tick)
        return idle

    def _on_tick(self) -> None:
        self._tick = None
        self.turn()

    def _drive(self, end: float) -> bool:
        """Drive UCX until nothing moves (True) or `end` is reached (False)."""
        self._turning = True
        try:
            while True:
                moved = self._worker.progress_once()
                moved = self._take_controls(end) or moved
                moved = self._reap() or moved
                if not moved or self._closed:
                    self.caught_up = True
                    return True
                if monotonic() > end:
                    return False
        finally:
            self._turning = False

    def _take_controls(self, end: float) -> bool:
        """Take in small messages that have come; whether there were any."""
        if self._on_control is None:
            return False
        probe = self._worker.tag_probe(self._control_tag, self._control_mask, True)
        came = False
        while probe.matched:
            came = True
            rank = probe.sender_tag.value & _RANK_MASK
            if probe.length > CONTROL_BYTES:  # no rank sends that: an empty message breaks the protocol too
                self._abandoned.append(probe)
                self._on_control(rank, bytearray())
            else:
                data = bytearray(probe.length)
                request = self._worker.tag_recv_with_handle(self._array(data), probe)
                if request.completed and rank not in self._arriving:
                    self._on_control(rank, data)
                else:
                    self._arriving.setdefault(rank, deque()).append((request, data))
            if self._closed or monotonic() > end:
                return True
            probe = self._worker.tag_probe(self._control_tag, self._control_mask, True)
        return (bool(self._arriving) and self._dispatch()) or came

    def _dispatch(self) -> bool:
        """Hand on what is whole; a long message may still be coming, and its peer's others keep behind it."""
        handed = False
        for rank in list(self._arriving):
            queue = self._arriving[rank]
            while queue and queue[0][0].completed and not self._closed:
                _, data = queue.popleft()
                assert self._on_control is not None
                self._on_control(rank, data)
                handed = True
            if not queue:
                self._arriving.pop(rank, None)
        return handed

    def _reap(self) -> bool:
        """Tell of the operations that are over; whether there were any."""
        if self._fences:
            self._check_fences()
        if not self._running:
            return False
        finished: list[Operation] = []
        running: list[Operation] = []
        for operation in self._running:
            (finished if operation.request.completed else running).append(operation)
        if not finished:
            return False
        self._running = running
        for operation in finished:
            if operation.done is not None:
                operation.done(int(operation.request.status))
        return True

    def _check_fences(self) -> None:
        fences, self._fences = self._fences, []
        for ready, act in fences:
            if ready():
                act()
            else:
                self._fences.append((ready, act))

    # ------------------------------------------------------------------ waiting

    def look(self, future: asyncio.Future[Any]) -> None:
        """Somebody is about to wait for `future`: look whether it is done within moments."""
        if self._closed or self._turning:
            return
        if blocking.seconds:
            self._look_long(future)
            return
        if self._luck <= 0:
            self._luck += 1
            return
        end = monotonic() + self._spin.on_loop
        while True:
            self._drive(end)
            if future.done():
                self._luck = _LUCK
                return
            if self._closed or monotonic() >= end:
                break
        self._luck -= 1
        if not self._luck:
            self._luck = -2 * _LUCK

    def _look_long(self, future: asyncio.Future[Any]) -> None:
        """This thread may block: look a while, then sleep until UCX has an event."""
        now = monotonic()
        awake, end = now + self._spin.blocking, now + blocking.seconds
        poller: Any = None
        while not future.done() and not self._closed:
            idle = self._drive(end)
            now = monotonic()
            if now >= end:
                return
            if idle and now >= awake and not future.done() and self._worker.arm():
                if poller is None:
                    poller = select.poll()
                    poller.register(self._fd, select.POLLIN)
                wait = min(end - now, _TICK) if self._running else end - now
                poller.poll(max(wait * 1000, 0))

    # ------------------------------------------------------------------ ending

    def shut(self) -> None:
        """Stop driving: nothing is called any more, and no message is taken in."""
        if self._closed:
            return
        self._closed = True
        if self._driver is not None:
            self._driver.stop()
        elif self.mode == "blocking":
            self._loop.remove_reader(self._fd)
        if self._tick is not None:
            self._tick.cancel()

    def release(self, endpoints: list[Any]) -> Callable[[], None]:
        """Give up everything; what is returned frees it, on any thread, in some milliseconds.

        Endpoints are closed first, so that UCX can still flush them, then the worker, then the context.
        """
        self.shut()
        worker, context = self._worker, self._context
        leftovers: list[Any] = [self._running, self._arriving, self._abandoned]
        self._running, self._arriving, self._abandoned, self._fences = [], {}, [], []
        self._worker = self._context = None

        def free() -> None:
            nonlocal worker, context
            for endpoint in endpoints:
                with contextlib.suppress(Exception):
                    if endpoint.alive:  # ucxx crashes on closing one whose peer UCX knows to be dead
                        endpoint.close()
            end = monotonic() + 0.02
            while monotonic() < end and worker.progress_once():
                pass
            endpoints.clear()
            for leftover in leftovers:
                leftover.clear()
            worker = None
            context = None

        return free

    @staticmethod
    def free_aside(free: Callable[[], None]) -> None:
        """Run `free` on a thread of its own, which ends with it."""
        threading.Thread(target=free, name="ruda-ucx-release").start()


def control_tag(key: int, rank: int) -> int:
    """The UCX tag of small messages from `rank` to the worker whose key this is."""
    return (key & ((1 << 47) - 1)) << 16 | rank


def _array_type() -> Any:
    return importlib.import_module("ucxx._lib.arr").Array
