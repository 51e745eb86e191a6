"""Whole regions of shared memory, beside the rings: what `ruda_async.transport.Regions` asks for.

A region is an anonymous memory file. Its owner hands it to every peer at once, over a Unix socket of the
pair that carries nothing else, and keeps no descriptor; so regions need no name and no limit on open files,
and the kernel frees one with the last process that maps it. Pages come with their first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from ruda_async.transport import DONE, NO_GOODBYE, PeerLostError, RegionDestroyed, fail_future

from .mapping import map_shared
from .spare import Spare
from .stream import RingStream

__all__ = ["SharedRegions"]

#: The number of a region and its size; 0 bytes for one that is gone.
_NOTE = struct.Struct("<QQ")
#: A peer is believed so much: no single region is larger (64 TiB).
_MOST = 1 << 46


class _Peer:
    """What this rank has of one other: its regions, and waits for what it writes."""

    __slots__ = ("last", "maps", "rank", "sock", "spare", "stream", "unmapped", "unsent", "waits")

    def __init__(self, rank: int, stream: RingStream, sock: socket.socket, spare: Spare) -> None:
        self.spare = spare
        self.rank = rank
        self.stream = stream
        self.sock = sock
        self.maps: dict[int, memoryview] = {}
        #: Regions that are there, and that this rank had no room for: the ``errno``.
        self.unmapped: dict[int, int] = {}
        #: The highest number that the peer has given a region.
        self.last = 0
        self.waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        #: Regions that are gone, which the peer could not be told yet.
        self.unsent: list[int] = []

    def receive(self) -> None:
        """Take in what the peer said of its regions."""
        with self.spare:
            while self._receive_one():
                pass

    def _receive_one(self) -> bool:
        try:
            data, descriptors, flags, _ = socket.recv_fds(self.sock, _NOTE.size, 1)
        except (
            ConnectionResetError
        ):  # said once, where it died with words of ours unread; its own come after that
            return True
        except OSError:  # none is there
            return False
        try:
            if len(data) != _NOTE.size:
                return False  # the end
            number, nbytes = _NOTE.unpack(data)
            if not nbytes:
                self.maps.pop(number, None)
                self.unmapped.pop(number, None)
            elif flags & socket.MSG_CTRUNC and not descriptors:  # this process can open no more
                self._miss(number, errno.EMFILE)
            elif len(descriptors) == 1 and os.fstat(descriptors[0]).st_size == nbytes <= _MOST:
                try:
                    self.maps[number] = map_shared(descriptors[0], nbytes)
                    self.last = max(self.last, number)
                except OSError as error:
                    self._miss(number, error.errno or errno.ENOMEM)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _miss(self, number: int, reason: int) -> None:
        self.unmapped[number] = reason
        self.last = max(self.last, number)

    def wake(self) -> None:
        """The peer rang: end the waits whose condition holds, and ask again for the others."""
        while self.waits:
            still = []
            for ready, future in self.waits:
                if future.done():
                    continue
                if ready():
                    future.set_result(None)
                else:
                    still.append((ready, future))
            self.waits = still
            if not still or not self.stream.ask_for_signal(self._some_ready):
                return

    def _some_ready(self) -> bool:
        return any(ready() for ready, _ in self.waits)


class SharedRegions:
    """See `ruda_async.transport.Regions`.

    Args:
        streams: to every other rank.
        sockets: of type ``SOCK_SEQPACKET``, to every other rank, for descriptors alone.
    """

    def __init__(self, streams: Mapping[int, RingStream], sockets: Mapping[int, socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0
        self._own: dict[int, memoryview] = {}
        #: What to say of a peer that went without a goodbye; the transport knows more.
        self.no_goodbye: Callable[[], str] = lambda: NO_GOODBYE
        self._spare = Spare()
        self._peers = {rank: _Peer(rank, streams[rank], sockets[rank], self._spare) for rank in streams}
        for peer in self._peers.values():
            self._loop.add_reader(peer.sock.fileno(), peer.receive)
            peer.stream.on_signal(peer.wake, partial(self._lost, peer))

    def create(self, nbytes: int) -> tuple[int, memoryview]:
        """See `Regions.create`."""
        with self._spare:
            descriptor = os.memfd_create("ruda-async", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, nbytes)
                view = map_shared(descriptor, nbytes)
                self._last = number = self._last + 1
                self._hand_out(number, nbytes, descriptor)
            finally:
                os.close(descriptor)
        self._own[number] = view
        return number, view

    def _hand_out(self, number: int, nbytes: int, descriptor: int) -> None:
        told: list[_Peer] = []
        try:
            for peer in self._peers.values():
                self._tell_gone(peer)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died, needs none
                    socket.send_fds(peer.sock, [_NOTE.pack(number, nbytes)], [descriptor])
                told.append(peer)
        except OSError:  # all have it or none: nobody would ever take it back from those who do
            self._take_back(number, told)
            raise

    def destroy(self, number: int) -> None:
        """See `Regions.destroy`."""
        if self._own.pop(number, None) is None:
            return
        self._take_back(number, self._peers.values())

    def _take_back(self, number: int, peers: Iterable[_Peer]) -> None:
        for peer in peers:
            peer.unsent.append(number)
            self._tell_gone(peer)

    def _tell_gone(self, peer: _Peer) -> None:
        while peer.unsent:
            number = peer.unsent.pop()  # first: the last view of another may go meanwhile, in any thread
            try:
                peer.sock.send(_NOTE.pack(number, 0))
            except OSError:
                peer.unsent.append(number)
                return  # later, if it lives

    def lend(self, memory: memoryview) -> int | None:
        """See `Regions.lend`: other processes cannot see memory that was not made to be shared."""
        return None

    def open(self, peer: int, number: int) -> memoryview:
        """See `Regions.open`."""
        other = self._peers[peer]
        if number not in other.maps:
            other.receive()
            if (reason := other.unmapped.get(number)) is not None:
                raise OSError(reason, os.strerror(reason))
            if number not in other.maps and 0 < number <= other.last:
                raise RegionDestroyed(peer, number)
        return other.maps[number]

    def signal(self, peer: int) -> None:
        """See `Regions.signal`."""
        self._peers[peer].stream.signal()

    def watch(self, peer: int, ready: Callable[[], bool]) -> Awaitable[None]:
        """See `Regions.watch`."""
        other = self._peers[peer]
        if other.stream.spin_for(ready) or other.stream.ask_for_signal(ready):
            return DONE
        future: asyncio.Future[None] = self._loop.create_future()
        if other.stream.gone:
            future.set_exception(self._loss(other))
        else:
            other.waits.append((ready, future))
        return future

    def _loss(self, peer: _Peer) -> PeerLostError:
        # In the words of the links: which of them notices a death first is chance.
        return PeerLostError(f"rank {peer.rank} is lost: {self.no_goodbye()}", rank=peer.rank)

    def _lost(self, peer: _Peer) -> None:
        waits, peer.waits = peer.waits, []
        for _, future in waits:
            fail_future(future, self._loss(peer))

    def close(self) -> None:
        """Let go of everything."""
        for peer in self._peers.values():
            if peer.sock.fileno() >= 0:
                self._loop.remove_reader(peer.sock.fileno())
                peer.sock.close()
            peer.maps.clear()
        self._own.clear()
        self._spare.close()
