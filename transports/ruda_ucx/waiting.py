"""What the callers of a send or a receive wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Protocol

__all__ = ["Party", "Pending", "Staged"]


class Party(Protocol):
    """The half of a link that works on a message."""

    def look(self, future: asyncio.Future[None]) -> None:
        """Somebody is about to wait for `future`."""
        ...

    def settling(self, future: asyncio.Future[None]) -> asyncio.Future[None] | None:
        """What to wait for until the buffers of `future`'s message are left alone; None if they are."""
        ...


class Pending:
    """A message under way.

    UCX cannot be stopped in the middle of a part that it is copying. So where a wait is cancelled, or fails
    for another reason, it ends once the parts under way have, and the buffers are the caller's again.
    """

    __slots__ = ("_future", "_party")

    def __init__(self, future: asyncio.Future[None], party: Party) -> None:
        self._future = future
        self._party = party

    def __await__(self) -> Generator[Any, None, None]:
        future = self._future
        if not future.done():
            self._party.look(future)
        try:
            yield from future
        except BaseException:
            settled = self._party.settling(future)
            while settled is not None and not settled.done():
                try:
                    yield from asyncio.shield(settled)
                except asyncio.CancelledError:
                    continue  # a second cancellation: the first is on its way already
            raise


class Staged:
    """A receive into host memory that stands for device memory; `land` copies it there."""

    __slots__ = ("_inner", "_land")

    def __init__(self, inner: Any, land: Callable[[], None]) -> None:
        self._inner = inner
        self._land = land

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._inner.__await__()
        self._land()
