"""The wire format: what is encoded comes back, and nothing else is believed."""

from __future__ import annotations

import struct
import zlib

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ruda_async.errors import ProtocolError
from ruda_async.transport import wire
from ruda_async.transport.base import MAX_HEAD

KINDS = range(wire.MESSAGE, wire.BYE + 1)
SIZED = (wire.MESSAGE, wire.OFFER, wire.DATA, wire.CREDIT)

frames = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "tag": st.integers(0, 2**64 - 1),
        "payload_bytes": st.integers(0, 1 << 62),
        "head": st.binary(max_size=200),
        "ident": st.integers(0, 2**32 - 1),
        "flags": st.integers(0, 2**16 - 1),
    }
).map(lambda f: f if f["kind"] in SIZED else {**f, "payload_bytes": 0})

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
plain = st.recursive(
    scalars | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def frame_fields(frame: dict) -> dict:
    """What decoding must give for the arguments of `encode`."""
    return {name: value for name, value in frame.items() if name != "head"} | {
        "head_bytes": len(frame["head"])
    }


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def test_the_kinds_are_fixed_numbers() -> None:
    names = ("MESSAGE", "OFFER", "READY", "DATA", "DROP", "CREDIT", "PING", "PONG", "BYE")
    assert [getattr(wire, name) for name in names] == list(range(1, 10))


def test_the_layout_is_the_documented_one() -> None:
    encoded = wire.encode(
        wire.OFFER, tag=0x0102030405060708, payload_bytes=300, head=b"head", ident=7, flags=1
    )
    checked = b"Ru\x01\x02" + struct.pack("<HHQQI", 4, 1, 0x0102030405060708, 300, 7)
    assert encoded == checked + struct.pack("<I", zlib.crc32(checked + b"head")) + b"head"
    assert len(encoded) == wire.PREFIX_BYTES + 4 == 36


@given(frames, st.binary(max_size=40), st.sampled_from([bytes, bytearray, memoryview]))
def test_a_frame_comes_back_from_any_buffer_and_offset(frame: dict, before: bytes, kind: type) -> None:
    encoded = wire.encode(**frame)
    buffer = kind(before + encoded + b"payload")
    decoded = wire.decode_prefix(buffer, len(before))
    assert isinstance(decoded, wire.Frame)
    assert decoded._asdict() == frame_fields(frame) | {"crc": decoded.crc}
    start = len(before)
    wire.check(decoded, buffer[start : start + 32], buffer[start + 32 : start + len(encoded)])


@given(frames, st.data())
def test_every_flipped_bit_is_noticed(frame: dict, data: st.DataObject) -> None:
    encoded = bytearray(wire.encode(**frame))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        wire.check(wire.decode_prefix(encoded), encoded[:32], encoded[32:])


@given(st.binary(max_size=64))
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.check(wire.decode_prefix(data), data[:32], data[32:])


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (b"GET ", r"b'GET '"),
        (b"Ru\x02\x01", "version 2 of the wire format and this rank version 1"),
        (b"Ru\x01\x00", "unknown kind 0"),
        (b"Ru\x01\x0a", "unknown kind 10"),
    ],
)
def test_a_foreign_prefix_is_named(start: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        wire.decode_prefix(start + wire.encode(wire.PING)[4:])


def test_lengths_over_their_limits_are_named() -> None:
    prefix = struct.Struct("<2sBBHHQQII")
    with pytest.raises(ProtocolError, match=f"{MAX_HEAD + 1} bytes; the limit is {MAX_HEAD}"):
        wire.decode_prefix(prefix.pack(b"Ru", 1, wire.MESSAGE, MAX_HEAD + 1, 0, 0, 0, 0, 0))
    big = wire.encode(wire.MESSAGE, payload_bytes=1001)
    assert wire.decode_prefix(big, limit=1001).payload_bytes == 1001
    with pytest.raises(ProtocolError, match="1001 bytes; the limit is 1000"):
        wire.decode_prefix(big, limit=1000)
    with pytest.raises(ProtocolError, match="the limit is 4611686018427387904"):
        wire.decode_prefix(wire.encode(wire.DATA, payload_bytes=(1 << 62) + 1))
    with pytest.raises(ProtocolError, match="kind 7 says its payload has 5 bytes; the limit is 0"):
        wire.decode_prefix(wire.encode(wire.PING, payload_bytes=5))


def test_a_short_prefix_is_named() -> None:
    with pytest.raises(ProtocolError, match="32 bytes, and 31 are there"):
        wire.decode_prefix(wire.encode(wire.PING)[:31])
    with pytest.raises(ProtocolError, match="and 22 are there"):
        wire.decode_prefix(wire.encode(wire.PING), 10)


def test_a_head_up_to_the_limit_is_sent_and_a_longer_one_is_not() -> None:
    encoded = wire.encode(wire.MESSAGE, head=bytes(MAX_HEAD))
    wire.check(wire.decode_prefix(encoded), encoded[:32], encoded[32:])
    with pytest.raises(ValueError, match=f"{MAX_HEAD + 1} bytes is over the limit"):
        wire.encode(wire.MESSAGE, head=bytes(MAX_HEAD + 1))


def test_numbers_that_do_not_fit_are_not_cut() -> None:
    for field in ({"tag": 2**64}, {"tag": -1}, {"ident": 2**32}, {"flags": 2**16}, {"payload_bytes": -1}):
        with pytest.raises(struct.error):
            wire.encode(wire.MESSAGE, **field)


# ---------------------------------------------------------------------- records


def packed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(st.dictionaries(st.text(max_size=8), plain, max_size=5))
def test_a_record_comes_back(record: dict) -> None:
    assume(depth(record) <= 8)
    data = wire.pack_record(record)
    assert wire.unpack_record(data, len(data)) == record


@given(st.binary(max_size=80) | st.binary(max_size=80).map(packed))
def test_random_records_raise_nothing_but_protocol_errors(data: bytes) -> None:
    try:
        record = wire.unpack_record(data, 1000)
    except ProtocolError:
        return
    assert type(record) is dict
    assert all(type(key) is str for key in record)


@given(st.dictionaries(st.text(max_size=8), plain, min_size=1, max_size=5), st.data())
def test_mutated_records_raise_nothing_but_protocol_errors(record: dict, data: st.DataObject) -> None:
    mutated = bytearray(wire.pack_record(record))
    for _ in range(data.draw(st.integers(1, 3))):
        mutated[data.draw(st.integers(4, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = wire.unpack_record(bytes(mutated), 1 << 20)
    except ProtocolError:
        return
    assert type(result) is dict


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1, 2]), "this one is list"),
        (msgpack.packb({1: 2}), "int is not allowed for map key"),
        (msgpack.packb({b"k": 2}), "keys are strings"),
        (msgpack.packb({"a": {b"k": 2}}), "keys are strings"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"four")}), "ExtType|exceeds"),
        (msgpack.packb({"a": msgpack.Timestamp(1, 0)}), "Timestamp|exceeds"),
        (msgpack.packb({"a": 1}) + b"\x00", "extra data"),
        (msgpack.packb({"a": 1})[:-1], "incomplete"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "not msgpack"),  # a list said to have four thousand million items
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "not msgpack"),  # bytes said to be 4 GiB
        (b"\x81\xa1a\xa2\xff\xfe", "utf-8"),
        (b"\x81\xa1a" + b"\x91" * 8 + b"\x00", "nested more than 8 deep"),
        (b"\x81\xa1a" + b"\x91" * 100_000 + b"\x00", "not msgpack|nested"),
    ],
)
def test_malformed_records_are_refused_by_name(body: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        wire.unpack_record(packed(body), 1 << 20)


def test_record_lengths_are_checked_before_the_body_is_there() -> None:
    assert wire.record_bytes(struct.pack("<I", 100), 100) == 100
    with pytest.raises(ProtocolError, match="101 bytes; the limit is 100"):
        wire.record_bytes(struct.pack("<I", 101), 100)
    with pytest.raises(ProtocolError, match="3 are there"):
        wire.record_bytes(b"abc", 100)
    with pytest.raises(ProtocolError, match="says it has 5 bytes, and 1 are there"):
        wire.unpack_record(struct.pack("<I", 5) + b"\x80", 100)
    with pytest.raises(ProtocolError, match="the limit is 3"):
        wire.unpack_record(wire.pack_record({"abc": 1}), 3)
