"""The proof of the job secret that opens every connection, before anything else is read from it.

A mutual challenge and response with HMAC-SHA256 (RFC 2104), in the manner of ISO/IEC 9798-4 and of SCRAM
(RFC 5802): both sides draw a nonce, and each sends a code over both nonces. All messages are short and of
fixed size, so a stranger costs about a hundred bytes::

    client  37 bytes  b"RUDA", version (u8), nonce (32); of this size in every version
    server  65 bytes  version (u8), nonce (32), HMAC(secret, b"server" nonces context)
    client  32 bytes  HMAC(secret, b"client" nonces context); zeros where the server's code is wrong
    server   1 byte   1 accepted, 0 refused

The labels keep a code from being sent back to its maker, the fresh nonces from being used again, and the
``context`` from being used for another purpose, such as another session's mesh. A code allows its receiver
to test guesses of the secret, so a secret that guards a network is long and random.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
import time
from typing import Any, TypeAlias

from ..errors import AuthenticationError, CollectiveTimeoutError, ProtocolError
from .job import Connection, Job, Secret

__all__ = [
    "VERSION",
    "Peer",
    "address_text",
    "authenticate",
    "peer_text",
    "prove",
    "read_exactly",
    "read_into",
    "write_all",
]

VERSION = 1

#: What a proof runs over.
Peer: TypeAlias = "socket.socket | Connection"

_MAGIC = b"RUDA"
_NONCE = 32
_MAC = 32
_LEAD = len(_MAGIC) + 1
_GIVEN_UP = bytes(_MAC)
_REFUSED, _ACCEPTED = b"\0", b"\1"
_SHOWN = 16
#: A TLS record that holds a client's greeting, and the one that says, in TLS, that nobody here speaks it:
#: a fatal alert, "protocol version" (RFC 8446, section 6).
_TLS_HELLO = b"\x16\x03"
_TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


async def authenticate(
    job: Job, sock: socket.socket, *, server: bool, context: bytes, deadline: float, name: str = ""
) -> Peer:
    """Secure a new connection, where the transport does so, and prove the job's secret over it.

    Args:
        name: for the client: the host that it dialled, as the URL or the peer calls it.

    Returns:
        What is to be used from here on: the socket itself, or what secures it.

    Raises:
        As `prove`; and `AuthenticationError` and `ProtocolError` for what is wrong with the security.
    """
    if job.secure is None:
        await prove(sock, job.secret, server=server, context=context, deadline=deadline)
        return sock
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            connection = await job.secure(sock, server, name)
    except TimeoutError:
        if not limit.expired():
            raise
        raise CollectiveTimeoutError(
            f"{peer_text(sock)} did not finish securing the connection before the deadline; it hangs, or it "
            "is another service"
        ) from None
    await prove(connection, job.secret, server=server, context=context, deadline=deadline)
    return connection


async def prove(sock: Peer, secret: Secret, *, server: bool, context: bytes, deadline: float) -> None:
    """Prove `secret` to the peer of a connection, and have the peer prove it.

    Either side leaves no byte of the connection read or written beyond the handshake. After an error or a
    cancellation the socket is of no further use and is the caller's to close.

    Args:
        sock: a connected, non-blocking socket, or a `Connection` over what is no socket.
        secret: any bytes; an empty one proves nothing, and whether it will do is for the caller to say.
        server: exactly one side is the server: the one that accepted the connection.
        context: what the connection is for; equal on both sides.
        deadline: `time.monotonic` seconds.

    Raises:
        AuthenticationError: the peer has another secret or another context.
        ProtocolError: the peer speaks something else, or another version.
        CollectiveTimeoutError: the deadline passed.
        ConnectionError: the peer closed the connection; other `OSError` as the socket raises them.
    """
    _check_user(sock)
    loop = asyncio.get_running_loop()
    side = _prove_as_server if server else _prove_as_client
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            await side(loop, sock, secret, context)
    except TimeoutError:
        if not limit.expired():  # ETIMEDOUT, from the network
            raise
        raise CollectiveTimeoutError(
            f"{peer_text(sock)} did not finish the proof of the job secret before the deadline; "
            "it hangs, or it is another service"
        ) from None


async def _prove_as_server(
    loop: asyncio.AbstractEventLoop, sock: Peer, secret: Secret, context: bytes
) -> None:
    lead = await read_exactly(loop, sock, _LEAD)
    if not lead.startswith(_MAGIC):
        if lead.startswith(_TLS_HELLO):
            with contextlib.suppress(OSError):
                await write_all(loop, sock, _TLS_ALERT)
            raise ProtocolError(
                f"{peer_text(sock)} speaks TLS, and this rank does not; use the same scheme on all ranks"
            )
        raise ProtocolError(
            f"{peer_text(sock)} sent {_first_bytes(sock, lead)!r}, which is not a ruda-async handshake"
        )
    theirs = await read_exactly(loop, sock, _NONCE)
    version = lead[-1]
    if version != VERSION:
        with contextlib.suppress(OSError):
            await write_all(loop, sock, bytes((VERSION,)))
        raise ProtocolError(
            f"{peer_text(sock)} speaks version {version} of the handshake and this rank version {VERSION}; "
            "install the same ruda-async on all ranks"
        )
    ours = os.urandom(_NONCE)
    nonces = theirs + ours
    code = _code(secret, b"server", nonces, context)
    await write_all(loop, sock, bytes((VERSION,)) + ours + code)
    proof = await read_exactly(loop, sock, _MAC)
    accepted = hmac.compare_digest(proof, _code(secret, b"client", nonces, context))
    if not accepted:
        refusal = _unproved(sock, secret)
        with contextlib.suppress(OSError):  # a client that gave up may be gone
            await write_all(loop, sock, _REFUSED)
        raise refusal
    await write_all(loop, sock, _ACCEPTED)


async def _prove_as_client(
    loop: asyncio.AbstractEventLoop, sock: Peer, secret: Secret, context: bytes
) -> None:
    ours = os.urandom(_NONCE)
    await write_all(loop, sock, _MAGIC + bytes((VERSION,)) + ours)
    lead = await read_exactly(loop, sock, 1)
    if lead[0] != VERSION:
        if lead == _TLS_ALERT[:1]:
            raise ProtocolError(
                f"{peer_text(sock)} speaks TLS, and this rank does not; use the same scheme on all ranks"
            )
        raise ProtocolError(
            f"{peer_text(sock)} answered {_first_bytes(sock, lead)!r}, and the handshake of this version "
            f"starts with {bytes((VERSION,))!r}: it is another service, or has another version of ruda-async"
        )
    answer = await read_exactly(loop, sock, _NONCE + _MAC)
    nonces = ours + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _code(secret, b"server", nonces, context)):
        refusal = _unproved(sock, secret)
        with contextlib.suppress(OSError):
            await write_all(loop, sock, _GIVEN_UP)  # so that the server learns it too
        raise refusal
    await write_all(loop, sock, _code(secret, b"client", nonces, context))
    verdict = await read_exactly(loop, sock, 1)
    if verdict != _ACCEPTED:
        raise _unproved(sock, secret)


def _check_user(sock: Peer) -> None:
    """On a Unix socket, the kernel says whose process the peer is: it has to be this user's."""
    if not isinstance(sock, socket.socket) or sock.family != getattr(socket, "AF_UNIX", None):
        return
    if not hasattr(socket, "SO_PEERCRED"):
        return
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user not in (os.getuid(), 0):
        raise AuthenticationError(f"{peer_text(sock)} is a process of user {user}, not of this one")


def _code(secret: Secret, label: bytes, nonces: bytes, context: bytes) -> bytes:
    # All parts but the last have one fixed length, so no two inputs run together to the same bytes.
    return hmac.digest(secret.reveal(), label + nonces + context, "sha256")


def _unproved(sock: Peer, secret: Secret) -> AuthenticationError:
    here = "" if secret else ", and it is not set on this one"
    return AuthenticationError(
        f"{peer_text(sock)} did not prove this job's secret; "
        f"check that RUDA_SECRET (or secret_file=) is the same on all ranks{here}"
    )


def _first_bytes(sock: Peer, lead: bytes) -> bytes:
    """`lead` and whatever else has come already, up to a few bytes, for an error text."""
    if not isinstance(sock, socket.socket):
        return lead
    try:
        return lead + sock.recv(_SHOWN - len(lead))
    except OSError:
        return lead


def peer_text(sock: Peer) -> str:
    """The peer's address for error texts."""
    try:
        return address_text(sock.getpeername())
    except OSError:  # not connected any more
        return "a peer"


def address_text(address: Any) -> str:
    """A socket address as people write it: ``host:port``, ``[v6]:port``, ``unix:path``, ``unix:@name``."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = os.fsdecode(address)
    return f"unix:{'@' + path[1:] if path.startswith(chr(0)) else path}" if path else "a unix socket"


async def read_exactly(loop: asyncio.AbstractEventLoop, sock: Peer, n: int) -> bytes:
    """The next `n` bytes of a non-blocking socket. `n` is the caller's to bound: it is allocated at once.

    A cancelled read may have taken bytes, so the stream cannot be read on after it.

    Raises:
        ConnectionError: the peer closed the connection first.
    """
    if not n:
        return b""
    if not isinstance(sock, socket.socket):
        data = bytearray(n)
        await read_into(loop, sock, memoryview(data))
        return bytes(data)
    begun = await loop.sock_recv(sock, n)
    if len(begun) == n:
        return begun  # nearly always, and without a copy
    if not begun:
        raise _closed(n)
    rest = memoryview(bytearray(n - len(begun)))
    await read_into(loop, sock, rest)
    return begun + rest


async def read_into(loop: asyncio.AbstractEventLoop, sock: Peer, view: memoryview) -> None:
    """Fill `view` (format ``B``) from a non-blocking socket; as `read_exactly`."""
    got = 0
    while got < len(view):
        rest = view[got:]
        if isinstance(sock, socket.socket):
            size = await loop.sock_recv_into(sock, rest)
        else:
            size = await sock.recv_into(rest)
        if not size:
            raise _closed(len(view) - got)
        got += size


async def write_all(loop: asyncio.AbstractEventLoop, sock: Peer, data: bytes) -> None:
    """Write all of `data` to a non-blocking socket.

    A cancelled write may have sent a part, so the stream cannot be written on after it.
    """
    if isinstance(sock, socket.socket):
        await loop.sock_sendall(sock, data)
    else:
        await sock.sendall(data)


def _closed(left: int) -> ConnectionError:
    return ConnectionResetError(f"the peer closed the connection with {left} bytes still to come")
