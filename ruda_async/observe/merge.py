"""All ranks' flight records on one time line, as trace events that Perfetto and chrome://tracing show.

The format is the Trace Event Format's JSON object form: a process per rank, a thread per channel (several,
where calls of one channel overlapped), and a complete event (``"ph": "X"``) per call, in microseconds. A
call that was in flight lasts until its record was taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .clocks import Clocks, align
from .reading import Call, Record

__all__ = ["merge"]


def merge(records: Sequence[Record]) -> dict[str, Any]:
    """The trace, as JSON types.

    Args:
        records: as `reading.load` gives them, at least one.
    """
    clocks = align(records)
    begin = min(
        (call.entered + clocks.offsets[r.rank] for r in records for call in r.calls),
        default=records[0].monotonic,
    )
    arrivals = _arrivals(records, clocks)
    events: list[dict[str, Any]] = []
    for record in records:
        shift = clocks.offsets[record.rank] - begin
        events += _about(record.rank, "process_name", name=f"rank {record.rank}")
        events += _about(record.rank, "process_sort_index", sort_index=record.rank)
        for thread, (title, calls) in enumerate(_threads(record), start=1):
            events += _about(record.rank, "thread_name", thread, name=title)
            events += [_event(record, call, thread, shift, arrivals) for call in calls]
        events.append(
            {
                "name": f"record: {record.reason}",
                "ph": "i",
                "s": "p",
                "cat": "record",
                "ts": _microseconds(record.monotonic + shift),
                "pid": record.rank,
                "tid": 0,
                "args": {"file": record.source},
            }
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "job": records[0].job,
            "world_size": records[0].world_size,
            "clocks": {
                f"rank {rank}": {
                    "offset_seconds": clocks.offsets[rank],
                    "uncertainty_seconds": clocks.uncertainty[rank],
                    "from": clocks.method[rank],
                }
                for rank in clocks.offsets
            },
        },
    }


def _about(rank: int, what: str, thread: int = 0, **args: Any) -> list[dict[str, Any]]:
    """A metadata event."""
    return [{"name": what, "ph": "M", "pid": rank, "tid": thread, "ts": 0, "args": args}]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


_Arrivals = dict[tuple[int, int], list[tuple[float, int]]]


def _arrivals(records: Sequence[Record], clocks: Clocks) -> _Arrivals:
    """Who entered each collective when, the first rank first."""
    found: _Arrivals = defaultdict(list)
    for record in records:
        for call in record.calls:
            if call.sequence is not None:
                at = call.entered + clocks.offsets[record.rank]
                found[call.channel, call.sequence].append((at, record.rank))
    for entries in found.values():
        entries.sort()
    return found


def _threads(record: Record) -> list[tuple[str, list[Call]]]:
    """The calls by channel; those that overlap without one containing the other lie on further threads."""
    channels: dict[str, list[list[Call]]] = {}
    for call in sorted(record.calls, key=lambda call: call.entered):
        lanes = channels.setdefault(call.channel_name, [])
        for lane in lanes:
            finished = lane[-1].finished
            if finished is not None and finished <= call.entered:
                lane.append(call)
                break
        else:
            lanes.append([call])
    return [
        (name if i == 0 else f"{name} ({i + 1})", lane)
        for name, lanes in channels.items()
        for i, lane in enumerate(lanes)
    ]


def _event(record: Record, call: Call, thread: int, shift: float, arrivals: _Arrivals) -> dict[str, Any]:
    finished = record.monotonic if call.finished is None else call.finished
    args = {
        key: call.raw[key]
        for key in ("dtype", "shape", "arguments", "bytes_sent", "bytes_received", "error", "missing")
        if call.raw.get(key) not in (None, "", {})
    }
    args["state"] = call.outcome or call.state
    if call.sequence is not None:
        entries = arrivals[call.channel, call.sequence]
        args["sequence"] = call.sequence
        args["last_to_enter"] = f"rank {entries[-1][1]}"
        args["skew_microseconds"] = _microseconds(entries[-1][0] - entries[0][0])
    return {
        "name": call.label,
        "ph": "X",
        "cat": "transfer" if call.sequence is None else "collective",
        "ts": _microseconds(call.entered + shift),
        "dur": _microseconds(max(finished - call.entered, 0)),
        "pid": record.rank,
        "tid": thread,
        "args": args,
    }
