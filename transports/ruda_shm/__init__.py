"""``shm://job``: ranks on one host that exchange bytes through shared memory.

Every pair of ranks shares one anonymous memory file with a ring of bytes each way, and a Unix socket as
the doorbell. The file is made by ``memfd_create`` and handed over on that socket, so it has no name:
nothing can stay behind in ``/dev/shm``, however the ranks end, and no tracker has to clean up. The kernel
frees it with the last process that maps it; and it closes the socket of a process that dies, which the
peer's event loop notices at once.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ruda_async.transport import Capabilities, FramedParameters, FramedTransport, Job, Transport, param

__all__ = ["PLUGIN", "ShmParameters", "ShmPlugin"]


@dataclass(frozen=True, slots=True)
class ShmParameters(FramedParameters):
    """Parameters of ``shm://``."""

    ring_bytes: int = param(
        0,
        doc="shared memory per pair and direction, a power of two; 0 takes 1 MiB, less for more than 8 ranks",
        unit="bytes",
        minimum=0,
        maximum=1 << 30,
    )
    spin: float = param(
        -1.0,
        doc="how long a waiting rank looks at the ring before it sleeps; -1 takes 20 µs, and in blocking "
        "calls 100 µs, where every rank can have a core of its own, else 0",
        unit="s",
        minimum=-1,
        maximum=0.001,
    )


class ShmPlugin:
    """The plugin object that the entry point names."""

    scheme = "shm"
    summary = "shared memory between processes of one host"
    parameters = ShmParameters
    rank_per = "process"
    example = "shm://example"
    preference = 20
    reach = "host"

    def unavailable(self) -> str | None:
        """None on Linux; elsewhere what is missing."""
        if not hasattr(os, "memfd_create") or not hasattr(socket, "AF_UNIX"):
            return "needs Linux (anonymous memory files and Unix sockets); use tcp on one host instead"
        return None

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks of this host under the job's name and link up with each."""
        from .pairs import open_pairs

        parameters: ShmParameters = job.parameters
        streams, terms, regions = await open_pairs(job, parameters)
        transport = FramedTransport(
            job,
            streams,
            parameters,
            terms,
            Capabilities(
                shared_memory=True,
                eager_bytes=parameters.eager_bytes,
                segment_bytes=parameters.segment_bytes,
                latency=10e-6,
                bandwidth=4e9,
            ),
            facts={"scheme": self.scheme},
            regions=regions,
        )
        regions.no_goodbye = transport.no_goodbye
        return transport


PLUGIN = ShmPlugin()
