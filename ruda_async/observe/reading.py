"""Flight records back from their files, checked: they may come from other machines and versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .flight import FORMAT, VERSION

__all__ = ["Call", "Channel", "Record", "load"]


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel that was open on a rank: its members are job ranks, `next` the number of its next call."""

    name: str
    members: tuple[int, ...]
    next: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one rank.

    Attributes:
        rank: the job's rank that made it.
        channel: the channel's number.
        entered, finished: `time.monotonic` seconds of that rank's host; `finished` is None in flight.
        present: the group ranks that it knew to have entered, where it did not succeed.
        raw: the call as in the file.
    """

    rank: int
    channel: int
    channel_name: str
    operation: str
    sequence: int | None
    entered: float
    finished: float | None
    state: str
    outcome: str
    present: tuple[int, ...]
    raw: dict[str, Any]

    @property
    def label(self) -> str:
        """For people: ``all_reduce #118``."""
        if self.sequence is not None:
            return f"{self.operation} #{self.sequence}"
        way = "to" if self.operation == "send" else "from"
        return f"{self.operation} {way} rank {self.raw.get('peer')} (tag {self.raw.get('tag')})"


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's flight record."""

    source: str
    reason: str
    job: str
    rank: int
    world_size: int
    clock: str
    monotonic: float
    wall: float
    lost: dict[int, str]
    channels: dict[int, Channel]
    calls: tuple[Call, ...]


def load(paths: Iterable[str | Path]) -> list[Record]:
    """The latest record of each rank among the files, in rank order.

    Args:
        paths: files, or folders, of which all ``*.json`` are taken.

    Raises:
        ConfigError: a file cannot be read or is no flight record, or they are of several jobs.
    """
    latest: dict[int, Record] = {}
    jobs: dict[tuple[str, int], str] = {}
    for path in _files(paths):
        record = _read(path)
        jobs.setdefault((record.job, record.world_size), record.source)
        if record.rank not in latest or latest[record.rank].wall < record.wall:
            latest[record.rank] = record
    if not latest:
        raise ConfigError("no flight records were given; name the *.json files of all ranks")
    if len(jobs) > 1:
        listed = ", ".join(f"{name!r} of {size} ranks ({source})" for (name, size), source in jobs.items())
        raise ConfigError(f"these records are of several jobs: {listed}; give those of one")
    return [latest[rank] for rank in sorted(latest)]


def _files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.json"))
        if not inside:
            raise ConfigError(f"the folder {path} has no *.json; name the one that trace_dir= named")
        yield from inside


def _read(path: Path) -> Record:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(f'{path} is no flight record; they have "format": {FORMAT!r}')
    if raw.get("version") != VERSION:
        raise ConfigError(
            f"{path} is a flight record of version {raw.get('version')!r}, and this ruda-async reads "
            f"version {VERSION}; use the one that wrote it"
        )
    try:
        rank = int(raw["rank"])
        clock = raw["clock"]
        return Record(
            source=str(path),
            reason=str(raw["reason"]),
            job=str(raw["job"]),
            rank=rank,
            world_size=int(raw["world_size"]),
            clock=str(clock["id"]),
            monotonic=float(clock["monotonic"]),
            wall=float(clock["wall"]),
            lost={int(peer): str(text) for peer, text in raw["lost"].items()},
            channels={
                int(c["id"]): Channel(str(c["name"]), tuple(map(int, c["members"])), int(c["next"]))
                for c in raw["channels"]
            },
            calls=tuple(_call(rank, call) for call in raw["operations"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is a damaged flight record: {type(error).__name__} at {error}") from None


def _call(rank: int, raw: dict[str, Any]) -> Call:
    finished = raw["finished"]
    return Call(
        rank=rank,
        channel=int(raw["channel"]),
        channel_name=str(raw["channel_name"]),
        operation=str(raw["operation"]),
        sequence=int(raw["sequence"]) if "sequence" in raw else None,
        entered=float(raw["entered"]),
        finished=None if finished is None else float(finished),
        state=str(raw["state"]),
        outcome=str(raw.get("outcome", "")),
        present=tuple(map(int, raw.get("present", ()))),
        raw=raw,
    )
