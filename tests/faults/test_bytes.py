"""Faults by bytes: damage at its place, cuts, silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruda_faults import FaultParameters
from ruda_faults.stream import FaultyStream
from support import BETWEEN_PROCESSES, fresh_url, outcome, run_ranks

from ruda_async import AsyncCommunicator, PeerLostError


class Recorder:
    """A stream that takes up to `limit` bytes a write and keeps them."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.taken = bytearray()
        self.limit = limit
        self.closed = False

    def write(self, buffers: Sequence[Any]) -> int:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        data = b"".join(buffers)[: self.limit]
        self.taken += data
        return len(data)

    def read_into(self, buffer: memoryview) -> int:
        buffer[:1] = b"r"
        return 1

    def close(self) -> None:
        self.closed = True


def push(stream: FaultyStream, data: bytes, cut: int) -> None:
    """Write all of `data` in buffers of `cut` bytes, going on where each write ends."""
    at = 0
    while at < len(data):
        rest = data[at : at + 8 * cut]
        at += stream.write([b"", *(rest[i : i + cut] for i in range(0, len(rest), cut))])


def differing(one: bytes, other: bytes) -> list[int]:
    assert len(one) == len(other)
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


@given(st.integers(0, 300), st.integers(1, 80), st.integers(1, 90))
def test_the_named_byte_alone_is_damaged_by_one_bit(at: int, cut: int, limit: int) -> None:
    recorder = Recorder(limit)
    data = bytes(i % 251 for i in range(301))
    push(FaultyStream(recorder, FaultParameters(corrupt_after=at), 0, 1), data, cut)  # type: ignore[arg-type]
    assert differing(recorder.taken, data) == [at]
    assert (recorder.taken[at] ^ data[at]).bit_count() == 1


@given(st.integers(20, 200), st.integers(50, 5000))
def test_damage_depends_on_seed_and_bytes_alone(cut: int, limit: int) -> None:
    data = bytes(8_000)

    def damaged(seed: int, rank: int, cut: int, limit: int) -> bytes:
        recorder = Recorder(limit)
        faults = FaultParameters(corrupt_rate=0.02, seed=seed)
        push(FaultyStream(recorder, faults, rank, 1), data, cut)  # type: ignore[arg-type]
        return bytes(recorder.taken)

    found = damaged(5, 0, cut, limit)
    assert found == damaged(5, 0, 1000, 1 << 30)
    assert found != damaged(6, 0, 1000, 1 << 30)
    assert found != damaged(5, 2, 1000, 1 << 30)
    assert 80 < len(differing(found, data)) < 280


def test_every_byte_can_be_damaged() -> None:
    recorder = Recorder()
    push(FaultyStream(recorder, FaultParameters(corrupt_rate=1), 0, 1), bytes(50), 7)  # type: ignore[arg-type]
    assert differing(recorder.taken, bytes(50)) == list(range(50))


def test_a_cut_comes_after_exactly_so_many_bytes() -> None:
    recorder = Recorder()
    stream = FaultyStream(recorder, FaultParameters(drop_after=10), 0, 1)  # type: ignore[arg-type]
    assert stream.write([b"abcdef"]) == 6
    assert stream.write([b"ghi", b"jklm"]) == 4
    with pytest.raises(ConnectionResetError, match="drop_after"):
        stream.write([b"klm"])
    assert bytes(recorder.taken) == b"abcdefghij"
    assert recorder.closed


def test_silence_swallows_both_ways() -> None:
    recorder = Recorder()
    stream = FaultyStream(recorder, FaultParameters(silence_after=3), 0, 1)  # type: ignore[arg-type]
    buffer = memoryview(bytearray(4))
    assert stream.read_into(buffer) == 1
    assert stream.write([b"abcdef"]) == 3
    assert stream.write([b"def", b"ghi"]) == 6
    assert bytes(recorder.taken) == b"abc"
    ends = iter([4, 2])

    def run_dry(_: memoryview) -> int:
        try:
            return next(ends)
        except StopIteration:
            raise BlockingIOError from None

    stream._inner_read = run_dry
    with pytest.raises(BlockingIOError):
        stream.read_into(buffer)
    assert buffer.tobytes() == b"r\0\0\0"


async def until_lost(comm: AsyncCommunicator) -> PeerLostError:
    while True:
        found = await outcome(comm.all_reduce_sum(np.ones(5000)))
        if isinstance(found, Exception):
            assert isinstance(found, PeerLostError), found
            return found


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
@pytest.mark.parametrize("query", ["drop_after=100", "drop_after=90000", "silence_after=90000&heartbeat=0.3"])
async def test_a_lost_link_is_noticed_on_both_sides_and_survived(scheme: str, query: str) -> None:
    async def body(comm: AsyncCommunicator) -> str:
        error = await until_lost(comm)
        if comm.rank == 1:  # cut off from both, it holds both for lost
            return "alone"
        assert error.rank == 1
        smaller = await comm.shrink()
        return str((await smaller.all_reduce_sum(np.ones(1)))[0])

    url = f"faults+{fresh_url(scheme)}?{query}&only_rank=1"
    assert await run_ranks(3, body, url=url) == ["2.0", "alone", "2.0"]
