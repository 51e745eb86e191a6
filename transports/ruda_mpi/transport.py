"""Joining a job over MPI: a communicator of its own, a stream to each peer, and the provider."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ruda_async.transport import (
    Capabilities,
    CollectiveTimeoutError,
    ConfigError,
    FramedTransport,
    Job,
    in_thread,
)

from .engine import keep, purge, world
from .hello import greet
from .provider import MpiProvider
from .pump import Pump
from .stream import MpiStream

if TYPE_CHECKING:
    from . import MpiParameters

__all__ = ["MpiTransport", "open_transport"]


async def open_transport(job: Job, parameters: MpiParameters, capabilities: Capabilities) -> MpiTransport:
    """Join `job`.

    Raises:
        ConfigError: rank or world size are not MPI's.
        CollectiveTimeoutError: some ranks did not come in time.
        TransportUnavailableError: MPI cannot be used here.
    """
    everyone = world()
    rank, size = everyone.Get_rank(), everyone.Get_size()
    if job.rank != rank or job.world_size > size:
        raise ConfigError(
            f"rank {job.rank} of {job.world_size} was asked for, and MPI has placed this process as rank "
            f"{rank} of {size}; leave rank and world_size out (a smaller world_size means the first), and "
            f"start the processes with mpiexec -n {job.world_size}"
        )
    purge()
    terms, number = await greet(job, parameters.terms)
    group = everyone.Get_group().Incl(range(job.world_size))
    tag = number % everyone.Get_attr(MPI.TAG_UB)
    try:
        async with asyncio.timeout(job.remaining()):
            communicator = await in_thread(lambda: everyone.Create_group(group, tag))
    except TimeoutError:
        raise CollectiveTimeoutError(
            f"rank {rank} of {job.world_size}: all ranks of job {job.name!r} were there, but MPI did not "
            f"make their communicator within timeout={job.timeout:g} s; see that no rank has died",
            rank=rank,
        ) from None
    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiTransport(job, parameters, capabilities, communicator, terms)


class MpiTransport(FramedTransport):
    """Framed links over MPI messages, and MPI's collectives."""

    def __init__(
        self,
        job: Job,
        parameters: MpiParameters,
        capabilities: Capabilities,
        communicator: Any,
        terms: dict[int, Any],
    ) -> None:
        pump = Pump(asyncio.get_running_loop(), parameters.spin, parameters.idle_poll)
        streams = {
            rank: MpiStream(communicator, rank, pump, parameters.chunk_bytes)
            for rank in range(job.world_size)
            if rank != job.rank
        }
        library = MPI.Get_library_version().splitlines()[0].strip().rstrip("\0")
        super().__init__(
            job, streams, parameters, terms, capabilities, facts={"scheme": "mpi", "library": library}
        )
        self._streams = list(streams.values())
        self._pump = pump
        self._communicator = communicator
        self._provider = MpiProvider(communicator, pump, parameters.native_bytes)
        self.providers = (self._provider,)

    async def close(self) -> None:
        """See `Transport.close`."""
        try:
            await super().close()
        finally:
            self._release()

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        super().abort(reason)
        self._release()

    def _release(self) -> None:
        self._pump.stop()
        self._provider.close()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            streams = self._streams

            def drained() -> bool:
                if not all(stream.drained() for stream in streams):
                    return False
                communicator.Free()
                return True

            keep(drained)
        purge()
