"""How actors that are joining a group hear that it cannot form: by Ray's own table of keys and values.

An actor that blocks takes no further call before it has joined, so the driver, which alone hears of every
actor's death, cannot call it: it writes why under a key of this attempt, at which the actors look meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgpack

from ..communicator import AsyncCommunicator
from ..errors import CollectiveCancelledError, PeerLostError, RudaError

__all__ = ["Attempt"]

#: Seconds between two looks at the table, while a group meets.
_PAUSE = 0.1


class Attempt(NamedTuple):
    """One attempt of a group to form.

    Attributes:
        group: its name.
        key: of the entry that says why it failed.
    """

    group: str
    key: str

    @classmethod
    def new(cls, group: str) -> Attempt:
        """An attempt that no other is taken for."""
        return cls(group, f"failed/{secrets.token_hex(16)}")

    # ------------------------------------------------------------------ the driver

    def failed(self, error: BaseException, joins: Sequence[Any]) -> None:
        """Tell the actors why, until all their calls `joins` (Ray's references) have ended."""
        from . import table

        rank = error.rank if isinstance(error, RudaError) else None
        text = str(error) or type(error).__name__
        table.put(self.key, msgpack.packb([isinstance(error, PeerLostError), rank, text]))
        left = len(joins)
        counting = threading.Lock()

        def ended(join: Any) -> None:
            nonlocal left
            with counting:
                left -= 1
                last = not left
            if last:  # called by a thread of Ray, which may not wait for Ray
                threading.Thread(target=table.delete, args=(self.key,), daemon=True).start()

        for join in joins:
            join.future().add_done_callback(ended)

    # ------------------------------------------------------------------ an actor

    async def unless_failed(self, connecting: Awaitable[AsyncCommunicator]) -> AsyncCommunicator:
        """What `connecting` makes, unless the driver says meanwhile that the group cannot form.

        Raises:
            PeerLostError: an actor is dead.
            CollectiveCancelledError: the group cannot form for another reason.
        """
        joining = asyncio.ensure_future(_made(connecting))
        hearing = asyncio.ensure_future(self._hear())
        made = None
        try:
            await asyncio.wait({joining, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done() and hearing.exception() is None:
                raise hearing.result()
            made = await joining  # also where the table cannot be read: there is a deadline
            return made
        finally:
            for task in (joining, hearing):
                task.cancel()
            await asyncio.gather(joining, hearing, return_exceptions=True)
            if made is None and not joining.cancelled() and joining.exception() is None:
                joining.result().abort("the group did not form")  # it was quicker than its end

    async def _hear(self) -> RudaError:
        """Why this attempt failed, as soon as the driver says so."""
        from . import table

        loop = asyncio.get_running_loop()
        reader = ThreadPoolExecutor(1, "ruda-async ray")  # reading the table blocks
        try:
            while (entry := await loop.run_in_executor(reader, table.get, self.key)) is None:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
        finally:
            reader.shutdown(wait=False)
        lost, rank, text = msgpack.unpackb(entry)
        kind = PeerLostError if lost else CollectiveCancelledError
        return kind(f"group {self.group!r} cannot form: {text}", rank=rank)


async def _made(connecting: Awaitable[AsyncCommunicator]) -> AsyncCommunicator:
    return await connecting
