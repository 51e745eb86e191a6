"""What autograd adds to an operation, and what completing a scope costs.

Each operation is timed forward and backward through autograd, and beside it, in turns, as the two plain calls
that this amounts to. The difference is what autograd adds, torch's own part of it included; that part is
shown too, as the same graph with a copy in the collective's place. The completion of a
`CollectiveScope` is timed beside one gathering of small objects, the one collective that it consists of.

    python benchmarks/autograd_overhead.py [--ranks 2] [--url shm://overhead] [--rounds 30] [--calls 50]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from alternating import alternate, print_table, ratio

import ruda_async
from ruda_async import autograd

SIZE = 256


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """What every rank runs."""
    torch.set_num_threads(1)
    with ruda_async.sync.connect(timeout=120) as comm:
        n = comm.world_size
        x = torch.randn(SIZE * n)
        counts = [SIZE] * n
        pairs: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
            "all_reduce_sum": (
                lambda v: autograd.all_reduce_sum(comm, v),
                lambda: (comm.all_reduce_sum(x), comm.all_reduce_sum(x)),
            ),
            "all_gather": (
                lambda v: autograd.all_gather(comm, v),
                lambda: comm.reduce_scatter_sum(comm.all_gather(x)),
            ),
            "reduce_scatter_sum": (
                lambda v: autograd.reduce_scatter_sum(comm, v),
                lambda: comm.all_gather(comm.reduce_scatter_sum(x)),
            ),
            "all_to_all_v": (
                lambda v: autograd.all_to_all_v(comm, v, counts).value,
                lambda: comm.all_to_all_v(comm.all_to_all_v(x, counts).value, counts),
            ),
        }
        cases: dict[str, Callable[[], object]] = {}
        leaf = x.clone().requires_grad_()

        def pass_of(call: Callable[[Any], Any]) -> Callable[[], object]:
            def run() -> None:
                leaf.grad = None
                result = call(leaf)
                result.backward(torch.ones_like(result))

            return run

        for name, (call, plain) in pairs.items():
            cases[f"{name} plain"] = plain
            cases[f"{name} autograd"] = pass_of(call)
        cases["torch"] = pass_of(torch.clone)

        scope = autograd.CollectiveScope()
        bound = scope.bind(comm.channel("scope"))
        output = bound.all_reduce_sum(leaf).sum()
        scope.complete(output)

        def complete() -> None:
            scope.complete(output)

        cases["complete"] = complete
        cases["gather"] = lambda: comm.all_gather_object(["mask", 0, 0, b"", b""])
        return alternate(cases, comm.barrier, rounds, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--url", default="shm://overhead")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args()
    arguments = (options.rounds, options.calls)
    found = ruda_async.spawn(measure, options.ranks, url=options.url, args=arguments)[0]

    def micro(name: str) -> float:
        return 1e6 * statistics.median(found[name])

    rows, scheme = [], options.url.partition(":")[0]
    for name in sorted(key.partition(" ")[0] for key in found if key.endswith(" plain")):
        plain, through = found[f"{name} plain"], found[f"{name} autograd"]
        added = 1e6 * statistics.median(b - a for a, b in zip(plain, through, strict=True))
        rows.append(
            [
                name,
                f"{micro(f'{name} plain'):.0f} us",
                f"{micro(f'{name} autograd'):.0f} us",
                f"{added:.0f} us",
                f"{1e6 * (min(through) - min(plain)):.0f} us",
                f"{ratio(plain, through):.2f}x",
            ]
        )
    print_table(
        f"forward and backward of {SIZE} float32 a rank, {options.ranks} ranks, {scheme}",
        ["operation", "two plain calls", "through autograd", "added", "of the best", "ratio"],
        rows,
    )
    print(
        f"of which torch's own nodes: {micro('torch'):.0f} us, at best {1e6 * min(found['torch']):.0f} us "
        "(a copy in the collective's place)"
    )
    rows = [
        [
            "completing a scope",
            f"{micro('complete'):.0f} us",
            f"{ratio(found['gather'], found['complete']):.2f}x",
        ]
    ]
    rows.append(["one all_gather_object", f"{micro('gather'):.0f} us", "1.00x"])
    print_table("scope", ["", "time", "ratio"], rows)


if __name__ == "__main__":
    main()
