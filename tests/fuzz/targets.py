"""What is fuzzed: each target takes any bytes and raises nothing, unless there is a fault to report.

A target calls one reader of untrusted bytes. Errors that the reader documents are its answer; any other
exception, and memory out of proportion to what came, is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from ruda_tcp.mesh import _Peer

from ruda_async import notices
from ruda_async.errors import AuthenticationError, ConfigError, PeerLostError, ProtocolError, RudaError
from ruda_async.notices import OF_NODES
from ruda_async.rendezvous.records import Join, refused_error
from ruda_async.transport import Pulse, Terms, wire
from ruda_async.transport.base import UnexpectedMessage, never_stale
from ruda_async.transport.framed.activity import activity_of
from ruda_async.transport.framed.link import Link
from ruda_async.transport.handshake import prove
from ruda_async.transport.job import Secret
from ruda_async.url import split_url

__all__ = ["CORPUS_SEEDS", "TARGETS"]

_LIMIT = 1 << 16


class _Bytes:
    """A stream that gives `data` and takes everything."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.closed = False

    def write(self, buffers: Any) -> int:
        return sum(len(b) for b in buffers)

    def read_into(self, buffer: memoryview) -> int:
        size = min(len(buffer), len(self.data))
        buffer[:size] = self.data[:size]
        self.data = self.data[size:]
        return size

    def await_bytes(self) -> bool:
        return True

    def on_readable(self, callback: Callable[[], None]) -> None:
        pass

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def describe(self) -> str:
        return "fuzz"


_loop = asyncio.new_event_loop()


def link(data: bytes) -> None:
    """Frames from a peer that proved the secret: two receives wait, and everything else is early.

    The first byte says whether payloads have to have checksums.
    """
    stream = _Bytes(data[1:])
    terms = Terms(eager_bytes=256, early_bytes=4096)
    checksum = bool(data[:1] > b"\x7f")
    one = Link(1, stream, terms, terms, _loop, activity_of(_loop), never_stale, Pulse(_loop, 10), checksum)
    small, large = bytearray(8), bytearray(1000)
    one.receiver.recv_into(3, (memoryview(small),), b"")
    one.receiver.recv_into(4, (memoryview(large[:500]), memoryview(large)[500:]), b"h")
    for _ in range(1000):
        if one.over.done():
            break
        one.receiver.read()
    if not one.over.done():
        raise AssertionError("a stream that is at its end goes on")
    if one.receiver.early_bytes > terms.early_bytes:
        raise AssertionError(f"{one.receiver.early_bytes} early bytes are kept")
    with contextlib.suppress(RudaError, UnexpectedMessage):
        one.receiver.recv_into(5, (memoryview(small),), b"")
    one.end(PeerLostError("the end", rank=1))
    _loop.run_until_complete(asyncio.sleep(0))  # what it has asked the loop for
    if not _loop_is_idle():
        raise AssertionError("a link that has ended still asks the loop for something")


def _loop_is_idle() -> bool:
    return not getattr(_loop, "_ready", None)


#: kind, flags, ident, tag, which size, whether the payload comes too, and whether it has a checksum
_FIELDS = struct.Struct("<BBBBBBB")
_SIZES = (0, 1, 8, 200, 256, 257, 500, 1000, 4096, 1 << 20, 1 << 40, (1 << 62) - 1)


def frames(data: bytes) -> None:
    """Frames with right checksums around whatever contents, seven bytes for each; see `link`."""
    body = bytearray(data[:1])
    for at in range(1, min(len(data), 400) - _FIELDS.size, _FIELDS.size):
        kind, flags, ident, tag, size, follows, checked = _FIELDS.unpack_from(data, at)
        kind = wire.MESSAGE + kind % 9
        nbytes = _SIZES[size % len(_SIZES)]
        payload = bytes(min(nbytes, 1000) if follows % 2 else 0)
        if kind not in (wire.MESSAGE, wire.OFFER, wire.DATA, wire.CREDIT):
            nbytes = 0
        numbers = {"tag": tag % 8, "ident": ident % 4}
        if checked % 2:
            flags |= wire.CHECKED
            numbers["tag" if kind == wire.DATA else "ident"] = wire.payload_crc((payload,))
        body += wire.encode(kind, payload_bytes=nbytes, head=b"h" * (flags >> 7), flags=flags & 3, **numbers)
        body += payload
    link(bytes(body))


def frame(data: bytes) -> None:
    """One frame."""
    with contextlib.suppress(ProtocolError):
        found = wire.decode_prefix(data)
        head = data[wire.PREFIX_BYTES : wire.PREFIX_BYTES + found.head_bytes]
        wire.check(found, data[: wire.PREFIX_BYTES], head)
        again = wire.encode(found.kind, found.tag, found.payload_bytes, head, found.ident, found.flags)
        if again != data[: len(again)]:
            raise AssertionError("a frame that is believed is not the one that its fields encode to")


def record(data: bytes) -> None:
    """What ranks say at the meeting."""
    with contextlib.suppress(ProtocolError):
        found = wire.unpack_record(data, _LIMIT)
        error = refused_error(found, "there")
        if not isinstance(error, RudaError):
            raise AssertionError(error)
        Join.of(found)


def peer(data: bytes) -> None:
    """Where a rank says that it listens."""
    with contextlib.suppress(ProtocolError):
        _Peer.unpack(data, 1)


def notice(data: bytes) -> None:
    """What ranks tell each other of failures."""
    with contextlib.suppress(ProtocolError):
        notices.decode(data, OF_NODES)


def url(data: bytes) -> None:
    """A URL, whose secrets must not come back."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ConfigError):
        parts = split_url(f"tcp://h:1/j?{text}&secret=hunter2")
        raise AssertionError(f"a secret in a URL passed: {parts}")


def handshake(data: bytes) -> None:
    """A connection that says anything, to either side of the proof; the first byte says which."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(False)
        theirs.send(data[1:_LIMIT])
        theirs.shutdown(socket.SHUT_WR)
        proof = prove(
            ours,
            Secret(b"secret"),
            server=bool(data[:1] > b"\x7f"),
            context=b"fuzz",
            deadline=time.monotonic() + 5,
        )
        try:
            _loop.run_until_complete(proof)
        except (AuthenticationError, ProtocolError, ConnectionError):
            return
        raise AssertionError("proved without the secret")


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (link, frames, frame, record, peer, notice, url, handshake)
}


def _seeds() -> Iterator[tuple[str, bytes]]:
    """Well-formed input for each target, from which mutations go deeper than from noise."""
    small = wire.encode(wire.MESSAGE, 3, 8) + b"12345678"
    checked = (
        wire.encode(wire.MESSAGE, 3, 8, b"", wire.payload_crc((b"12345678",)), wire.CHECKED) + b"12345678"
    )
    offer = wire.encode(wire.OFFER, 4, 1000, b"h", ident=1)
    parts = b"".join(
        wire.encode(wire.DATA, wire.payload_crc((bytes(500),)), 500, ident=1, flags=wire.CHECKED) + bytes(500)
        for _ in range(2)
    )
    early = b"".join(wire.encode(wire.MESSAGE, 9, 200) + bytes(200) for _ in range(3))
    control = b"".join(
        wire.encode(kind, 4, ident=1, flags=flags)
        for kind in (wire.READY, wire.DROP, wire.PING, wire.CREDIT)
        for flags in (0, 1)
    )
    bye = wire.encode(wire.BYE, head=b"closed")
    for body in (small, offer + parts, early, control, small + offer + parts + early + control + bye):
        yield "link", b"\0" + body
    yield "link", b"\xff" + checked + offer + parts + bye
    yield (
        "frames",
        b"\0"
        + bytes((0, 0, 0, 3, 2, 1, 0, 1, 0x80, 1, 4, 7, 0, 0, 3, 0, 1, 0, 6, 1, 0, 3, 0, 1, 0, 6, 1, 0, 8)),
    )
    yield "frames", b"\xff" + bytes(range(1, 92))
    for whole in (small, checked, offer, bye):
        yield "frame", whole
    join = Join("lab", 1, 2, b"payload").pack()
    yield "record", join
    yield "record", wire.pack_record({"kind": "welcome", "session": bytes(16), "payloads": [b"a", b"b"]})
    yield "record", wire.pack_record({"kind": "refused", "code": "timeout", "text": "late", "ranks": [1]})
    yield "peer", _Peer("127.0.0.1", 29500, Terms(65536, 1 << 24)).pack()
    yield "notice", notices.encode("lost", 1, "gone")
    yield "notice", notices.encode("report", 1, 2, b"head")
    yield "notice", notices.encode("survivors", 1, 0, [2], False)
    yield "notice", notices.encode("fail", 1, 2, "timeout", 0, "late", 1, "", "", "")
    yield "url", b"rank=1&world_size=2&timeout=500ms"
    yield "url", b"password=%41&a=%zz#frag"
    yield "handshake", b"\xffRUDA\x01" + bytes(64)
    yield "handshake", b"\0\x01" + bytes(65)
    yield "handshake", b"\xff\x16\x03\x01\x02\x00"
    yield "handshake", b"\0\x15\x03\x03\x00\x02\x02\x46"


CORPUS_SEEDS: tuple[tuple[str, bytes], ...] = tuple(_seeds())
