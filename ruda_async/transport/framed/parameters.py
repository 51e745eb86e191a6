"""The URL parameters that all transports over byte streams share."""

from __future__ import annotations

from dataclasses import dataclass

from ..parameters import param
from .stream import Terms

__all__ = ["FramedParameters"]


@dataclass(frozen=True, slots=True)
class FramedParameters:
    """To be extended by a plugin's own parameters."""

    heartbeat: float = param(
        10.0,
        doc="a peer that is silent for one and a half of these is lost; 0 turns it off",
        unit="s",
        minimum=0,
        alike=True,
    )
    eager_bytes: int = param(
        64 * 1024,
        doc="payloads up to this size leave without waiting for their receive",
        unit="bytes",
        minimum=0,
    )
    early_bytes: int = param(
        16 * 1024 * 1024,
        doc="bytes per peer that may wait here for their receive before the sender has to wait",
        unit="bytes",
        minimum=4096,
    )
    segment_bytes: int = param(
        1024 * 1024,
        doc="the size to which pipelined algorithms cut large messages",
        unit="bytes",
        minimum=1024,
    )
    checksum: bool = param(False, doc="payloads carry a CRC-32 too, as heads always do", alike=True)
    linger: float = param(
        2.0, doc="how long close() waits for a peer that does not answer the goodbye", unit="s", minimum=0
    )

    @property
    def terms(self) -> Terms:
        """What the other ranks have to know of these."""
        return Terms(self.eager_bytes, self.early_bytes)
