"""The wire format: frames of a fixed prefix and a short head, and small records for set-up. No I/O here.

A frame is a prefix of 32 bytes, little endian, then ``head_bytes`` of head, then, for `MESSAGE` and
`DATA` alone, ``payload_bytes`` of payload::

    offset  0  magic          2 bytes  b"Ru"
            2  version        u8       1
            3  kind           u8       one of the kinds below
            4  head_bytes     u16      at most MAX_HEAD
            6  flags          u16
            8  tag            u64
           16  payload_bytes  u64
           24  ident          u32
           28  crc            u32      CRC-32 (as in zlib) of bytes 0 … 27 and then the head

The checksum guards lengths and heads, so that a damaged or misplaced stream is noticed before it is
believed. Payloads are left to the checksums of the link below, unless the flag `CHECKED` is set: then the
CRC-32 of the payload that follows is in ``ident`` of a `MESSAGE` and in ``tag`` of `DATA`, which have no
other use for them.

A record is a u32 length, little endian, and a msgpack map of that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import msgpack

from ..errors import ProtocolError
from .base import MAX_HEAD

__all__ = [
    "BYE",
    "CHECKED",
    "CREDIT",
    "DATA",
    "DROP",
    "MESSAGE",
    "OFFER",
    "PING",
    "PONG",
    "PREFIX_BYTES",
    "READY",
    "RECORD_PREFIX_BYTES",
    "VERSION",
    "Frame",
    "check",
    "check_payload",
    "decode_prefix",
    "encode",
    "pack_record",
    "payload_crc",
    "record_bytes",
    "unpack_record",
]

VERSION = 1
PREFIX_BYTES = 32
RECORD_PREFIX_BYTES = 4

#: A whole message; its payload follows.
MESSAGE = 1
#: The envelope of a large message, known to its sender as ``ident``. Flag 1: its data follows without
#: waiting, because the receiver had announced itself.
OFFER = 2
#: The receiver is ready: for the offer ``ident``, or with flag 1 for the next large message of ``tag``.
READY = 3
#: A part of the payload of message ``ident``; the part follows.
DATA = 4
#: The sender gives up message ``ident``; with flag 2, before it began with the payload, so that an
#: announcement which crossed the offer is not used up. With flag 1 it is the receiver that declines it.
DROP = 5
#: ``payload_bytes`` of the budget for early messages are given back; no payload follows.
CREDIT = 6
PING = 7
PONG = 8
#: An orderly close; the head is the reason in UTF-8.
BYE = 9
#: Flag of `MESSAGE` and `DATA`: the frame carries the checksum of its payload.
CHECKED = 2

ReadableBuffer: TypeAlias = "bytes | bytearray | memoryview"

_MAGIC = b"Ru"
_CHECKED = struct.Struct("<IHHQQI")  # magic, version and kind are one u32
_PREFIX = struct.Struct("<IHHQQII")
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_LEAD = int.from_bytes(_MAGIC, "little") | VERSION << 16
_LEAD_MASK = (1 << 24) - 1
#: Kinds whose payload_bytes mean something; it is zero in all others.
_SIZED = frozenset((MESSAGE, OFFER, DATA, CREDIT))
_MAX_DEPTH = 8
_new_tuple = tuple.__new__  # `Frame(…)` goes through a Python-level __new__ and takes three times as long
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


class Frame(NamedTuple):
    """A decoded prefix; the fields are those of the table above."""

    kind: int
    head_bytes: int
    flags: int
    tag: int
    payload_bytes: int
    ident: int
    crc: int


def encode(
    kind: int, tag: int = 0, payload_bytes: int = 0, head: bytes = b"", ident: int = 0, flags: int = 0
) -> bytes:
    """The prefix and the head of one frame, ready to send; the payload, if any, goes after it.

    Raises:
        ValueError: the head is longer than `MAX_HEAD` bytes.
        struct.error: a number does not fit its field.
    """
    head_bytes = len(head)
    if head_bytes > MAX_HEAD:
        raise ValueError(f"a head of {head_bytes} bytes is over the limit of {MAX_HEAD}")
    checked = _CHECKED.pack(kind << 24 | _LEAD, head_bytes, flags, tag, payload_bytes, ident)
    return checked + _CRC.pack(crc32(head, crc32(checked))) + head


def decode_prefix(buffer: ReadableBuffer, offset: int = 0, limit: int = 1 << 62) -> Frame:
    """Read the prefix at `offset`; its head, and with that its checksum, is for `check`.

    Args:
        limit: the largest ``payload_bytes`` that is believed.

    Raises:
        ProtocolError: fewer than 32 bytes, another magic or version, an unknown kind, a head or a payload
            over its limit, or a payload length on a kind that has none.
    """
    try:
        lead, head_bytes, flags, tag, payload_bytes, ident, crc = _PREFIX.unpack_from(buffer, offset)
    except struct.error:
        raise ProtocolError(
            f"a frame starts with {PREFIX_BYTES} bytes, and {max(0, len(buffer) - offset)} are there"
        ) from None
    kind = lead >> 24
    if lead & _LEAD_MASK != _LEAD:
        raise _foreign(bytes(buffer[offset : offset + 4]))
    if not MESSAGE <= kind <= BYE:
        raise ProtocolError(f"a frame of the unknown kind {kind}; kinds are {MESSAGE} to {BYE}")
    if head_bytes > MAX_HEAD:
        raise ProtocolError(f"a frame says its head has {head_bytes} bytes; the limit is {MAX_HEAD}")
    if payload_bytes and (payload_bytes > limit or kind not in _SIZED):
        raise ProtocolError(
            f"a frame of kind {kind} says its payload has {payload_bytes} bytes; "
            f"the limit is {limit if kind in _SIZED else 0}"
        )
    return _new_tuple(Frame, (kind, head_bytes, flags, tag, payload_bytes, ident, crc))


def check(frame: Frame, prefix_view: ReadableBuffer, head_view: ReadableBuffer) -> None:
    """Compare the checksum of a frame's 32 prefix bytes and its head with the one it carries.

    Raises:
        ProtocolError: they differ, or the head has another length.
    """
    found = crc32(head_view, crc32(prefix_view[: PREFIX_BYTES - 4]))
    if found != frame.crc or len(head_view) != frame.head_bytes:
        raise ProtocolError(
            f"a frame of kind {frame.kind} is damaged: its checksum is {frame.crc:#010x} and its bytes give "
            f"{found:#010x}; the connection cannot be trusted any more"
        )


def payload_crc(buffers: Iterable[ReadableBuffer], crc: int = 0) -> int:
    """The CRC-32 of `buffers`, joined, after bytes whose CRC-32 is `crc`."""
    for buffer in buffers:
        crc = crc32(buffer, crc)
    return crc


def check_payload(said: int, found: int) -> None:
    """Compare the checksum that a frame carries for its payload with that of the bytes that came.

    Raises:
        ProtocolError: they differ.
    """
    if said != found:
        raise ProtocolError(
            f"a payload is damaged: its checksum is {said:#010x} and its bytes give {found:#010x}; the "
            "connection cannot be trusted any more"
        )


def _foreign(lead: bytes) -> ProtocolError:
    if lead[:2] == _MAGIC:
        return ProtocolError(
            f"the peer speaks version {lead[2]} of the wire format and this rank version {VERSION}; "
            "install the same ruda-async on all ranks"
        )
    return ProtocolError(f"a frame starts with {_MAGIC!r}, and the bytes here are {lead!r}")


def pack_record(obj: Mapping[str, Any]) -> bytes:
    """A small map as bytes: u32 length and msgpack.

    Keys are str; values are None, bool, int, float, str, bytes, and lists and maps of these.

    Raises:
        TypeError, ValueError: a value that msgpack has no form for.
    """
    packed: bytes = msgpack.packb(obj)
    return _LENGTH.pack(len(packed)) + packed


def record_bytes(prefix: ReadableBuffer, limit: int) -> int:
    """How many bytes follow a record's 4-byte prefix; for readers, before they allocate.

    Raises:
        ProtocolError: more than `limit`, or the prefix is not 4 bytes.
    """
    if len(prefix) != RECORD_PREFIX_BYTES:
        raise ProtocolError(f"a record starts with {RECORD_PREFIX_BYTES} bytes, and {len(prefix)} are there")
    size: int = _LENGTH.unpack(prefix)[0]
    if size > limit:
        raise ProtocolError(f"a record says it has {size} bytes; the limit is {limit}")
    return size


def unpack_record(data: ReadableBuffer, limit: int) -> dict[str, Any]:
    """The map in a whole record, prefix included; at most `limit` bytes after the prefix.

    Raises:
        ProtocolError: anything else than one well-formed map of plain values, nested at most 8 deep.
    """
    view = memoryview(data)
    size = record_bytes(view[:RECORD_PREFIX_BYTES], limit)
    body = view[RECORD_PREFIX_BYTES:]
    if len(body) != size:
        raise ProtocolError(f"a record says it has {size} bytes, and {len(body)} are there")
    try:
        record = msgpack.unpackb(body, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"a record of {size} bytes is not msgpack: {reason}") from None
    if type(record) is not dict:
        raise ProtocolError(f"a record is a map, and this one is {type(record).__name__}")
    _check_plain(record, 1)
    return record


def _check_plain(value: Any, depth: int) -> None:
    """Refuse what msgpack can carry and records do not: extension types, other keys, deep nesting."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > _MAX_DEPTH:
        raise ProtocolError(f"a record is nested more than {_MAX_DEPTH} deep")
    if kind is list:
        for item in value:
            _check_plain(item, depth + 1)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError(f"a record has the key {key!r:.40}; keys are strings")
            _check_plain(item, depth + 1)
    else:
        raise ProtocolError(f"a record holds a value of the type {kind.__name__}")
