"""``tcp://``: a full mesh of connections between ranks, one per pair.

The mesh is dialled eagerly, before `connect` returns: every rank then notices at once when any other
dies, the first collective is as fast as the next, and set-up errors show at set-up. A job of *n* ranks
holds ``n-1`` sockets per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ruda_async.transport import Capabilities, FramedTransport, Job, Terms, Transport, param

__all__ = ["PLUGIN", "TcpParameters", "TcpPlugin"]


@dataclass(frozen=True, slots=True)
class TcpParameters:
    """Parameters of ``tcp://``."""

    heartbeat: float = param(
        10.0,
        doc="a peer that is silent for one and a half of these is lost; 0 turns it off",
        unit="s",
        minimum=0,
    )
    bind: str = param(
        "", doc="the local address to listen on for other ranks; by default the one that reaches rank 0"
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
    socket_bytes: int = param(
        0,
        doc="size of the kernel's send and receive buffers per connection; 0 leaves them to it",
        unit="bytes",
        minimum=0,
    )
    linger: float = param(
        2.0, doc="how long close() waits for a peer that does not answer the goodbye", unit="s", minimum=0
    )


class TcpPlugin:
    """The plugin object that the entry point names."""

    scheme = "tcp"
    summary = "TCP sockets, IPv4 and IPv6, one connection per pair of ranks"
    parameters = TcpParameters
    rank_per = "process"
    example = "tcp://127.0.0.1:0"
    preference = 10

    def unavailable(self) -> str | None:
        """Always usable where there are sockets."""
        return None

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks at the URL's address and link up with each."""
        from .mesh import dial_mesh
        from .socket_stream import SocketStream

        parameters: TcpParameters = job.parameters
        ours = Terms(parameters.eager_bytes, parameters.early_bytes)
        sockets, terms = await dial_mesh(job, parameters, ours)
        return FramedTransport(
            job,
            {peer: SocketStream(sock) for peer, sock in sockets.items()},
            ours,
            terms,
            Capabilities(
                eager_bytes=parameters.eager_bytes,
                segment_bytes=parameters.segment_bytes,
                latency=20e-6,
                bandwidth=2e9,
            ),
            heartbeat=parameters.heartbeat,
            linger=parameters.linger,
            facts={"scheme": self.scheme},
        )


PLUGIN = TcpPlugin()
