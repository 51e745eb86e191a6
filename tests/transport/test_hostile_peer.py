"""A peer that knows the secret and does not keep to the protocol: it is lost, and takes no memory along."""

from __future__ import annotations

import pytest
from support import fresh_url, outcome, run_ranks

from ruda_async import AsyncCommunicator, PeerLostError
from ruda_async.transport import wire

CASES = {
    "payload that nobody asked for": (
        wire.encode(wire.OFFER, 5, 1 << 40, ident=9) + wire.encode(wire.DATA, 0, 100, ident=9) + bytes(100),
        "100 bytes of payload for message 9, which takes none",
    ),
    "payload of no message": (
        wire.encode(wire.DATA, 0, 4, ident=77) + b"four",
        "message 77, which takes none",
    ),
    "more early messages than were granted": (
        b"".join(wire.encode(wire.MESSAGE, 1 << 60 | i, 1000) + bytes(1000) for i in range(5)),
        "more early messages came than early_bytes=4096 allows",
    ),
    "empty messages without end": (
        b"".join(wire.encode(wire.MESSAGE, 1 << 60 | i) for i in range(40)),
        "more early messages came than early_bytes=4096 allows",
    ),
    "a large message without an offer": (
        wire.encode(wire.MESSAGE, 5, 1 << 50) + bytes(10),
        "came without an offer",
    ),
    "a message that follows no announcement": (
        wire.encode(wire.MESSAGE, 5, 1 << 50, flags=1) + bytes(10),
        "that nobody was ready for",
    ),
    "an offer twice": (wire.encode(wire.OFFER, 5, 9000, ident=3) * 2, "message 3 is offered twice"),
    "a pong": (wire.encode(wire.PONG), "a frame of kind 8 is not expected here"),
    "noise": (b"\xde\xad\xbe\xef" * 8, "a frame starts with b'Ru'"),
    "a damaged head": (
        wire.encode(wire.MESSAGE, 5, 1)[:-1] + b"\0" + b"x",
        "a frame of kind 1 is damaged",
    ),
}


async def attack(said: bytes, query: str) -> str:
    """What rank 0 says of rank 1 when that sends `said` between frames."""
    text = ""

    async def body(comm: AsyncCommunicator) -> None:
        nonlocal text
        await comm.barrier()
        if comm.rank == 1:
            comm._node.transport._links[0].stream._sock.sendall(said)  # type: ignore[attr-defined]
        error = await outcome(comm.recv(1 - comm.rank))
        assert isinstance(error, PeerLostError)
        assert error.rank == 1 - comm.rank
        if comm.rank == 0:
            text = str(error)

    await run_ranks(2, body, url=f"{fresh_url('tcp')}?{query}")
    return text


@pytest.mark.parametrize("name", CASES)
async def test_what_breaks_the_protocol(name: str) -> None:
    said, expected = CASES[name]
    text = await attack(said, "eager_bytes=2048&early_bytes=4096")
    assert "broke the protocol" in text
    assert expected in text


async def test_a_payload_without_the_checksum_that_was_agreed() -> None:
    said = wire.encode(wire.MESSAGE, 5, 4) + b"four"
    assert "give checksum=true on all ranks" in await attack(said, "checksum=true")


async def test_a_payload_with_a_wrong_checksum() -> None:
    """It is compared even where it was not asked for."""
    crc = wire.payload_crc((b"four",))
    said = wire.encode(wire.MESSAGE, 5, 4, ident=crc, flags=wire.CHECKED) + b"five"
    text = await attack(said, "")
    assert "a payload is damaged" in text
    assert f"{crc:#010x}" in text
