"""Joining a job: the links, the store where process groups meet, and the provider beside the links."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ruda_async.transport import (
    Capabilities,
    CollectiveTimeoutError,
    Job,
    Meeting,
    Plugin,
    ProtocolError,
    Transport,
    TransportUnavailableError,
    extract_parameters,
    in_thread,
)

from .groups import meet as meet_at
from .groups import missing
from .provider import TorchProvider

__all__ = ["TorchTransport", "open_transport"]

#: Its stores are no part of what it declares for type checkers.
_dist: Any = dist
#: The tag of the message that says where the store is; sent and received before anybody else sends.
_TAG = (1 << 64) - 1


async def open_transport(job: Job, backend: str, links: Plugin, *, placed: bool) -> TorchTransport:
    """Join `job`.

    Args:
        job: with the parameters of the links, and `TorchParameters`.
        backend: torch's name of it.
        links: the transport that links the ranks.
        placed: whether the program has a default process group, whose store is the meeting place then.

    Raises:
        TransportUnavailableError: this torch lacks the backend; and what ``links.connect`` raises.
    """
    reason = missing(backend)
    if reason is not None:
        raise TransportUnavailableError(f"torch+{backend}: {reason}")
    least = job.parameters.native_bytes
    linked = replace(job, parameters=extract_parameters(links.parameters, job.parameters))
    if placed:
        store = _dist.PrefixStore(f"ruda/{job.name}", _dist.distributed_c10d._get_default_store())
        linked = replace(
            linked,
            host=job.host or os.environ.get("MASTER_ADDR"),
            rendezvous=_meet_in(store),
            grows=False,  # nor does the program's group
        )
    transport = await links.connect(linked)
    try:
        server, dial = await _store(transport, linked)
    except BaseException:
        transport.abort("the store of its process groups was not made")
        raise
    return TorchTransport(transport, backend, _provider(backend)(dial, least), server)


def _provider(backend: str) -> type[TorchProvider]:
    if backend == "nccl":
        from .nccl import NcclProvider

        return NcclProvider
    from .gloo import GlooProvider

    return GlooProvider


# ---------------------------------------------------------------------- meeting


def _meet_in(store: Any) -> Callable[[Job, bytes, object], Awaitable[Meeting]]:
    """A rendezvous through the store of the program's own process group.

    Every rank counts its meetings, so that nothing of a former one is read.
    """

    async def meet(job: Job, payload: bytes, address: object) -> Meeting:
        wait = timedelta(seconds=job.remaining())
        given_up = threading.Event()

        def exchange() -> Meeting | None:
            number = store.add(f"count/{job.rank}", 1)
            session = secrets.token_bytes(16) if job.rank == 0 else b""
            store.set(f"{number}/{job.rank}", session + payload)
            keys = [f"{number}/{rank}" for rank in range(job.world_size)]
            if not meet_at(store, keys, wait, given_up.is_set):
                return None
            payloads = [bytes(store.get(key)) for key in keys]
            first = payloads[0]
            return Meeting([first[16:], *payloads[1:]], first[:16])

        try:
            meeting, why = await in_thread(exchange), ""
        except (dist.DistStoreError, RuntimeError) as error:
            meeting, why = None, f" ({str(error).splitlines()[0]})"
        finally:
            given_up.set()
        if meeting is None:
            raise CollectiveTimeoutError(
                f"rank {job.rank} of {job.world_size}: not all ranks met in the store of torch's process "
                f"group within timeout={job.timeout:g} s; every rank has to connect{why}",
                rank=job.rank,
            )
        return meeting

    return meet


async def _store(transport: Transport, job: Job) -> tuple[Any, Callable[[timedelta], Any]]:
    """Rank 0's store, on rank 0, and how every rank reaches it, under a prefix that is new.

    Each process group dials it anew: a store serves one call at a time, so a group that waits in it would
    keep another one of this rank from ever coming together.
    """
    host = job.host or "127.0.0.1"
    others = [rank for rank in range(job.world_size) if rank != job.rank]
    server: Any = None
    if job.rank == 0:
        server = await in_thread(lambda: _serve(host, job.remaining()))
        port: int = server.port
        session = secrets.token_hex(16)
        notice = memoryview(f"{session}{port:05d}".encode())
        for sending in [transport.send(rank, _TAG, (notice,), b"store") for rank in others]:
            await sending
    else:
        room = bytearray(37)
        try:
            async with asyncio.timeout(job.remaining()):
                await transport.recv_into(0, _TAG, (memoryview(room),), b"store")
        except TimeoutError:
            raise job.silent(0, "did not say where its store is") from None
        if not room.isascii() or not room[32:].isdigit() or int(room[32:]) > 65535:
            raise ProtocolError("rank 0 sent no address of its store", rank=0)
        session, port = room[:32].decode(), int(room[32:])

    def dial(wait: timedelta) -> Any:
        store = _dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
        return _dist.PrefixStore(session, store)

    return server, dial


def _serve(host: str, seconds: float) -> Any:
    """A store on a free port, at the address that the URL names and no other."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    return _dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


# ---------------------------------------------------------------------- the transport


class TorchTransport:
    """The links' transport with a provider. See `ruda_async.transport.Transport`."""

    def __init__(self, inner: Transport, backend: str, provider: TorchProvider, server: Any) -> None:
        self._inner = inner
        self._backend = backend
        self._provider = provider
        self._server = server
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.capabilities: Capabilities = inner.capabilities
        self.providers = (provider,)
        # The hot calls are the links' own, without a wrapper around them.
        self.send = inner.send
        self.recv_into = inner.recv_into
        self.probe = inner.probe
        self.fail = inner.fail
        self.stats = inner.stats

    @property
    def is_stale(self) -> Callable[[int], bool]:
        """See `Transport.is_stale`."""
        return self._inner.is_stale

    @is_stale.setter
    def is_stale(self, asked: Callable[[int], bool]) -> None:
        self._inner.is_stale = asked

    def describe(self) -> dict[str, object]:
        """See `Transport.describe`."""
        return {**self._inner.describe(), "scheme": f"torch+{self._backend}"}

    async def close(self) -> None:
        """See `Transport.close`."""
        try:
            await self._inner.close()
        finally:
            self._provider.close()

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        self._inner.abort(reason)
        self._provider.close()
