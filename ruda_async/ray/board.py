"""How the ranks of a group of ``ray.util.collective`` find rank 0: by Ray's own table of keys and values.

There is no driver to carry the place: each rank is told the group's name, its number, and how many there are.
A group that died may have left its keys behind, so no key is believed for its name alone: each rank enters a
random *token*, rank 0 writes the place together with the tokens that it has seen, and a rank takes a place
only where it finds its own.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any, NamedTuple

import msgpack
import ray

from ..errors import CollectiveTimeoutError
from . import table
from .place import Place

__all__ = ["Board"]

#: Seconds between two looks at the table, while a group meets.
_PAUSE = 0.05


class Board(NamedTuple):
    """One group's keys.

    Attributes:
        group: the group's name.
        rank, world_size: this rank, and how many there are.
    """

    group: str
    rank: int
    world_size: int

    def _key(self, rank: int) -> str:
        # Named as Ray's named actors are: once for each Ray namespace.
        space = ray.get_runtime_context().namespace
        return f"{space}/{self.group}/{self.world_size}/{rank}"

    def publish(self, place: Place, met: threading.Event) -> None:
        """Rank 0: show `place` to every rank that comes, until the group has `met`."""
        keys = [self._key(rank) for rank in range(1, self.world_size)]
        shown: list[Any] = [None]
        while True:
            tokens = [token for key in keys if (token := table.get(key)) is not None]
            if tokens != shown:
                table.put(self._key(0), msgpack.packb([place.url, place.secret, tokens]))
                shown = tokens
            if met.wait(_PAUSE):
                table.delete(self._key(0))
                return

    def find(self, timeout: float) -> Place:
        """Any other rank: the place where this group meets.

        Raises:
            CollectiveTimeoutError: rank 0 did not show one in time.
        """
        token, deadline = secrets.token_bytes(16), time.monotonic() + timeout
        table.put(self._key(self.rank), token)
        try:
            while True:
                entry = table.get(self._key(0))
                if entry is not None:
                    url, secret, tokens = msgpack.unpackb(entry)
                    if token in tokens:
                        return Place(url, secret, self.world_size)
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"rank {self.rank} of {self.world_size}: rank 0 of Ray's collective group "
                        f"{self.group!r} did not come within timeout={timeout:g} s; see that its actor has "
                        "initialised the group, or raise RUDA_TIMEOUT",
                        missing=(0,),
                    )
                time.sleep(_PAUSE)
        finally:
            table.delete(self._key(self.rank))
