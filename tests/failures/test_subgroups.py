"""Subgroups one of whose processes dies before they were ever used."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest
from support import BETWEEN_PROCESSES, fresh_url, outcome, running_programs

import ruda_async
from ruda_async import PeerLostError

PEER = """
import sys
import ruda_async
with ruda_async.sync.connect(sys.argv[1], rank=int(sys.argv[2]), world_size=3, timeout=60) as comm:
    half = comm.split(0, key=-comm.rank)
    pair = comm.subgroup([2, 0], "pair") if comm.rank == 2 else None
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
async def test_its_first_call_fails_at_once(scheme: str) -> None:
    """With the lost rank's number in the group, whatever the deadline."""
    url = fresh_url(scheme)
    with running_programs(PEER, url, (1, 2)) as peers:
        async with ruda_async.connect(url, rank=0, world_size=3, timeout=300) as comm:
            group = await comm.split(0, key=-comm.rank)
            assert group is not None
            pair = comm.subgroup([2, 0], "pair")
            for peer in peers:
                assert peer.stdout is not None
                assert peer.stdout.readline() == "ready\n"
            peers[1].kill()
            peers[1].wait()
            started = monotonic()
            for call in (
                group.all_reduce(np.ones(200_000)),
                pair.send(np.ones(2_000_000), 0),
                pair.recv(0, tag=3),
                pair.barrier(),
                comm.subgroup([0, 2, 1], "made later").broadcast(np.ones(3), 0),
            ):
                error = await outcome(call)
                assert isinstance(error, PeerLostError), error
                assert "rank" in str(error)
            assert error.rank == 1  # of the subgroup that was made later
            assert monotonic() - started < 5
            with pytest.raises(PeerLostError) as caught:
                await group.barrier()
            assert caught.value.rank == 0
