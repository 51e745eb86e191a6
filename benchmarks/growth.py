"""How each algorithm grows with the number of ranks, beside its own formula.

    python benchmarks/growth.py                   2, 4, 8, 16 and 32 ranks over memory://, into docs/growth.md
    python benchmarks/growth.py --ranks 2,4 --calls 5 --page -      a short look, printed

The ranks are tasks of one event loop: one core does the work of all of them, one after another. The
formulas are of machines where each rank has its own, so what is compared is the *work*: the model's seconds
times the ranks that share the core. Latency, overhead, bandwidth and additions are measured first, between
two tasks, as `ruda-async tune` does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ruda_async
from ruda_async.collectives.candidates import CANDIDATES
from ruda_async.collectives.costs import case_of
from ruda_async.transport.base import Capabilities
from ruda_async.tuning.measure import measure
from ruda_async.tuning.numbers import Numbers, seconds, with_numbers

PAGE = Path(__file__).parents[1] / "docs" / "growth.md"
#: Bytes of each rank's input, where few rounds count and where few bytes do.
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
Call = Callable[[ruda_async.AsyncCommunicator, Any], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce": lambda comm, x: comm.reduce(x, 0),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "gather": lambda comm, x: comm.gather(x, 0),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "barrier": lambda comm, x: comm.barrier(),
}


async def ranks(size: int, algorithm: str, call: Call, nbytes: int, calls: int) -> float:
    """The median seconds of a call on all ranks."""
    value = np.ones(nbytes // 4, np.float32)
    times: list[float] = []

    async def rank(number: int) -> None:
        url = f"memory://growth-{algorithm}-{size}"
        async with ruda_async.connect(url, rank=number, world_size=size, algorithm=algorithm) as comm:
            await call(comm, value)
            for _ in range(calls):
                await comm.barrier()
                start = time.perf_counter()
                await call(comm, value)
                await comm.barrier()
                if number == 0:
                    times.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for number in range(size):
            group.create_task(rank(number))
    return statistics.median(times)


def expected(operation: str, algorithm: str, size: int, nbytes: int, model: Capabilities) -> float:
    """Seconds of one core for a call and the barrier after it."""
    case = case_of(nbytes, size, model, False, True)
    formulas = {candidate.algorithm: candidate.seconds for candidate in CANDIDATES[operation]}
    (barrier,) = CANDIDATES["barrier"]
    return size * (formulas[algorithm](case) + barrier.seconds(case))


def table(numbers: Numbers, worlds: Sequence[int], calls: int) -> str:
    """Rows of measured seconds, and in brackets how many times the formula's they are."""
    model = with_numbers(Capabilities(), numbers, Capabilities().segment_bytes)
    lines = [
        "| operation | algorithm | bytes | " + " | ".join(f"{size} ranks" for size in worlds) + " |",
        "| --- | --- | --- |" + " --- |" * len(worlds),
    ]
    for operation, call in CALLS.items():
        for candidate in CANDIDATES[operation]:
            for label, nbytes in SIZES.items() if operation != "barrier" else {"0": 0}.items():
                cells = []
                for size in worlds:
                    if not candidate.can_run(case_of(nbytes, size, model, False, True), True):
                        cells.append("")
                        continue
                    gc.collect()
                    took = asyncio.run(ranks(size, candidate.algorithm, call, nbytes, calls))
                    ratio = took / expected(operation, candidate.algorithm, size, nbytes, model)
                    cells.append(f"{seconds(took)} ({ratio:.1f})")
                    print(operation, candidate.algorithm, label, size, cells[-1], flush=True)
                if any(cells):
                    row = [f"`{operation}`", f"`{candidate.algorithm}`", label, *cells]
                    lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="How each algorithm grows, beside its formula.")
    parser.add_argument("--ranks", default="2,4,8,16,32", help="numbers of ranks (2,4,8,16,32)")
    parser.add_argument("--calls", type=int, default=15, help="calls of which the median is taken (15)")
    parser.add_argument("--page", default=str(PAGE), help="where to write; - prints (docs/growth.md)")
    arguments = parser.parse_args()
    worlds = [int(size) for size in arguments.ranks.split(",")]
    numbers = measure("memory://")
    rows = table(numbers, worlds, arguments.calls)
    text = f"""# Growth

Written by `python benchmarks/growth.py`. Each algorithm over `memory://` with growing numbers of ranks: the
median of {arguments.calls} calls with a barrier after each, and in brackets how many times as long that is
as the algorithm's [own formula](algorithms.md#the-model) says. float32, and bytes of each rank's input.

All ranks are tasks of one event loop, so one core does everything: the formula's seconds are taken once for
each rank. A number in brackets that stays the same from left to right means that the algorithm grows as its
formula does, which is the point of the table; how large it is tells what calls cost above the bare messages
that were measured. In operations with a root most ranks do less than the one that the formula follows, so
there the numbers fall. Where they rise, what the ranks hold together no longer fits into the caches.

{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()};
{numbers}.

{rows}
"""
    if arguments.page == "-":
        print(text)
    else:
        Path(arguments.page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
