"""Memory that all ranks see, where one of them has no room for it: whose trouble it is, and what is left."""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import Any

import numpy as np
import pytest
from support import SCHEMES, fresh_url, outcome, run_ranks

from ruda_async import AsyncCommunicator, ProtocolError, RudaError
from ruda_async.transport import RegionDestroyed

pytestmark = pytest.mark.skipif("shm" not in SCHEMES, reason="no shared memory transport here")

if "shm" in SCHEMES:
    from ruda_shm import regions
    from ruda_shm.regions import _NOTE, SharedRegions, _Peer
    from ruda_shm.spare import Spare


def regions_of(comm: AsyncCommunicator) -> SharedRegions:
    return comm.node.heap.regions  # type: ignore[union-attr, return-value]


def no_room(descriptor: int, nbytes: int) -> memoryview:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


async def test_a_region_is_given_to_all_or_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has been given one that others cannot have is told that it is gone."""
    send_fds = socket.send_fds

    async def body(comm: AsyncCommunicator) -> None:
        ours = regions_of(comm)
        number = ours._last + 1
        await comm.barrier()
        if comm.rank == 0:

            def send(sock: socket.socket, *rest: Any) -> int:
                if sock is ours._peers[2].sock:
                    raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
                return send_fds(sock, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(socket, "send_fds", send)
                with pytest.raises(OSError, match="Too many references"):
                    ours.create(4096)
        await comm.barrier()
        if comm.rank == 1:
            with pytest.raises(RegionDestroyed):
                ours.open(0, number)
            assert number not in ours._peers[0].maps
        await comm.barrier()
        assert (await comm.all_reduce_sum(np.ones(10_000)) == 3).all()

    await run_ranks(3, body, url=fresh_url("shm"), algorithm="shared")


def test_no_descriptor_to_take_a_region_in() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    spare = Spare()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        peer = _Peer(1, None, ours, spare)  # type: ignore[arg-type]
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, 4096)
        socket.send_fds(theirs, [_NOTE.pack(7, 4096)], [descriptor])
        os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            peer.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert peer.unmapped == {7: errno.EMFILE}
        assert peer.last == 7
        theirs.send(_NOTE.pack(7, 0))
        peer.receive()
        assert not peer.unmapped
        spare.close()


async def test_who_cannot_map_a_peers_memory_names_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the peer's; the call ends on all ranks, and with room again the next one works."""
    tight = False
    receive = _Peer.receive

    def receive_where_room_may_be_tight(self: _Peer) -> None:
        with monkeypatch.context() as patch:
            if tight and self.rank == 0:
                patch.setattr(regions, "map_shared", no_room)
            receive(self)

    monkeypatch.setattr(_Peer, "receive", receive_where_room_may_be_tight)

    async def body(comm: AsyncCommunicator) -> None:
        nonlocal tight
        mine = np.ones(300_000)
        await comm.barrier()
        tight = True
        error = await outcome(comm.all_reduce_sum(mine))
        assert isinstance(error, RudaError)
        assert not isinstance(error, ProtocolError)
        assert "no room here to map shared memory of rank 0 (Cannot allocate memory)" in str(error)
        assert "ulimit -v" in str(error)
        await comm.barrier()
        tight = False
        for _ in range(3):
            assert (await comm.all_reduce_sum(mine) == comm.world_size).all()

    await run_ranks(3, body, url=fresh_url("shm"), algorithm="shared")
