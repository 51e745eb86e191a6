"""``tcp://``: a full mesh of connections between ranks, one per pair.

The mesh is dialled eagerly, before `connect` returns: every rank then notices at once when any other
dies, the first collective is as fast as the next, and set-up errors show at set-up. A job of *n* ranks
holds ``n-1`` sockets per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ruda_async.transport import Capabilities, FramedParameters, FramedTransport, Job, Transport, param

__all__ = ["PLUGIN", "TcpParameters", "TcpPlugin"]


@dataclass(frozen=True, slots=True)
class TcpParameters(FramedParameters):
    """Parameters of ``tcp://``."""

    bind: str = param(
        "", doc="the local address to listen on for other ranks; by default the one that reaches rank 0"
    )
    socket_bytes: int = param(
        0,
        doc="size of the kernel's send and receive buffers per connection; 0 leaves them to it",
        unit="bytes",
        minimum=0,
    )


class TcpPlugin:
    """The plugin object that the entry point names."""

    scheme = "tcp"
    summary = "TCP sockets, IPv4 and IPv6, one connection per pair of ranks"
    parameters = TcpParameters
    rank_per = "process"
    example = "tcp://127.0.0.1:0"
    preference = 10
    reach = "network"

    def unavailable(self) -> str | None:
        """Always usable where there are sockets."""
        return None

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks at the URL's address and link up with each."""
        from .mesh import dial_mesh
        from .socket_stream import SocketStream

        parameters: TcpParameters = job.parameters
        sockets, terms = await dial_mesh(job, parameters)
        return FramedTransport(
            job,
            {peer: SocketStream(sock) for peer, sock in sockets.items()},
            parameters,
            terms,
            Capabilities(
                eager_bytes=parameters.eager_bytes,
                segment_bytes=parameters.segment_bytes,
                latency=20e-6,
                bandwidth=2e9,
            ),
            facts={"scheme": self.scheme},
        )


PLUGIN = TcpPlugin()
