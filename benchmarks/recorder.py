"""What counting and remembering every call costs: microseconds added to one call.

    python benchmarks/recorder.py

The recorder's own step in a loop, the counting of bytes per message, and, for scale, a whole call: an
all-reduce of 8 bytes between two ranks of one process, in turns with the recorder and with one that does
nothing. The least of several repetitions each, since other work on the machine can only add.
"""

from __future__ import annotations

import asyncio
import timeit
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

import ruda_async
from ruda_async.observe.recorder import Recorder, Transfer

LOOPS, REPEATS, CALLS, TURNS = 50_000, 9, 400, 25


class _Channel:
    label = (1, "main", (0, 1))


class _Nothing:
    """A recorder that does nothing."""

    def succeeded(self, call: object) -> None: ...


class _Count:
    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent = 0

    def count(self, buffers: tuple[memoryview, ...]) -> None:
        for buffer in buffers:
            self.sent += buffer.nbytes

    def skip(self, buffers: tuple[memoryview, ...]) -> None: ...


def best(function: Callable[[], object]) -> float:
    """Microseconds of one call of `function`."""
    return min(timeit.repeat(function, number=LOOPS, repeat=REPEATS)) / LOOPS * 1e6


def steps() -> tuple[float, float]:
    """Microseconds per call, and per message."""
    recorder, call = Recorder(), Transfer(_Channel(), "all_reduce_sum", 1, 0)
    counter, buffers = _Count(), (memoryview(bytearray(8)),)
    nothing = _Nothing()
    per_call = best(lambda: recorder.succeeded(call)) - best(lambda: nothing.succeeded(call))
    per_message = best(lambda: counter.count(buffers)) - best(lambda: counter.skip(buffers))
    return per_call, per_message


async def whole_calls() -> tuple[float, float]:
    """Microseconds of one all-reduce of both ranks, with the recorder and without."""
    times: dict[bool, float] = {True: float("inf"), False: float("inf")}
    comms: list[Any] = await asyncio.gather(
        *(ruda_async.connect("memory://recorder", rank=r, world_size=2).__aenter__() for r in range(2))
    )
    x = np.ones(1)

    async def loop(comm: Any) -> None:
        for _ in range(CALLS):
            await comm.all_reduce_sum(x)

    recorders = [comm.node.recorder for comm in comms]
    for turn in range(2 * TURNS):
        recording = turn % 2 == 0
        for comm, recorder in zip(comms, recorders, strict=True):
            comm.node.recorder = recorder if recording else _Nothing()
        started = perf_counter()
        await asyncio.gather(*map(loop, comms))
        times[recording] = min(times[recording], (perf_counter() - started) / CALLS * 1e6)
    for comm in comms:
        await comm.close()
    return times[True], times[False]


def main() -> None:
    """Print the figures."""
    per_call, per_message = steps()
    print(f"per call     {per_call:5.2f} µs: the ring, the counters and the histogram")
    print(f"per message  {per_message:5.2f} µs: counting its bytes")
    recording, without = asyncio.run(whole_calls())
    print(f"whole calls  {recording:5.1f} µs with the recorder, {without:5.1f} µs without (two ranks)")


if __name__ == "__main__":
    main()
