"""One rank of a program that has a process group of torch already. Run by `test_torch_gloo`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ruda_async


def main() -> None:
    dist.init_process_group("gloo")
    for turn in range(3):
        with ruda_async.sync.connect("torch+gloo://", timeout=60, order="any", native_bytes=0) as comm:
            assert (comm.rank, comm.world_size) == (dist.get_rank(), dist.get_world_size())
            x = torch.full((1000,), float(comm.rank + turn))
            assert torch.equal(comm.all_reduce(x), torch.full((1000,), 2.0 * turn + 1))
            assert ": gloo, " in comm.explain("all_reduce", 4000)
            theirs = x.clone()
            with pytest.raises(ruda_async.ConfigError, match="takes in no new ranks"):
                comm.grow(1, timeout=10)
            dist.all_reduce(theirs)  # the program's group still works beside it
            assert torch.equal(theirs, torch.full((1000,), 2.0 * turn + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
