"""Endpoints over a UCX listener: for networks where UCX has to connect by sockaddr (rdmacm).

Whoever dials a listener is nobody at first. So the lower rank of a pair lets the higher ones dial one after
the other, sends each a number drawn for it over the new endpoint, and believes in the endpoint when the
number comes back over the pair's authenticated connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ruda_async.transport import CollectiveTimeoutError, Job, PeerLostError, read_exactly

from .engine import Engine

__all__ = ["Listening"]

_GO = b"go"
_NUMBER = 16


class Listening:
    """This rank's listener, while the job is set up.

    Attributes:
        port: where it listens, on all addresses.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[int] = asyncio.Queue()
        self._listener = engine.listener(self._on_request)
        self.port: int = self._listener.port

    def _on_request(self, request: int) -> None:
        """UCX has a connection for us; it calls from whichever thread drives it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    async def link(
        self,
        job: Job,
        session: bytes,
        lifelines: Mapping[int, socket.socket],
        dial: Callable[[int], Any],
    ) -> dict[int, Any]:
        """An endpoint to every other rank.

        Args:
            dial: makes an endpoint to a lower rank's listener.

        Raises:
            PeerLostError: a rank died meanwhile.
            CollectiveTimeoutError: it takes too long.
        """
        endpoints: dict[int, Any] = {}
        rank = job.rank
        try:
            async with asyncio.timeout(job.remaining()):
                for peer in sorted(lifelines):
                    try:
                        if peer < rank:
                            endpoints[peer] = await self._dial(job, session, peer, lifelines[peer], dial)
                        else:
                            endpoints[peer] = await self._accept(job, session, peer, lifelines[peer])
                    except OSError as error:
                        raise PeerLostError(
                            f"rank {rank}: rank {peer} died while UCX connected to it: {error}", rank=peer
                        ) from None
        except TimeoutError:
            missing = tuple(peer for peer in lifelines if peer not in endpoints)
            raise CollectiveTimeoutError(
                f"rank {rank} of {job.world_size}: UCX did not connect to rank {missing[0]} within "
                f"timeout={job.timeout:g} s; look for a firewall, or leave listen= out",
                missing=missing,
            ) from None
        return endpoints

    async def _dial(
        self, job: Job, session: bytes, peer: int, lifeline: socket.socket, dial: Callable[[int], Any]
    ) -> Any:
        if await read_exactly(self._loop, lifeline, len(_GO)) != _GO:
            raise OSError("it sent nonsense")
        number = bytearray(_NUMBER)
        came: asyncio.Future[int] = self._loop.create_future()
        tag = _number_tag(job, session, job.rank)

        def arrived(status: int) -> None:
            if not came.done():
                came.set_result(status)

        self._engine.receive(peer, memoryview(number), tag, arrived)
        endpoint = dial(peer)
        if await came:
            raise OSError("UCX cannot reach it")
        await self._loop.sock_sendall(lifeline, number)
        return endpoint

    async def _accept(self, job: Job, session: bytes, peer: int, lifeline: socket.socket) -> Any:
        tag = self._engine.tag(_number_tag(job, session, peer))
        await self._loop.sock_sendall(lifeline, _GO)
        drawn: dict[bytes, Any] = {}
        answer = asyncio.ensure_future(read_exactly(self._loop, lifeline, _NUMBER))
        try:
            while True:  # a stranger may dial too: it never learns of a way to answer
                dialled = asyncio.ensure_future(self._requests.get())
                done, _ = await asyncio.wait((answer, dialled), return_when=asyncio.FIRST_COMPLETED)
                if dialled not in done:
                    dialled.cancel()
                    break
                endpoint = self._engine.accept(self._listener, dialled.result())
                number = secrets.token_bytes(_NUMBER)
                drawn[number] = endpoint
                self._engine.send(peer, endpoint, number, tag)
        finally:
            answer.cancel()
        try:
            return drawn[bytes(answer.result())]
        except KeyError:
            raise OSError("it answered with a number that it was not given") from None

    def close(self) -> None:
        """Stop listening."""
        self._listener = None


def _number_tag(job: Job, session: bytes, rank: int) -> int:
    """The tag of the number for `rank`; a payload's, and like those not to be guessed."""
    text = b"ruda-async ucx number|" + session + b"|" + rank.to_bytes(4, "big")
    return 1 << 63 | int.from_bytes(hmac.digest(job.secret.reveal(), text, hashlib.sha256)[:8], "big")
