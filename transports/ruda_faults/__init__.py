"""``faults+<transport>://``: any transport, and the faults of a bad network or a dying host around it.

Two layers, as faults have two natures. `FaultyTransport` delays, slows down, reorders, stalls and kills by
whole messages, around any transport. `FaultyStream` damages, cuts and silences by bytes, between a transport
and its streams, so that what is tested is how real bytes are read. Every choice comes from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ruda_async.transport import (
    ConfigError,
    Job,
    Plugin,
    Transport,
    extract_parameters,
    merge_parameters,
    param,
)

__all__ = ["PLUGIN", "FaultParameters", "FaultsPlugin"]


@dataclass(frozen=True, slots=True)
class FaultParameters:
    """Parameters of ``faults+…://``, beside those of the transport inside."""

    seed: int = param(0, doc="where the random choices start; rank and peer are added to it", minimum=0)
    only_rank: int | None = param(None, doc="the rank that has the faults; by default every rank", minimum=0)
    delay_ms: float = param(
        0.0, doc="how much later each message leaves", unit="ms", minimum=0, maximum=3_600_000
    )
    jitter_ms: float = param(
        0.0,
        doc="up to so much later still, chosen for each message",
        unit="ms",
        minimum=0,
        maximum=3_600_000,
    )
    bandwidth: int = param(
        0, doc="payload per second that leaves for each peer; 0 is no limit", unit="bytes", minimum=0
    )
    reorder: bool = param(False, doc="messages of different tags overtake each other as their jitter has it")
    stall_after: int | None = param(
        None, doc="messages after which this rank sends no more, though it lives", minimum=0
    )
    kill_after: int | None = param(
        None, doc="messages after which this rank's process dies; needs only_rank", minimum=0
    )
    drop_after: int | None = param(
        None, doc="bytes to a peer after which the connection to it is cut", minimum=0
    )
    silence_after: int | None = param(
        None, doc="bytes to a peer after which nothing passes, either way, and nobody is told", minimum=0
    )
    corrupt_after: int | None = param(
        None, doc="bytes to a peer after which the next one has a bit flipped", minimum=0
    )
    corrupt_rate: float = param(0.0, doc="the share of bytes that have a bit flipped", minimum=0, maximum=1)
    duplicate: bool = param(False, doc="dial every lower rank a second time")

    @property
    def by_bytes(self) -> list[str]:
        """The faults asked for that need a stream of bytes."""
        names = ("drop_after", "silence_after", "corrupt_after")
        found = [name for name in names if getattr(self, name) is not None]
        return [*found, "corrupt_rate"] if self.corrupt_rate else found


class FaultsPlugin:
    """The wrapper that the entry point names."""

    scheme = "faults"
    summary = "delay, loss, damage and death around any other transport"
    parameters = FaultParameters
    wraps: Literal[True] = True

    def unavailable(self) -> str | None:
        """Always usable."""
        return None

    def wrap(self, inner: Plugin) -> Plugin:
        """The plugin of ``faults+inner``."""
        return _Faulty(inner)


class _Faulty:
    """One transport with faults around it."""

    def __init__(self, inner: Plugin) -> None:
        self._inner = inner
        self.scheme = f"{PLUGIN.scheme}+{inner.scheme}"
        self.summary = f"{PLUGIN.summary}: {inner.summary}"
        self.parameters: type[Any] = merge_parameters(self.scheme, FaultParameters, inner.parameters)
        self.rank_per = inner.rank_per
        self.example = f"{PLUGIN.scheme}+{inner.example}"
        self.preference = inner.preference

    def unavailable(self) -> str | None:
        """What the transport inside says."""
        return self._inner.unavailable()

    async def connect(self, job: Job) -> Transport:
        """Join by the transport inside, with faults at its streams and around it."""
        from .stream import FaultyStream
        from .transport import FaultyTransport

        faults = extract_parameters(FaultParameters, job.parameters)
        _check(job, faults)
        inner = replace(job, parameters=extract_parameters(self._inner.parameters, job.parameters))
        # What transports are like has to look the same on all ranks: algorithms are chosen by it.
        declared = faults
        if faults.only_rank not in (None, job.rank):
            faults = FaultParameters()
        streams = {}
        if faults.by_bytes:

            def wrap(peer: int, stream: Any) -> FaultyStream:
                streams[peer] = FaultyStream(stream, faults, job.rank, peer)
                return streams[peer]

            inner = replace(inner, wrap_stream=wrap)
        if faults.duplicate:
            inner = replace(inner, extra_dials=1)
        transport = await self._inner.connect(inner)
        if faults.by_bytes and len(streams) < job.world_size - 1:
            names = ", ".join(faults.by_bytes)
            transport.abort(f"{names} cannot be had")
            raise ConfigError(
                f"rank {job.rank}: {names} acts on streams of bytes, and {self._inner.scheme}:// has none; "
                f"leave {names} out, or take another transport"
            )
        return FaultyTransport(
            transport, faults, declared, scheme=self.scheme, own_process=self.rank_per == "process"
        )


def _check(job: Job, faults: FaultParameters) -> None:
    if faults.only_rank is not None and faults.only_rank >= job.world_size:
        raise ConfigError(
            f"only_rank={faults.only_rank} is outside a job of world_size={job.world_size}; ranks count from "
            f"0 to {job.world_size - 1}"
        )
    if faults.kill_after is not None and faults.only_rank is None:
        raise ConfigError(
            f"kill_after={faults.kill_after} would kill every rank; say which one by only_rank="
        )
    if faults.reorder and not faults.jitter_ms:
        raise ConfigError("reorder=true does nothing without jitter; give jitter_ms= too")


PLUGIN = FaultsPlugin()
