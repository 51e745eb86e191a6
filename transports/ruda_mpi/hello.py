"""How the ranks of a job find out that all of them are there, before any of them blocks in MPI.

To make a communicator, MPI wants all ranks at once and waits for ever. So ranks greet each other first, with
messages that may time out, on a tag of ``COMM_WORLD`` that follows from the job's name. A greeting may be
left over from an attempt that failed; an answer repeats the greeting's number, so it shows that its
sender is there now.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import Any

import msgpack
from mpi4py import MPI

from ruda_async.transport import CollectiveTimeoutError, ConfigError, Job, ProtocolError, Terms, check_alike

from .engine import keep_requests

__all__ = ["greet"]

_LARGEST = 1024
#: Seconds between two looks for greetings.
_NAP = 1e-3
#: By tag and rank: greetings that came just as an attempt failed. They are of that rank's next attempt, which
#: does not repeat them.
_unread: dict[tuple[int, int], list[bytes]] = {}


async def greet(job: Job, terms: Terms) -> tuple[dict[int, Terms], int]:
    """Wait for all ranks of `job`.

    Returns:
        the other ranks' terms, and a number of 64 bits that rank 0 has drawn for this meeting.

    Raises:
        ConfigError: a rank has another idea of the world size, or of `Job.alike`.
        CollectiveTimeoutError: some ranks did not come in time; they are in ``.missing``.
    """
    world = MPI.COMM_WORLD
    highest: int = world.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
    tag = highest - int.from_bytes(hashlib.sha256(job.name.encode()).digest()[:2], "big")
    number = secrets.randbits(64) | 1
    mine = msgpack.packb(["hello", job.name, job.world_size, job.alike or "", *_pack(terms), number])
    others = [rank for rank in range(job.world_size) if rank != job.rank]
    rooms = {rank: bytearray(_LARGEST) for rank in others}
    receives = {rank: world.Irecv([rooms[rank], MPI.BYTE], rank, tag) for rank in others}
    sends = [(world.Isend([mine, MPI.BYTE], rank, tag), mine) for rank in others]
    told: dict[int, tuple[Terms, int]] = {}
    missing = set(others)
    status = MPI.Status()

    def hear(rank: int, data: bytes) -> None:
        kind, *rest = _read(data, rank)
        if kind == "hello":
            told[rank] = _checked(job, rank, rest)
            answer = msgpack.packb(["here", told[rank][1]])
            sends.append((world.Isend([answer, MPI.BYTE], rank, tag), answer))
        elif rest == [number] and rank in told:
            missing.discard(rank)

    try:
        for rank in others:
            for data in _unread.pop((tag, rank), ()):
                hear(rank, data)
        while missing:
            heard = False
            for rank in list(receives):
                if not receives[rank].Test(status):
                    continue
                heard = True
                del receives[rank]  # it is over, and what follows may fail
                hear(rank, bytes(rooms[rank][: status.Get_count(MPI.BYTE)]))
                if rank in missing:
                    receives[rank] = world.Irecv([rooms[rank], MPI.BYTE], rank, tag)
            if not heard:
                await asyncio.sleep(_NAP)
                _look_at_clock(job, missing)
    finally:
        for rank, request in receives.items():
            request.Cancel()
            request.Wait(status)  # at once, after that
            if not status.Is_cancelled():
                _unread.setdefault((tag, rank), []).append(bytes(rooms[rank][: status.Get_count(MPI.BYTE)]))
        keep_requests(sends)
    first = number if job.rank == 0 else told[0][1]
    return {rank: terms for rank, (terms, _) in told.items()}, first


def _look_at_clock(job: Job, missing: set[int]) -> None:
    try:
        job.remaining()
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(
            f"{error} (no greeting from rank {', '.join(map(str, sorted(missing)))})",
            rank=job.rank,
            missing=tuple(sorted(missing)),
        ) from None


def _pack(terms: Terms) -> tuple[int, int]:
    return terms.eager_bytes, terms.early_bytes


def _read(data: bytes, rank: int) -> list[Any]:
    try:
        fields = msgpack.unpackb(data, max_str_len=_LARGEST, max_array_len=8)
        sizes = {"hello": (str, int, str, int, int, int), "here": (int,)}
        kinds = tuple(type(field) for field in fields[1:])
        if kinds != sizes[fields[0]] or not all(f >= 0 for f in fields[1:] if type(f) is int):
            raise ValueError
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException):
        raise ProtocolError(f"rank {rank} sent no greeting on the tag of this job", rank=rank) from None
    return list(fields)


def _checked(job: Job, rank: int, fields: list[Any]) -> tuple[Terms, int]:
    name, size, alike, eager, early, number = fields
    for what, ours, other in (("job name", job.name, name), ("world_size", job.world_size, size)):
        if ours != other:
            raise ConfigError(
                f"rank {job.rank} has the {what} {ours!r} and rank {rank} has {other!r}; give all ranks one"
            )
    check_alike({job.rank: job.alike or "", rank: alike})
    return Terms(eager, early), number
