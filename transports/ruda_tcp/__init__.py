"""``tcp://`` and ``tcps://``: a full mesh of connections between ranks, one per pair, plain or by mutual TLS.

The mesh is dialled eagerly, before `connect` returns: every rank then notices at once when any other
dies, the first collective is as fast as the next, and set-up errors show at set-up. A job of *n* ranks
holds ``n-1`` sockets per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ruda_async.transport import (
    Capabilities,
    FramedParameters,
    FramedTransport,
    Job,
    Transport,
    in_thread,
    param,
)

__all__ = ["PLUGIN", "TLS_PLUGIN", "TcpParameters", "TcpPlugin", "TlsParameters", "TlsPlugin"]


@dataclass(frozen=True, slots=True)
class TcpParameters(FramedParameters):
    """Parameters of ``tcp://``."""

    eager_bytes: int = param(
        512 * 1024,
        doc="payloads up to this size leave without waiting for their receive",
        unit="bytes",
        minimum=0,
    )
    bind: str = param(
        "", doc="the local address to listen on for other ranks; by default the one that reaches rank 0"
    )
    socket_bytes: int = param(
        0,
        doc="size of the kernel's send and receive buffers per connection; 0 leaves them to it",
        unit="bytes",
        minimum=0,
    )
    congestion: str = param(
        "",
        doc="congestion control of the connections, by its name in the kernel; by default the system's, and "
        "within a host `reno`, which does not pace",
    )
    spin: float = param(
        -1.0,
        doc="how long a blocking call looks at the socket before it sleeps; -1 takes 100 µs where every rank "
        "of this host can have a core of its own, else 0",
        unit="s",
        minimum=-1,
        maximum=0.001,
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
        from .looking import spin_of
        from .mesh import dial_mesh
        from .socket_stream import SocketStream

        parameters: TcpParameters = job.parameters
        mesh, terms = await dial_mesh(job, parameters)
        sockets = mesh.sockets if mesh else {}
        spin = spin_of(parameters.spin, sockets)
        return FramedTransport(
            job,
            {peer: SocketStream(sock, spin) for peer, sock in sockets.items()},
            parameters,
            terms,
            Capabilities(
                eager_bytes=parameters.eager_bytes,
                segment_bytes=parameters.segment_bytes,
                latency=30e-6,
                bandwidth=3e9,
            ),
            facts={"scheme": self.scheme},
        )


@dataclass(frozen=True, slots=True)
class TlsParameters(TcpParameters):
    """Parameters of ``tcps://``. Files are PEM."""

    cert: Path | None = param(None, doc="the file of this rank's certificate, with its chain")  # noqa: RUF009
    key: Path | None = param(None, doc="the file of its key; by default in the same file")  # noqa: RUF009
    ca: Path | None = param(  # noqa: RUF009
        None, doc="the file of the certificates that sign those of all ranks; no others are trusted"
    )
    server_name: str = param(
        "", doc="the name that other ranks' certificates are for; by default the address that is dialled"
    )


class TlsPlugin:
    """The same over TLS 1.3, where both sides show certificates."""

    scheme = "tcps"
    summary = "TCP sockets encrypted by TLS 1.3, with certificates on both sides"
    parameters = TlsParameters
    rank_per = "process"
    example = "tcps://127.0.0.1:0"
    preference = 5
    needs = "certificates: cert=, key= and ca="

    def unavailable(self) -> str | None:
        """None where Python has TLS 1.3."""
        try:
            import ssl
        except ImportError:
            return "this Python was built without ssl; install one that has it"
        return None if ssl.HAS_TLSv1_3 else "its OpenSSL has no TLS 1.3; install a newer one"

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks at the URL's address and link up with each, all inside TLS."""
        from .looking import spin_of
        from .mesh import dial_mesh
        from .tls import Contexts, TlsConnection
        from .tls_stream import TlsStream

        parameters: TlsParameters = job.parameters
        contexts = await in_thread(lambda: Contexts(job, parameters))  # reads files
        mesh, terms = await dial_mesh(replace(job, secure=contexts.secure), parameters)
        streams = {}
        spin = spin_of(parameters.spin, mesh.sockets if mesh else {})
        for peer, connection in mesh.secured.items() if mesh else ():
            assert isinstance(connection, TlsConnection)
            streams[peer] = TlsStream(connection, spin)
        return FramedTransport(
            job,
            streams,
            parameters,
            terms,
            Capabilities(
                secure=True,
                eager_bytes=parameters.eager_bytes,
                segment_bytes=parameters.segment_bytes,
                latency=30e-6,
                bandwidth=1e9,
            ),
            facts={"scheme": self.scheme},
        )


PLUGIN = TcpPlugin()
TLS_PLUGIN = TlsPlugin()
