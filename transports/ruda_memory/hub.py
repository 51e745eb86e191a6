"""How ranks of one process find each other: by job name, in a table that all threads share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from ruda_async.transport import CollectiveTimeoutError, ConfigError, Job

if TYPE_CHECKING:
    from .link import MemoryTransport

__all__ = ["join"]


class _Gathering:
    """A job whose ranks are still coming."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.members: dict[int, tuple[MemoryTransport, asyncio.Future[None]]] = {}

    def finish(self, error: Exception | None = None) -> None:
        """Wake every rank that waits, each on its own loop."""
        for transport, arrived in self.members.values():
            _call(transport.loop, _settle, arrived, error)


def _settle(arrived: asyncio.Future[None], error: Exception | None) -> None:
    if arrived.done():
        return
    if error is None:
        arrived.set_result(None)
    else:
        arrived.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, function: object, *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]
    except RuntimeError:
        pass  # that rank's loop is gone; its own connect was cancelled with it


_lock = threading.Lock()
_gatherings: dict[str, _Gathering] = {}


async def join(job: Job, transport: MemoryTransport) -> None:
    """Wait until every rank of `job` is here, then link them all.

    Raises:
        ConfigError: this rank number is taken, or ranks disagree about the world size.
        CollectiveTimeoutError: some ranks did not come before the deadline.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    with _lock:
        gathering = _gatherings.get(job.name)
        if gathering is None:
            gathering = _gatherings[job.name] = _Gathering(job.name, job.world_size)
        if gathering.world_size != job.world_size:
            error = ConfigError(
                f"rank {job.rank} joins job {job.name!r} with world_size={job.world_size}, but "
                f"rank {min(gathering.members)} came with world_size={gathering.world_size}; "
                "give all ranks the same",
                rank=job.rank,
            )
            del _gatherings[job.name]
            gathering.finish(error)
            raise error
        if job.rank in gathering.members:
            raise ConfigError(
                f"job {job.name!r} has a rank {job.rank} already; give every rank its own number",
                rank=job.rank,
            )
        gathering.members[job.rank] = (transport, arrived)
        if len(gathering.members) == job.world_size:
            del _gatherings[job.name]  # the name is free for the next job at once
            peers = {rank: member for rank, (member, _) in gathering.members.items()}
            for member in peers.values():
                member.link(peers)
            gathering.finish()
    try:
        async with asyncio.timeout(job.remaining()):
            await arrived
    except TimeoutError:
        missing = tuple(r for r in range(job.world_size) if r not in gathering.members)
        raise CollectiveTimeoutError(
            f"rank {job.rank} of job {job.name!r}: ranks {', '.join(map(str, missing))} of {job.world_size} "
            f"did not come within timeout={job.timeout:g} s; start them, or raise timeout=",
            missing=missing,
        ) from None
    finally:
        with _lock:
            if _gatherings.get(job.name) is gathering:
                gathering.members.pop(job.rank, None)
                if not gathering.members:
                    del _gatherings[job.name]
