"""``memory://``: ranks as tasks of one event loop, or as threads that each have their own.

Small payloads are copied once, into the receive where one waits. Large ones are lent: the receiver copies
straight from the sender's memory, in slices between which the loop turns, and then lets the sender go.
"""

from __future__ import annotations

from dataclasses import dataclass

from ruda_async.transport import Capabilities, Job, Transport, param

from .hub import join
from .link import MemoryTransport

__all__ = ["PLUGIN", "MemoryParameters", "MemoryPlugin"]


@dataclass(frozen=True, slots=True)
class MemoryParameters:
    """Parameters of ``memory://``."""

    eager_bytes: int = param(
        64 * 1024,
        doc="payloads up to this size are copied at once; larger ones are lent",
        unit="bytes",
        minimum=0,
    )
    early_bytes: int = param(
        16 * 1024 * 1024,
        doc="bytes per peer that may wait for their receive before senders wait",
        unit="bytes",
        minimum=0,
    )


class MemoryPlugin:
    """The plugin object that the entry point names."""

    scheme = "memory"
    summary = "ranks as tasks or threads of one process"
    parameters = MemoryParameters
    rank_per = "task"
    example = "memory://example"
    preference = 0

    def unavailable(self) -> str | None:
        """Always usable."""
        return None

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks of this process under the job's name."""
        parameters: MemoryParameters = job.parameters
        transport = MemoryTransport(
            job.rank,
            job.world_size,
            job.name,
            Capabilities(
                shared_memory=True,
                eager_bytes=parameters.eager_bytes,
                segment_bytes=1024 * 1024,
                latency=5e-6,
                bandwidth=8e9,
            ),
            parameters.early_bytes,
        )
        await join(job, transport)
        return transport


PLUGIN = MemoryPlugin()
