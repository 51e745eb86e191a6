"""Time a training step of DistributedDataParallel over this library's backend and over Gloo, in one run.

    python benchmarks/ddp.py [--ranks 2] [--parameters 10000000] [--rounds 20]

Every rank is a process with one thread for torch. All groups live in the same processes, and their steps take
turns, so that what else the machine does meets all alike. A step is a forward and a backward pass; its model
computes next to nothing, so that the step is mostly the reduction of the gradients. "alone" is the same step
without any. Times are those of the slowest rank: medians over the rounds, and the best round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ruda_async.torch_backend import Options

#: name → backend and options. The first one's time is the measure of the others'.
CONTENDERS: dict[str, tuple[str, Any]] = {
    "gloo": ("gloo", None),
    "ruda on shm": ("ruda", Options("shm://")),
    "ruda on tcp": ("ruda", Options("tcp://")),
    "ruda on shm, order=any": ("ruda", Options("shm://", {"order": "any"})),
    "ruda on tcp, order=any": ("ruda", Options("tcp://", {"order": "any"})),
}
WARM_UP = 3


class Rows(nn.Module):
    """So many parameters, in layers of 500 000; the output adds them up."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        sizes = [500_000] * (parameters // 500_000) + [parameters % 500_000 or 1]
        self.layers = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum() * scale


def rank_main(rank: int, ranks: int, parameters: int, rounds: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks)
    nets: dict[str, nn.Module] = {"alone": Rows(parameters)}
    for name, (backend, options) in CONTENDERS.items():
        group = dist.new_group(backend=backend, pg_options=options)
        nets[name] = DistributedDataParallel(Rows(parameters), process_group=group)
    times: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(WARM_UP + rounds):
        for name, net in nets.items():
            net.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            net(torch.tensor(rank + 1.0)).backward()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[name].append(took.item())
            first = next(net.parameters()).grad
            assert first is not None
            expected = rank + 1.0 if name == "alone" else (ranks + 1) / 2
            assert bool((first == expected).all()), f"{name}: a wrong gradient"
    if rank == 0:
        report({name: spent[WARM_UP:] for name, spent in times.items()})
    dist.destroy_process_group()


def report(times: dict[str, list[float]]) -> None:
    head = f"{'':24} {'step':>11} {'without alone':>14} {'times as fast':>14}"
    print(f"{head} {'best step':>12} {'times as fast':>14}")
    alone = times.pop("alone")
    base = next(iter(times.values()))
    print(f"{'alone':24} {statistics.median(alone) * 1e3:8.1f} ms {min(alone) * 1e3:40.1f} ms")
    for name, spent in times.items():
        columns = [name.ljust(24)]
        for measure, width in ((statistics.median, 8), (min, 9)):
            rest = measure(spent) - measure(alone)
            columns.append(f"{measure(spent) * 1e3:{width}.1f} ms")
            if measure is statistics.median:
                columns.append(f"{rest * 1e3:11.1f} ms")
            columns.append(f"{(measure(base) - measure(alone)) / rest:14.2f}")
        print(" ".join(columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        arguments = (asked.ranks, asked.parameters, asked.rounds, place)
        mp.spawn(rank_main, arguments, nprocs=asked.ranks)


if __name__ == "__main__":
    main()
