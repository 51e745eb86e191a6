"""How far apart the ranks' clocks are, from nothing but their flight records.

Ranks of one running host read one clock. Between hosts, every collective that succeeded is a measurement:
no rank leaves one before every rank has entered it. So for a call that rank *a* left at ``f_a`` and rank *b*
entered at ``e_b``, each by its own clock, ``e_b - f_a`` is at most the distance of *b*'s clock from *a*'s.
Taken both ways over all calls that both recorded, that bounds the distance from both sides; the tightest
bounds follow from shortest paths in the graph of these constraints (Bellman 1958). The solution taken is
the mean of the two extreme ones, which satisfies every constraint, since their set is convex. (The same idea
as in Duda, Harrus, Haddad & Bernard, "Estimating global time in distributed systems", 1987.)

Clocks also drift. A constraint of a call that lies `t` seconds back is loosened by `DRIFT` times `t`.
Where no call links two clocks, or the constraints contradict each other, wall-clock time is all there is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .reading import Record

__all__ = ["Clocks", "align"]

#: Seconds per second that two clocks may drift apart: twice what quartz is specified for.
DRIFT = 100e-6


@dataclass(frozen=True, slots=True)
class Clocks:
    """The outcome.

    Attributes:
        offsets: by rank, what to add to its `time.monotonic` to have the lowest rank's.
        uncertainty: by rank, half the width of the bounds in seconds; None where only wall-clock time was
            left.
        method: by rank, for people.
    """

    offsets: dict[int, float]
    uncertainty: dict[int, float | None]
    method: dict[int, str]


def align(records: Sequence[Record]) -> Clocks:
    """The distance of every rank's clock from the lowest rank's."""
    reference = records[0]
    groups: dict[str, Record] = {}
    for record in records:
        groups.setdefault(record.clock, record)
    names = list(groups)
    limits = _constraints(records)
    upper = _shortest(names, limits, reference.clock)
    lower = _shortest(names, {(b, a): limit for (a, b), limit in limits.items()}, reference.clock)
    found = Clocks({}, {}, {})
    for record in records:
        rank, name = record.rank, record.clock
        if name == reference.clock:
            offset, uncertainty, method = 0.0, 0.0, "the same clock"
        elif upper is not None and lower is not None and name in upper and name in lower:
            # offset - 0 <= upper, and 0 - offset <= lower
            offset = (upper[name] - lower[name]) / 2
            uncertainty, method = (upper[name] + lower[name]) / 2, "calls that both recorded"
        else:
            first = groups[name]
            offset = (first.wall - first.monotonic) - (reference.wall - reference.monotonic)
            uncertainty = None
            why = "contradictory calls" if upper is None or lower is None else "no call that both recorded"
            method = f"wall-clock time ({why})"
        found.offsets[rank] = offset
        found.uncertainty[rank] = uncertainty
        found.method[rank] = method
    return found


def _constraints(records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """``(a, b) → limit``: clock b's offset is at most clock a's plus `limit`."""
    clock_of = {record.rank: record.clock for record in records}
    taken_at = {record.rank: record.monotonic for record in records}
    calls: dict[tuple[int, int, str], list[tuple[str, float, float, float]]] = defaultdict(list)
    for record in records:
        for call in record.calls:
            if call.sequence is not None and call.state == "done" and call.finished is not None:
                slack = DRIFT * max(taken_at[call.rank] - call.entered, 0)
                calls[call.channel, call.sequence, call.operation].append(
                    (clock_of[call.rank], call.entered, call.finished, slack)
                )
    limits: dict[tuple[str, str], float] = {}
    for sides in calls.values():
        for a, entered, _, slack_a in sides:
            for b, _, finished, slack_b in sides:
                if a != b:
                    # entered + offset_a <= finished + offset_b
                    limit = finished - entered + max(slack_a, slack_b)
                    limits[b, a] = min(limit, limits.get((b, a), limit))
    return limits


def _shortest(
    names: Sequence[str], limits: dict[tuple[str, str], float], start: str
) -> dict[str, float] | None:
    """Shortest paths from `start` (Bellman and Ford); None where a cycle is negative."""
    distance = {start: 0.0}
    for _ in names:
        changed = False
        for (a, b), limit in limits.items():
            if a in distance and distance[a] + limit < distance.get(b, float("inf")) - 1e-12:
                distance[b] = distance[a] + limit
                changed = True
        if not changed:
            return distance
    return None
