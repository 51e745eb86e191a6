"""Mutual TLS for the connections of ``tcps://``: contexts, the handshake, and what its errors mean.

TLS runs over memory buffers (`ssl.MemoryBIO`), so the socket stays a plain non-blocking one. The handshake's
signatures take up to milliseconds, so they are made on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ruda_async.transport import (
    AuthenticationError,
    ConfigError,
    Job,
    ProtocolError,
    RudaError,
    address_text,
    in_thread,
)

if TYPE_CHECKING:
    from . import TlsParameters

__all__ = ["RECORD", "Contexts", "TlsConnection", "damage"]

#: The most that one TLS record holds, and so what is encrypted at once.
RECORD = 16 * 1024
#: A fatal alert, "unexpected message" (RFC 8446, section 6): a plain rank knows by it whom it talks to.
_ALERT = b"\x15\x03\x03\x00\x02\x02\x0a"
#: How OpenSSL names what a peer says that found something wrong with our certificate.
_CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "HANDSHAKE_FAILURE", "DECRYPT_ERROR")


class Contexts:
    """This rank's certificate and whom it trusts, for either side of a connection."""

    def __init__(self, job: Job, parameters: TlsParameters) -> None:
        cert, ca = parameters.cert, parameters.ca
        if cert is None or ca is None:
            lacking = " and ".join(f"{n}=" for n, v in (("cert", cert), ("ca", ca)) if v is None)
            raise ConfigError(
                f"rank {job.rank}: tcps:// needs {lacking}: the paths of this rank's certificate (PEM, with "
                "its chain) as cert=, of its key as key= unless it is in the same file, and of the "
                "certificates that sign those of all ranks as ca="
            )
        self._name = parameters.server_name
        self.server = self._context(job, ssl.PROTOCOL_TLS_SERVER, cert, parameters.key, ca)
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.server.num_tickets = 0  # nobody resumes
        self.client = self._context(job, ssl.PROTOCOL_TLS_CLIENT, cert, parameters.key, ca)

    def _context(self, job: Job, side: int, cert: Path, key: Path | None, ca: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        at = f"ca={str(ca)!r}"
        try:
            context.load_verify_locations(ca)
            at = f"cert={str(cert)!r}" + (f", key={str(key)!r}" if key else "")
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise ConfigError(
                f"rank {job.rank}: {at} cannot be used: {reason}; give paths of PEM files"
            ) from None
        return context

    async def secure(self, sock: socket.socket, server: bool, name: str) -> TlsConnection:
        """See `ruda_async.transport.Job.secure`."""
        connection = TlsConnection(
            sock,
            self.server if server else self.client,
            None if server else self._name or name or "127.0.0.1",
        )
        await connection.handshake()
        return connection


def _no_password() -> NoReturn:
    """Without this, OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted; give one without a password, in a file that only its owner reads")


class TlsConnection:
    """TLS over a connected, non-blocking socket while ranks link up; see `ruda_async.transport.Connection`.

    Attributes:
        sock, tls, incoming, outgoing: for who goes on with the connection. `incoming` may hold records that
            were read and not decrypted yet.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self.incoming, self.outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._name = server_name
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()

    async def handshake(self) -> None:
        """Agree on keys, and check the peer's certificate.

        Raises:
            AuthenticationError: either side does not trust the other's certificate.
            ProtocolError: the peer speaks something else than TLS.
            ConnectionError: it closed the connection.
        """
        while True:
            try:
                await in_thread(self.tls.do_handshake)
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more("in the middle of the TLS handshake")
            except ssl.SSLError as error:
                if not self.outgoing.pending:  # what came was no TLS at all, and OpenSSL does not answer it
                    self.outgoing.write(_ALERT)
                with contextlib.suppress(OSError):
                    await self._flush()  # the alert that tells the peer
                raise self._explained(error) from None
        await self._flush()

    async def recv_into(self, view: memoryview) -> int:
        """See `Connection.recv_into`."""
        while True:
            try:
                return self.tls.read(len(view), view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more("")
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                raise self._explained(error) from None

    async def _more(self, where: str) -> None:
        data = await self._loop.sock_recv(self.sock, RECORD)
        if not data:
            raise ConnectionResetError(f"the peer closed the connection {where}".strip())
        self.incoming.write(data)

    async def sendall(self, data: bytes) -> None:
        """See `Connection.sendall`."""
        view = memoryview(data)
        while view:
            view = view[self.tls.write(view) :]
        await self._flush()

    async def _flush(self) -> None:
        """Send what is encrypted, in order whoever asks."""
        async with self._writing:
            data = self.outgoing.read()
            if data:
                await self._loop.sock_sendall(self.sock, data)

    def getpeername(self) -> Any:
        """The peer's address."""
        return self.sock.getpeername()

    def _explained(self, error: ssl.SSLError) -> RudaError:
        try:
            peer = address_text(self.getpeername())
        except OSError:  # not connected any more
            peer = "a peer"
        if isinstance(error, ssl.SSLCertVerificationError):
            asked = f" (asked for {self._name!r})" if self._name else ""
            return AuthenticationError(
                f"the certificate of {peer} is not accepted here{asked}: {error.verify_message.rstrip('.')}; "
                "check cert= there, and ca= and server_name= here"
            )
        reason = error.reason or str(error)
        text = reason.lower().replace("_", " ")
        if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
            return AuthenticationError(f"{peer} has no certificate; give it cert= and key=")
        if "ALERT" in reason and any(word in reason for word in _CERTIFICATE_ALERTS):
            return AuthenticationError(
                f"{peer} does not accept this rank's certificate ({text}); check cert= here, and ca= and "
                "server_name= there"
            )
        return ProtocolError(
            f"{peer} does not speak TLS as this rank does ({text}); use the same scheme on all ranks"
        )


def damage(error: ssl.SSLError) -> ProtocolError:
    """What to raise for records that were encrypted right once and do not decrypt."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return ProtocolError(f"its TLS records are damaged ({reason})")
