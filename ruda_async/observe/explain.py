"""In words: who waits for whom, and which rank to look at first.

A rank *waits* in a call that was in flight when its record was taken, or that ended with a timeout or a lost
rank. It waits for the members that have not entered that call: those whose own record says so, and those
that left no record and that nobody in the call had heard of. Follow the waiting from rank to rank, and it
ends at a rank that waits for nobody: that is where to look. Where it ends nowhere, ranks wait for each
other in a circle, since they made their calls in different orders; the one that most wait for is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .clocks import Clocks, align
from .reading import Call, Record

__all__ = ["Explanation", "explain"]

_WAITED = frozenset(("CollectiveTimeoutError", "PeerLostError"))
#: A call that failed longer ago than this, in seconds, is history.
_RECENT = 60.0


@dataclass(slots=True)
class _Stuck:
    """A call that some ranks wait in."""

    channel: int
    name: str
    sequence: int
    members: tuple[int, ...] = ()
    waiting: dict[int, Call] = field(default_factory=dict)
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the records say.

    Attributes:
        culprits: the ranks to look at first; empty where nobody waits.
        text: a paragraph for each stuck call, then the conclusion.
    """

    culprits: tuple[int, ...]
    text: str


def explain(records: Sequence[Record]) -> Explanation:
    """Say who waits for whom.

    Args:
        records: as `reading.load` gives them, at least one.
    """
    clocks = align(records)
    by_rank = {record.rank: record for record in records}
    now = max(record.monotonic + clocks.offsets[record.rank] for record in records)
    size = records[0].world_size
    silent = [rank for rank in range(size) if rank not in by_rank]
    lines = [
        f"job {records[0].job!r}: records of {_ranks(by_rank)} of {size}"
        + (f"; none of {_ranks(silent)}" if silent else "")
    ]
    deaths: dict[int, str] = {}
    for record in records:
        for rank, text in record.lost.items():
            deaths.setdefault(rank, text)
    for rank, text in sorted(deaths.items()):
        said = f"rank {rank} is lost"  # most texts say it themselves
        lines.append(text if text.startswith(said) else f"{said}: {text}")
    lines += _mismatches(records)
    stuck = _stuck_calls(records)
    waits: dict[int, set[int]] = defaultdict(set)
    for call in stuck:
        lines.append(_describe(call, by_rank, clocks, now))
        for rank in call.waiting:
            waits[rank].update(call.absent)
    for record in records:
        for transfer in record.calls:
            if transfer.sequence is None and _waits(record, transfer) and "peer" in transfer.raw:
                peer = _job_rank(record, transfer)
                lines.append(
                    f"rank {record.rank} waits in {transfer.label} on channel {transfer.channel_name!r}"
                )
                waits[record.rank].add(peer)
    culprits, conclusion = _conclude(waits, set(deaths), by_rank)
    lines.append(conclusion)
    return Explanation(culprits, "\n".join(lines))


def _waits(record: Record, call: Call) -> bool:
    """Whether the rank waits in this call, or has just given up waiting."""
    if call.finished is None:
        return True
    return call.outcome in _WAITED and _is_current(record, call, call.finished)


def _is_current(record: Record, call: Call, finished: float) -> bool:
    """Whether a failure is what the record is about: recent, and no later call of the channel went well."""
    return record.monotonic - finished < _RECENT and not any(
        later.channel == call.channel and later.state == "done" and later.entered >= finished
        for later in record.calls
    )


def _job_rank(record: Record, transfer: Call) -> int:
    """A transfer's peer as the job counts."""
    peer = int(transfer.raw["peer"])
    channel = record.channels.get(transfer.channel)
    return channel.members[peer] if channel is not None and peer < len(channel.members) else peer


# ---------------------------------------------------------------------- finding


def _stuck_calls(records: Sequence[Record]) -> list[_Stuck]:
    """The first call of each channel that ranks wait in, the one stuck longest first."""
    found: dict[int, _Stuck] = {}
    for record in records:
        for call in record.calls:
            if call.sequence is None or not _waits(record, call):
                continue
            stuck = found.get(call.channel)
            if stuck is None or call.sequence < stuck.sequence:
                stuck = found[call.channel] = _Stuck(call.channel, call.channel_name, call.sequence)
            if call.sequence == stuck.sequence:
                stuck.waiting[record.rank] = call
    for stuck in found.values():
        stuck.members = _members(stuck, records)
        stuck.absent = tuple(m for m in stuck.members if not _entered(m, stuck, records))
    return sorted(found.values(), key=lambda stuck: min(call.entered for call in stuck.waiting.values()))


def _members(stuck: _Stuck, records: Sequence[Record]) -> tuple[int, ...]:
    for record in records:
        channel = record.channels.get(stuck.channel)
        if channel is not None:
            return channel.members
    # The channel was closed before the records were taken.
    return tuple(range(records[0].world_size))


def _entered(member: int, stuck: _Stuck, records: Sequence[Record]) -> bool:
    """Whether `member` has entered the call: by its own record, else by what the others had heard."""
    if member in stuck.waiting:
        return True
    for record in records:
        if record.rank == member:
            channel = record.channels.get(stuck.channel)
            if channel is not None:
                return channel.next > stuck.sequence
            return any(c.channel == stuck.channel and c.sequence == stuck.sequence for c in record.calls)
    place = stuck.members.index(member)
    return any(place in call.present for call in stuck.waiting.values())


def _mismatches(records: Sequence[Record]) -> list[str]:
    """What ended with a mismatch, each once."""
    found: dict[tuple[int, int | None], str] = {}
    for record in records:
        for call in record.calls:
            if (
                call.outcome == "CollectiveMismatchError"
                and call.finished is not None
                and _is_current(record, call, call.finished)
            ):
                text = str(call.raw.get("error", ""))
                found.setdefault((call.channel, call.sequence), f"a mismatch: {text}")
    return list(found.values())


# ---------------------------------------------------------------------- saying


def _describe(stuck: _Stuck, by_rank: dict[int, Record], clocks: Clocks, now: float) -> str:
    first = min(stuck.waiting.values(), key=lambda call: call.entered + clocks.offsets[call.rank])
    ago = _ago(first, clocks, now)
    names = Counter(call.operation for call in stuck.waiting.values())
    operation = names.most_common(1)[0][0]
    waiting = f"{_ranks(stuck.waiting)} {'wait' if len(stuck.waiting) > 1 else 'waits'}"
    text = f"channel {stuck.name!r}: {waiting} in {operation} #{stuck.sequence}, entered {ago}"
    others = {rank: call for rank, call in stuck.waiting.items() if call.operation != operation}
    for rank, call in sorted(others.items()):
        text += f"; rank {rank} made it {call.operation} instead"
    for rank in stuck.absent:
        text += f"\n  rank {rank} never entered {operation} #{stuck.sequence}: "
        text += _whereabouts(by_rank[rank], clocks, now) if rank in by_rank else "it left no record"
    if not stuck.absent:
        text += "\n  every rank has entered it: it was under way"
    return text


def _whereabouts(record: Record, clocks: Clocks, now: float) -> str:
    """What a rank does instead."""
    waiting = [call for call in record.calls if _waits(record, call)]
    if waiting:
        call = min(waiting, key=lambda call: call.entered)
        return f"it is in {call.label} on channel {call.channel_name!r}, entered {_ago(call, clocks, now)}"
    over = [call for call in record.calls if call.finished is not None]
    if not over:
        return "it has made no call yet"
    call = max(over, key=lambda call: call.finished or 0.0)
    seconds = now - ((call.finished or 0.0) + clocks.offsets[record.rank])
    how = "finished" if call.state == "done" else f"ended with {call.outcome}"
    return (
        f"it is in no call; its last was {call.label} on channel {call.channel_name!r}, "
        f"{how} {max(seconds, 0):.1f} s ago"
    )


def _ago(call: Call, clocks: Clocks, now: float) -> str:
    return f"{max(now - (call.entered + clocks.offsets[call.rank]), 0):.1f} s ago"


def _conclude(
    waits: dict[int, set[int]], dead: set[int], by_rank: dict[int, Record]
) -> tuple[tuple[int, ...], str]:
    """Follow the waiting to where it ends."""
    awaited = set().union(*waits.values()) if waits else set()
    ends = sorted((awaited | dead) - {rank for rank, others in waits.items() if others - {rank}} | dead)
    if ends:
        reasons = []
        for rank in ends:
            if rank in dead:
                reasons.append(f"rank {rank} (lost)")
            elif rank not in by_rank:
                reasons.append(
                    f"rank {rank} (no record: it stands still, is gone, or its record is not here)"
                )
            else:
                reasons.append(f"rank {rank}")
        return tuple(ends), "look first at " + ", ".join(reasons)
    circle = _circle(waits)
    if circle:
        chain = ", ".join(
            f"rank {a} for rank {b}" for a, b in zip(circle, [*circle[1:], circle[0]], strict=True)
        )
        text = f"they wait in a circle: {chain}; these ranks make their calls in different orders"
        awaited_by = {rank: sum(rank in others for others in waits.values()) for rank in awaited}
        most = max(awaited_by.values())
        outvoted = tuple(sorted(rank for rank, count in awaited_by.items() if count == most))
        if len(outvoted) < len(awaited):
            return outvoted, f"{text}; look first at {_ranks(outvoted)}, for which {most} wait"
        return tuple(sorted(circle)), text
    return (), "nobody waits for a rank that has not come"


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Ranks that wait for each other, in order; empty where there are none."""
    for start in sorted(waits):
        path = [start]
        while True:
            following = min((r for r in waits.get(path[-1], ()) if r != path[-1]), default=None)
            if following is None:
                break
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
