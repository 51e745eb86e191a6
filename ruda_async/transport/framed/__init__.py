"""A transport over byte streams: everything but the bytes.

A plugin that has a stream to each peer (sockets, TLS, rings in shared memory) hands them to
`FramedTransport` and gets matching, early messages within a budget, large messages from and into the
callers' memory, exact cancellation, heartbeats and orderly close, as `Transport` asks for.
"""

from __future__ import annotations

from .activity import Looking, Spin, blocking
from .parameters import FramedParameters
from .stream import ByteStream, Terms
from .transport import FramedTransport

__all__ = ["ByteStream", "FramedParameters", "FramedTransport", "Looking", "Spin", "Terms", "blocking"]
