"""The flight record: what this rank did last and what it waits for, written down when something goes wrong.

A record is a JSON object (`FORMAT`, `VERSION`); `docs/observing.md` describes it. Taking one copies a few
lists on the event loop; turning it into text and writing the file is done by a thread.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from functools import cache
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collectives.request import decode_fingerprint
from .logs import log
from .recorder import Entry, in_flight

if TYPE_CHECKING:
    import asyncio

    from ..communicator import AsyncCommunicator
    from ..node import Node
    from ..sync import Communicator

__all__ = ["FORMAT", "VERSION", "FlightRecords", "Snapshot", "dump", "write", "write_behind"]

FORMAT = "ruda-async flight record"
VERSION = 1
#: Files that one process leaves behind at most; older ones of its own are removed.
MAX_FILES = 64
#: Seconds between two records of one rank.
_PAUSE = 1.0


class Snapshot(NamedTuple):
    """A flight record before it is rendered."""

    reason: str
    job: str
    rank: int
    world_size: int
    wall: float
    monotonic: float
    lost: dict[int, str]
    channels: list[tuple[int, str, tuple[int, ...], int]]
    entries: list[Entry]

    def render(self) -> dict[str, Any]:
        """The record as JSON types."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "reason": self.reason,
            "job": self.job,
            "rank": self.rank,
            "world_size": self.world_size,
            "process": os.getpid(),
            "host": os.uname().nodename,
            "clock": {"id": clock_id(), "monotonic": self.monotonic, "wall": self.wall},
            "lost": {str(rank): text for rank, text in self.lost.items()},
            "channels": [
                {"id": id, "name": name, "members": list(members), "next": following}
                for id, name, members, following in self.channels
            ],
            "operations": [_entry(entry) for entry in self.entries],
        }


def _entry(entry: Entry) -> dict[str, Any]:
    """One call as JSON types."""
    id, name, members = entry.channel
    said = decode_fingerprint(entry.head) if entry.head else None
    found: dict[str, Any] = {
        "channel": id,
        "channel_name": name,
        "operation": entry.name,
        "entered": entry.entered,
        "finished": entry.finished,
        "state": "in flight" if entry.finished is None else "failed" if entry.outcome else "done",
        "bytes_sent": entry.sent,
        "bytes_received": entry.received,
    }
    if isinstance(entry.sequence, tuple):
        found["peer"], found["tag"] = entry.sequence
    else:
        found["sequence"] = entry.sequence
    if said is not None:
        found["dtype"] = said.dtype
        found["shape"] = None if said.shape is None else list(said.shape)
        found["arguments"] = {key: _plain(value) for key, value in said.detail}
    if entry.outcome is not None:
        found["outcome"], found["error"] = entry.outcome, entry.error
    if found["state"] != "done" and "sequence" in found:
        found["present"] = list(entry.present)
        found["missing"] = [rank for rank in range(len(members)) if rank not in entry.present]
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


@cache
def clock_id() -> str:
    """Names the clock that `time.monotonic` reads: equal for processes of one running host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no Linux
        from uuid import getnode

        return f"{os.uname().nodename}/{getnode():x}"


class FlightRecords:
    """Takes a node's records, and writes them where the node's ``trace_dir`` says."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reason: str | None = None
        self._timer: asyncio.Handle | None = None
        self._last_at = float("-inf")
        #: The latest record that a failure caused.
        self.last: Snapshot | None = None

    def trigger(self, reason: str) -> None:
        """Take a record soon: with everything that fails in this turn of the loop, at most one a second."""
        if self._reason is not None or self._node.closed is not None:
            return
        self._reason = reason
        loop = self._node.loop
        wait = self._last_at + _PAUSE - monotonic()
        self._timer = loop.call_later(wait, self.flush) if wait > 0 else loop.call_soon(self.flush)

    def flush(self) -> None:
        """Take the record that is due, if one is."""
        reason, self._reason = self._reason, None
        if reason is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._last_at = monotonic()
        self.last = snapshot = self.take(reason)
        folder = self._node.config.trace_dir
        if folder is not None:
            write_behind(snapshot, folder)

    def latest(self) -> Snapshot | None:
        """The latest record that a failure caused, or a fresh one where it is due. From any thread."""
        reason = self._reason
        return self.last if reason is None else self.take(reason)

    def take(self, reason: str) -> Snapshot:
        """A record of this moment. May be called from any thread."""
        node = self._node
        entries = [Entry(*entry) for entry in node.recorder.ring.copy()]
        entries += [in_flight(call) for call in node.calls_in_flight()]
        return Snapshot(
            reason=reason,
            job=node.config.name,
            rank=node.transport.rank,
            world_size=node.transport.world_size,
            wall=time(),
            monotonic=monotonic(),
            lost={rank: str(error) for rank, error in node.lost.copy().items()},
            channels=[(*channel.label, channel.next) for channel in node.channels.copy().values()],
            entries=entries,
        )


# ---------------------------------------------------------------------- files

_written: deque[Path] = deque()
_counted = 0
_lock = threading.Lock()


def write(snapshot: Snapshot, folder: Path) -> Path:
    """Write a record into `folder`, which is made where it is missing; the file's path.

    This process keeps its latest `MAX_FILES` files; a reader never sees half of one.

    Raises:
        OSError
    """
    global _counted
    text = json.dumps(snapshot.render())
    folder.mkdir(parents=True, exist_ok=True)
    job = re.sub(r"[^\w.-]+", "-", snapshot.job)[-60:].strip("-.") or "job"
    with _lock:
        _counted += 1
        path = folder / f"ruda-{job}-rank{snapshot.rank}-{os.getpid()}-{_counted}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        _written.append(path)
        while len(_written) > MAX_FILES:
            _written.popleft().unlink(missing_ok=True)
    return path


def write_behind(snapshot: Snapshot, folder: Path) -> None:
    """`write` beside the caller; where that fails, the log says so."""
    # Not a daemon: a program that ends because of the failure waits for its record.
    thread = threading.Thread(target=_write_quietly, args=(snapshot, folder), name="ruda-async record")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, or threads have run out
        _write_quietly(snapshot, folder)


def _write_quietly(snapshot: Snapshot, folder: Path) -> None:
    fields = {"ruda_rank": snapshot.rank, "ruda_reason": snapshot.reason}
    try:
        path = write(snapshot, folder)
    except OSError as error:
        log.error("rank %d: no flight record in %s: %s", snapshot.rank, folder, error, extra=fields)
    else:
        log.warning("rank %d: flight record in %s (%s)", snapshot.rank, path, snapshot.reason, extra=fields)


def dump(
    communicator: AsyncCommunicator | Communicator,
    folder: str | Path | None = None,
    reason: str = "asked for",
) -> Path:
    """Write this rank's flight record now; the file's path. May be called from any thread.

    Args:
        communicator: any of the job's on this rank.
        folder: where to; by default the communicator's ``trace_dir``, else the current folder.
        reason: why, for the record.

    Raises:
        OSError: it cannot be written.
    """
    node = communicator.node
    target = Path(folder) if folder is not None else node.config.trace_dir or Path()
    return write(node.flight.take(reason), target)
