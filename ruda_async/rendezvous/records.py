"""What rank 0 and the others say to each other, and the checks of what comes from the network."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from ..errors import CollectiveTimeoutError, ConfigError, ProtocolError, RudaError
from ..transport import wire
from ..transport.handshake import Peer, read_exactly, read_into

__all__ = [
    "ASK",
    "CONFIRM",
    "CONTEXT",
    "MAX_PAYLOAD",
    "OVERHEAD",
    "PROTOCOL",
    "Join",
    "OtherJobError",
    "read_record",
    "refusal",
    "refused_error",
]

#: The largest payload of one rank, in bytes.
MAX_PAYLOAD = 64 * 1024
#: Room for a record's keys and numbers and a job name, beyond payloads; in bytes.
OVERHEAD = 4096
PROTOCOL = 1
#: What the proof of the secret is for.
CONTEXT = b"ruda-async rendezvous"
#: The two single bytes that a rank sends after its JOIN.
CONFIRM, ASK = b"+", b"?"


class Join(NamedTuple):
    """What a rank says of itself."""

    job: str
    rank: int
    world_size: int
    payload: bytes

    def pack(self) -> bytes:
        """This JOIN as a record."""
        return wire.pack_record({"protocol": PROTOCOL, **self._asdict()})

    @classmethod
    def of(cls, record: dict[str, Any]) -> Join:
        """Check a record that came from the network.

        Raises:
            ProtocolError: another version, or fields that no JOIN has.
        """
        protocol = record.pop("protocol", None)
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"this rank speaks version {protocol!r:.40} of the rendezvous and rank 0 version {PROTOCOL}; "
                "install the same ruda-async on all ranks"
            )
        if set(record) != set(cls._fields):
            raise ProtocolError(f"a JOIN has the fields {', '.join(cls._fields)}")
        join = cls(**record)
        if (
            type(join.job) is not str
            or type(join.payload) is not bytes
            or type(join.rank) is not int
            or type(join.world_size) is not int
            or len(join.payload) > MAX_PAYLOAD
            or not 0 <= join.rank < join.world_size
        ):
            raise ProtocolError("a JOIN holds values that no rank sends")
        return join


class OtherJobError(ConfigError):
    """Another job meets here. Among several ports to try it means: try the next."""


#: How errors travel; any other code is a `ProtocolError`.
_CODES: dict[str, type[RudaError]] = {
    "config": ConfigError,
    "job": OtherJobError,
    "timeout": CollectiveTimeoutError,
}


def refusal(error: RudaError) -> bytes:
    """The REFUSED record that tells a rank of `error`."""
    ranks = error.missing if isinstance(error, CollectiveTimeoutError) else (error.rank,)
    code = next((code for code, kind in _CODES.items() if type(error) is kind), "protocol")
    return wire.pack_record(
        {"kind": "refused", "code": code, "text": str(error), "ranks": [r for r in ranks if r is not None]}
    )


def refused_error(record: dict[str, Any], where: str) -> RudaError:
    """The error that a REFUSED record tells of; text from the peer is text, whatever it says."""
    code, text, ranks = record.get("code"), record.get("text"), record.get("ranks")
    if type(text) is not str or type(ranks) is not list or not all(type(rank) is int for rank in ranks):
        return ProtocolError(f"{where} sent a malformed refusal")
    kind = _CODES.get(code, ProtocolError) if type(code) is str else ProtocolError
    if kind is CollectiveTimeoutError:
        return CollectiveTimeoutError(text, missing=tuple(ranks))
    if kind is ProtocolError:
        text = f"{where} refused this rank: {text}"
    return kind(text, rank=ranks[0] if ranks else None)


async def read_record(sock: Peer, limit: int) -> dict[str, Any]:
    """The next record of a connection, of at most `limit` bytes.

    Raises:
        ProtocolError: what comes is no record, or a longer one.
        ConnectionError: the peer closed the connection first.
    """
    loop = asyncio.get_running_loop()
    prefix = await read_exactly(loop, sock, wire.RECORD_PREFIX_BYTES)
    record = bytearray(len(prefix) + wire.record_bytes(prefix, limit))
    record[: len(prefix)] = prefix
    await read_into(loop, sock, memoryview(record)[len(prefix) :])
    return wire.unpack_record(record, limit)
