"""What this rank did: the last calls in a ring, and counters by operation.

A call adds about a microsecond: one tuple into a ring of fixed length, and a few additions. All that costs
more (names of dtypes, percentiles, text) is left to whoever looks.

The histogram's bounds are powers of the square root of two, in microseconds: the bucket of a time is the
number of bits of its square. So 40 buckets span a microsecond to a second, and a percentile read from them
is at most a factor of 1.42 from the true one (1.19 from the middle of its bucket).
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from ..call import Operation

__all__ = ["RING", "Entry", "OperationStats", "Recorder", "Stats", "Tally", "Transfer", "in_flight"]

#: So many finished calls are remembered.
RING = 1024
#: Enough for the longest deadline that there is, 10**9 seconds.
_BUCKETS = 104
#: Characters of an error's text that are kept.
_MAX_TEXT = 500


class OperationStats(TypedDict):
    """Counters of one operation, by the method's name. Times are in seconds, of calls that succeeded.

    Attributes:
        count: calls that returned.
        failed: calls that raised.
        bytes_sent, bytes_received: payload bytes of the messages that these calls posted on this rank.
        seconds_total, seconds_max: over the calls in `count`.
        seconds_p50, seconds_p90, seconds_p99: percentiles, good to a factor of 1.2.
        histogram: ``(upper bound in seconds, calls)`` of each bucket that is not empty, in ascending order.
    """

    count: int
    failed: int
    bytes_sent: int
    bytes_received: int
    seconds_total: float
    seconds_max: float
    seconds_p50: float
    seconds_p90: float
    seconds_p99: float
    histogram: list[tuple[float, int]]


class Stats(TypedDict):
    """What `stats()` returns: counters of this rank since it connected, over all its channels.

    Attributes:
        rank, world_size: of the job.
        lost: the job's ranks that died.
        channels: channels that are open here.
        in_flight: calls that have begun and not ended.
        oldest_seconds: for how long the oldest of them has been under way; 0 without any.
        completed, failed: calls that returned, and that raised.
        operations: by the method's name.
        peers: by the job's rank: ``messages_sent bytes_sent messages_received bytes_received`` and
            ``early_bytes``, which wait here for their receive.
    """

    rank: int
    world_size: int
    lost: list[int]
    channels: int
    in_flight: int
    oldest_seconds: float
    completed: int
    failed: int
    operations: dict[str, OperationStats]
    peers: dict[int, dict[str, int]]


class Entry(NamedTuple):
    """One call in the ring; a plain tuple there.

    Attributes:
        channel: ``(number, name, members as job ranks)``.
        sequence: the call's number on the channel; for a transfer ``(peer, tag)``.
        name: the method that was called.
        head: the fingerprint, empty where the input was refused.
        entered, finished: `time.monotonic` seconds; None while it is in flight.
        sent, received: payload bytes posted.
        outcome: None for success, else the error's class name.
        error: its text.
        present: for a failed call, or one in flight, the group ranks known to have entered.
    """

    channel: tuple[int, str, tuple[int, ...]]
    sequence: int | tuple[int, int]
    name: str
    head: bytes
    entered: float
    finished: float | None
    sent: int
    received: int
    outcome: str | None = None
    error: str = ""
    present: tuple[int, ...] = ()


class _Call(Protocol):
    """What the recorder reads of a call: of an `Operation` or of a `Transfer`."""

    @property
    def channel(self) -> Any: ...
    @property
    def sequence(self) -> int | tuple[int, int]: ...
    @property
    def present(self) -> Set[int]: ...

    name: str
    head: bytes
    started: float
    sent: int
    received: int


class Transfer:
    """A `send` or `recv` in flight."""

    __slots__ = ("_waiting", "channel", "head", "name", "present", "received", "sent", "sequence", "started")

    def __init__(self, channel: Any, name: str, peer: int, tag: int) -> None:
        self.channel = channel
        self._waiting: set[Any] = set()
        self.name = name
        self.sequence: tuple[int, int] = (peer, tag)
        self.head = b""
        self.sent = 0
        self.received = 0
        self.present: frozenset[int] = frozenset()
        self.started = monotonic()

    def waits(self, wait: Any) -> None:
        """See `within.Party`: it cannot finish where its channel is closed or has lost a member already."""
        self._waiting.add(wait)
        error = self.channel.ended()
        if error is not None:
            wait.end(error)

    def waits_no_more(self, wait: Any) -> None:
        """See `within.Party`."""
        self._waiting.discard(wait)

    def fail(self) -> None:
        """Its channel was closed, or a member of it is lost: end what waits."""
        for wait in tuple(self._waiting):
            wait.end(self.channel.ended())


class Tally:
    """The counters of one operation."""

    __slots__ = ("buckets", "failed", "longest", "received", "seconds", "sent")

    def __init__(self) -> None:
        self.failed = 0
        self.sent = 0
        self.received = 0
        self.seconds = 0.0
        self.longest = 0.0
        self.buckets = [0] * _BUCKETS

    def stats(self) -> OperationStats:
        """The counters, and what follows from them."""
        buckets = self.buckets.copy()
        count = sum(buckets)
        middle, most, nearly_all = (_percentile(buckets, count, part) for part in (0.5, 0.9, 0.99))
        longest = self.longest
        return {
            "count": count,
            "failed": self.failed,
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "seconds_total": self.seconds,
            "seconds_max": longest,
            "seconds_p50": min(middle, longest),
            "seconds_p90": min(most, longest),
            "seconds_p99": min(nearly_all, longest),
            "histogram": [(_bound(i), n) for i, n in enumerate(buckets) if n],
        }


class Recorder:
    """The ring and the counters of one node. Read from any thread, written by the loop's alone."""

    def __init__(self) -> None:
        self.ring: deque[tuple[Any, ...]] = deque(maxlen=RING)
        self.tallies: dict[str, Tally] = {}
        #: Sends and receives in flight.
        self.transfers: set[Transfer] = set()

    def succeeded(self, call: _Call) -> None:
        """A call has its result. On the path of every call."""
        now = monotonic()
        name = call.name
        started = call.started
        sent = call.sent
        received = call.received
        self.ring.append((call.channel.label, call.sequence, name, call.head, started, now, sent, received))
        tally = self.tallies.get(name)
        if tally is None:
            tally = self.tallies[name] = Tally()
        seconds = now - started
        tally.sent += sent
        tally.received += received
        tally.seconds += seconds
        if seconds > tally.longest:
            tally.longest = seconds
        microseconds = seconds * 1e6
        tally.buckets[int(microseconds * microseconds).bit_length()] += 1

    def failed(self, call: _Call, error: BaseException) -> None:
        """A call has raised `error`."""
        self.ring.append(
            (
                *(call.channel.label, call.sequence, call.name, call.head, call.started, monotonic()),
                *(
                    call.sent,
                    call.received,
                    type(error).__name__,
                    str(error)[:_MAX_TEXT],
                    tuple(sorted(call.present)),
                ),
            )
        )
        tally = self.tallies.get(call.name)
        if tally is None:
            tally = self.tallies[call.name] = Tally()
        tally.failed += 1
        tally.sent += call.sent
        tally.received += call.received

    def operations(self) -> dict[str, OperationStats]:
        """The counters by operation, in alphabetical order."""
        return {name: tally.stats() for name, tally in sorted(self.tallies.copy().items())}


def in_flight(call: Operation | Transfer) -> Entry:
    """The entry of a call that has not ended."""
    present = tuple(sorted(call.present.copy()))
    return Entry(
        *(call.channel.label, call.sequence, call.name, call.head, call.started, None),
        *(call.sent, call.received, None, "", present),
    )


def _bound(bucket: int) -> float:
    """The upper bound of a bucket in seconds."""
    return float(2.0 ** (bucket / 2) * 1e-6)


def _percentile(buckets: Sequence[int], count: int, part: float) -> float:
    """The middle, on a logarithmic scale, of the bucket that holds the value at `part` of `count`."""
    seen = 0
    for bucket, n in enumerate(buckets):
        seen += n
        if n and seen >= part * count:
            return float(2.0 ** (bucket / 2 - 0.25) * 1e-6)
    return 0.0
