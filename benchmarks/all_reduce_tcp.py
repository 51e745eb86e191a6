"""All-reduce between two processes: this library over a URL beside Gloo, alternating in one run.

    python benchmarks/all_reduce_tcp.py [--url tcp://127.0.0.1:0] [--loop asyncio|uvloop|sync] [--sizes 8,64k,…]

Prints medians in microseconds, and how many times as fast as Gloo that is. Every measured call is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = "8,1k,16k,64k,256k,1m,4m,16m,64m,256m"


def parse_size(text: str) -> int:
    """``64k`` → 65536."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    return int(text[:-1]) * units[text[-1].lower()] if text[-1].lower() in units else int(text)


def repeats(nbytes: int) -> int:
    """Calls per block: about the same bytes for all sizes, within reason."""
    return max(4, min(300, (64 << 20) // max(nbytes, 1)))


def rank_main(rank: int, args: argparse.Namespace, ports: list[int], results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=args.world)
    from ruda_async import sync

    url = args.url.replace(":0", f":{ports[1]}")
    if args.loop == "sync":
        with sync.connect(url, rank=rank, world_size=args.world) as comm:
            measure(rank, args, results, lambda x: comm.all_reduce_sum(x), None)
        return

    import ruda_async

    runner_options = {}
    if args.loop == "uvloop":
        import uvloop

        runner_options["loop_factory"] = uvloop.new_event_loop
    with asyncio.Runner(**runner_options) as runner:
        comm = runner.run(_connect(ruda_async, url, rank, args.world))

        async def block(x: np.ndarray, count: int) -> list[float]:
            times = []
            for _ in range(count):
                started = time.perf_counter()
                result = await comm.all_reduce_sum(x)
                times.append(time.perf_counter() - started)
                del result
            return times

        measure(
            rank,
            args,
            results,
            lambda x: runner.run(comm.all_reduce_sum(x)),
            lambda x, n: runner.run(block(x, n)),
        )
        runner.run(comm.close())


async def _connect(module: Any, url: str, rank: int, world: int) -> Any:
    return await module.connect(url, rank=rank, world_size=world)


def measure(
    rank: int,
    args: argparse.Namespace,
    results: Any,
    once: Callable[[np.ndarray], np.ndarray],
    block: Callable[[np.ndarray, int], list[float]] | None,
) -> None:
    """Alternate blocks of both libraries for every size."""
    import torch
    import torch.distributed as dist

    for nbytes in map(parse_size, args.sizes.split(",")):
        count = max(nbytes // 4, 1)
        x = np.arange(count, dtype=np.float32) + rank
        expected = np.arange(count, dtype=np.float32) * args.world + sum(range(args.world))
        np.testing.assert_array_equal(once(x), expected)
        ours: list[float] = []
        theirs: list[float] = []
        n = repeats(nbytes)
        for turn in range(args.rounds + 1):
            tensor = torch.from_numpy(x.copy())
            dist.barrier()
            times = []
            for _ in range(n):
                started = time.perf_counter()
                dist.all_reduce(tensor)
                times.append(time.perf_counter() - started)
            dist.barrier()
            if block is not None:
                mine = block(x, n)
            else:
                mine = []
                for _ in range(n):
                    started = time.perf_counter()
                    once(x)
                    mine.append(time.perf_counter() - started)
            if turn:  # the first round warms up
                theirs += times
                ours += mine
        if rank == 0:
            results.put((nbytes, statistics.median(ours), statistics.median(theirs)))
    if rank == 0:
        results.put(None)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="tcp://127.0.0.1:0/bench")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "sync"), default="asyncio")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ports = free_ports(2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = [context.Process(target=rank_main, args=(r, args, ports, results)) for r in range(args.world)]
    for process in ranks:
        process.start()
    if not args.json:
        print(
            f"{'bytes':>12} {'ruda µs':>12} {'Gloo µs':>12} {'times as fast':>14}   ({args.loop}, {args.world} ranks)"
        )
    while (row := results.get(timeout=600)) is not None:
        nbytes, ours, theirs = row
        if args.json:
            print(json.dumps({"bytes": nbytes, "seconds": ours, "gloo_seconds": theirs}))
        else:
            print(
                f"{nbytes:>12} {ours * 1e6:>12.1f} {theirs * 1e6:>12.1f} {theirs / ours:>14.2f}", flush=True
            )
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
