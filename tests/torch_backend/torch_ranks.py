"""A rank of `test_meeting`: ``python torch_ranks.py BODY`` under torchrun, or with its variables set.

It does not import `ruda_async`: the backend comes from its entry point.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=150)  # a busy host takes its time over importing torch
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = {"rank": RANK, "world_size": WORLD_SIZE}


def works() -> None:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    assert value.item() == sum(range(dist.get_world_size()))
    assert dist.get_backend() == "ruda"
    dist.barrier()


def scheme() -> str:
    world: Any = dist.group.WORLD
    found: str = world.communicator.describe()["transport"]["scheme"]
    return found


def meet(folder: str, port: str, other_port: str) -> None:
    """Every way of meeting, one after the other in the same processes."""
    from ruda_async.torch_backend import BackendError, Options

    tcp_store = f"tcp://127.0.0.1:{port}"
    ways: list[tuple[str | None, dict[str, Any]]] = [
        (None, {}),  # env://, with the default transport
        ("shm://", {}),
        (f"shm://job-{port}", {}),
        (f"tcp://127.0.0.1:{other_port}", {}),
        (None, {"init_method": tcp_store, **HERE}),
        ("shm://", {"init_method": tcp_store, **HERE}),
        (None, {"init_method": f"file://{folder}/store", **HERE}),
        (None, {"init_method": f"shm://another-{port}", **HERE}),
        (None, {"init_method": f"shm://third-{port}?heartbeat=1"}),  # rank and size from the environment
        (None, {"pg_options": Options("tcp://", {"order": "any"})}),
        (f"tcp://127.0.0.1:{other_port}", {"init_method": "ruda://"}),
    ]
    for url, arguments in ways:
        os.environ.pop("RUDA_URL", None)
        if url is not None:
            os.environ["RUDA_URL"] = url
        for _ in range(2):  # and again, after the first has ended
            dist.init_process_group("ruda", timeout=LIMIT, **arguments)
            works()
            dist.destroy_process_group()
            if "file://" in arguments.get("init_method", ""):
                break  # torch's file store is for one group
    os.environ.pop("RUDA_URL", None)
    store = dist.TCPStore("127.0.0.1", int(other_port), WORLD_SIZE, RANK == 0, LIMIT)
    for _ in range(3):  # a store that outlives its groups
        dist.init_process_group("ruda", store=store, timeout=LIMIT, **HERE)
        works()
        dist.destroy_process_group()
    for options, kind in ((Options("nonsense://"), BackendError), (object(), TypeError)):
        with pytest.raises(kind, match=r"nonsense|Options"):
            dist.init_process_group("ruda", store=store, timeout=LIMIT, pg_options=options, **HERE)
    dist.init_process_group("gloo", store=store, timeout=LIMIT, **HERE)
    groups = [dist.new_group(backend="ruda", pg_options=Options(url)) for url in ("shm://", "tcp://")]
    for group in groups:  # beside another backend's default group, with connections of their own
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == WORLD_SIZE
    dist.destroy_process_group()


def die() -> None:
    """Rank 1 dies in the middle of a call."""
    from ruda_async import PeerLostError
    from ruda_async.torch_backend import BackendError

    dist.init_process_group("ruda", timeout=LIMIT)
    works()
    if RANK == 1:
        os._exit(0)
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    for call in (work.wait, work.get_future().wait, dist.barrier):
        with pytest.raises(RuntimeError, match="PeerLostError"):
            call()
    failed = work.exception()
    assert isinstance(failed, BackendError)
    assert isinstance(failed.error, PeerLostError)
    assert failed.rank == 1
    dist.destroy_process_group()


def leave() -> None:
    """A script that forgets to destroy its group."""
    dist.init_process_group("ruda", timeout=LIMIT)
    works()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"meet": meet, "die": die, "leave": leave}[sys.argv[1]](*sys.argv[2:])
    os.write(1, f"rank {RANK} done\n".encode())  # at once: torchrun's ranks share one stream
