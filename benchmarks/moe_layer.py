"""A layer of sharded experts beside the same layer on `torch.distributed` with Gloo, in one run.

Both route, dispatch and combine by the same code (`ruda_async.moe`'s parts). Over Gloo there are three
exchanges: how many rows each expert gets, the rows, and the outputs; ours sends the first along with the
second. The experts do nothing but multiply by two, so what is measured is the layer. Results are compared to
the bit first.

    python benchmarks/moe_layer.py [--ranks 4] [--tokens 512] [--width 1024] [--url shm://moe] [--rounds 20]
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from alternating import alternate, print_table, ratio
from torch import Tensor

import ruda_async
from ruda_async import moe

EXPERTS, CHOSEN = 8, 2


def double(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The experts."""
    return rows * 2


def gloo_layer(tokens: Tensor, logits: Tensor, layout: moe.ExpertLayout, rank: int) -> Tensor:
    """The layer on `torch.distributed`; without gradients."""
    size = layout.world_size
    dispatched = moe.dispatch(tokens, moe.route(logits, CHOSEN), layout)
    told = torch.empty(size * layout.counts[rank], dtype=torch.int64)
    dist.all_to_all_single(
        told, torch.tensor(dispatched.expert_counts), [layout.counts[rank]] * size, list(layout.counts)
    )
    table = told.view(size, -1)
    receives, sends = table.sum(1).tolist(), list(dispatched.send_counts)
    rows = tokens.new_empty(sum(receives), tokens.shape[1])
    dist.all_to_all_single(rows, dispatched.rows, receives, sends)
    experts = torch.arange(table.shape[1]).repeat(size).repeat_interleave(table.reshape(-1))
    order = experts.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    outputs = double(rows.index_select(0, order), table.sum(0).tolist()).index_select(0, inverse)
    returned = torch.empty_like(dispatched.rows)
    dist.all_to_all_single(returned, outputs, sends, receives)
    return moe.combine(returned, dispatched)


def measure(port: int, tokens: int, width: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """What every rank runs."""
    torch.set_num_threads(1)
    with ruda_async.sync.connect(timeout=120) as comm, torch.no_grad():
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.world_size
        )
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(tokens, width, generator=generator)
        logits = torch.randn(tokens, EXPERTS, generator=generator)
        layout = moe.ExpertLayout.even(EXPERTS, comm.world_size)

        def ours() -> Tensor:
            return moe.moe_layer(comm, x, logits, double, layout, CHOSEN)

        def theirs() -> Tensor:
            return gloo_layer(x, logits, layout, comm.rank)

        def local() -> Any:
            dispatched = moe.dispatch(x, moe.route(logits, CHOSEN), layout)
            return moe.combine(double(dispatched.rows, ()), dispatched)

        if not torch.equal(ours(), theirs()):
            raise RuntimeError("the two layers' results differ")
        cases: dict[str, Callable[[], object]] = {"ruda": ours, "gloo": theirs, "local": local}
        found = alternate(cases, comm.barrier, rounds, calls)
        dist.destroy_process_group()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="on each rank")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--url", default="shm://moe")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (port, options.tokens, options.width, options.rounds, options.calls)
    ranks = ruda_async.spawn(measure, options.ranks, url=options.url, args=arguments)
    found = {
        name: [statistics.mean(r[name][i] for r in ranks) for i in range(options.rounds)] for name in ranks[0]
    }
    scheme = options.url.partition(":")[0]
    labels = {
        "ruda": f"ruda-async over {scheme}",
        "gloo": "torch.distributed, Gloo",
        "local": "no exchanges: routing, dispatch, combine",
    }
    rows = [
        [label, f"{1e3 * statistics.median(found[name]):.2f} ms", f"{ratio(found['ruda'], found[name]):.2f}x"]
        for name, label in labels.items()
    ]
    print_table(
        f"forward of {options.tokens} x {options.width} float32 tokens a rank, {options.ranks} ranks, "
        f"{EXPERTS} experts, {CHOSEN} a token",
        ["layer", "time", "against ruda-async"],
        rows,
    )


if __name__ == "__main__":
    main()
