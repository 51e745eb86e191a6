"""How much of the gradients' communication `GradientSync` hides behind backward.

A stack of linear layers is trained with and without overlap, in turns. On a machine with fewer cores than
twice the ranks, communication and backward compete for them, and hiding one behind the other gains little.

    python benchmarks/gradient_sync.py [--ranks 2] [--url shm://sync] [--width 1024] [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from alternating import alternate, print_table, ratio
from torch import nn

import ruda_async
from ruda_async import training


def measure(width: int, layers: int, batch: int, bucket: int, rounds: int) -> dict[str, Any]:
    """What every rank runs."""
    torch.set_num_threads(1)
    with ruda_async.sync.connect(timeout=120) as comm:

        def model() -> nn.Sequential:
            return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

        x = torch.randn(batch, width)
        nets = {"overlapped": model(), "at the end": model(), "alone": model()}
        syncs = {
            "overlapped": training.GradientSync(nets["overlapped"], comm, bucket_bytes=bucket),
            "at the end": training.GradientSync(nets["at the end"], comm, bucket_bytes=bucket, overlap=False),
        }

        def step(name: str) -> None:
            nets[name].zero_grad()
            nets[name](x).square().mean().backward()

        cases = {name: (lambda name=name: step(name)) for name in nets}
        seconds = alternate(cases, comm.barrier, rounds, 1)
        stats = {name: (vars(sync.stats()), sync.stats().overlapped) for name, sync in syncs.items()}
        begin = syncs["overlapped"].timeline()[0].started
        trace = [
            (t.bucket, t.nbytes, t.early, t.started - begin, t.ended - begin)
            for t in syncs["overlapped"].timeline()
        ]
        return {"seconds": seconds, "stats": stats, "trace": trace}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--url", default="shm://sync")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--bucket", type=int, default=4 * 1024 * 1024, help="bytes")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    arguments = (options.width, options.layers, options.batch, options.bucket, options.rounds)
    found = ruda_async.spawn(measure, options.ranks, url=options.url, args=arguments)[0]
    seconds = found["seconds"]
    rows = []
    for name in seconds:
        row = [
            name,
            f"{1e3 * statistics.median(seconds[name]):.1f} ms",
            f"{ratio(seconds['overlapped'], seconds[name]):.2f}x",
        ]
        if name in found["stats"]:
            stats, overlapped = found["stats"][name]
            each = 1e3 / stats["passes"]
            row += [
                f"{stats['nbytes'] / stats['passes'] / 1e6:.1f} MB",
                f"{each * stats['in_flight']:.1f} ms",
                f"{each * stats['waiting']:.1f} ms",
                f"{each * overlapped:.1f} ms",
            ]
        else:
            row += ["", "", "", ""]
        rows.append(row)
    columns = ["forward and backward", "time", "ratio", "sent", "under way", "waited", "hidden"]
    print_table(f"{options.layers} layers of {options.width}^2, {options.ranks} ranks", columns, rows)
    rows = [
        [str(bucket), f"{nbytes / 1e6:.1f} MB", "yes" if early else "no", f"{1e3 * a:.1f}", f"{1e3 * b:.1f}"]
        for bucket, nbytes, early, a, b in found["trace"]
    ]
    print_table(
        "the last pass, rank 0", ["bucket", "bytes", "during backward", "started, ms", "ended, ms"], rows
    )


if __name__ == "__main__":
    main()
