"""Agreement on who is left after ranks died: what `shrink` runs.

Every survivor tells every other which ranks it believes lost, in rounds, and adds what it is told. A
round in which all survivors said the same ends it. A survivor that dies meanwhile is noticed by the
transport, joins the lost and starts another round; so does one that leaves without taking part. A rank
that has finished answers late rounds with its result, which the late rank adopts; so no two survivors
end with different sets, at worst with a set that a later `shrink` has to reduce again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from .errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from .channel import Channel
    from .node import Node

__all__ = ["Recovery"]

_MAX_REMEMBERED = 256


class _Agreement:
    """The state of one shrink of one channel."""

    def __init__(self) -> None:
        self.round = 0
        self.heard: dict[tuple[int, int], frozenset[int]] = {}
        self.result: frozenset[int] | None = None
        self.changed = asyncio.Event()


class Recovery:
    """Runs agreements for one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._agreements: OrderedDict[int, _Agreement] = OrderedDict()
        node.on_survivors = self._hear

    async def agree(self, channel: Channel, id: int, timeout: float) -> frozenset[int]:
        """The job ranks of `channel` that all survivors hold for lost.

        Args:
            id: the agreement's number, the same on all survivors.
            timeout: seconds.

        Raises:
            CollectiveTimeoutError: some survivor did not take part in time.
        """
        node = self._node
        me = node.transport.rank
        agreement = self._agreements.setdefault(id, _Agreement())
        self._trim()
        members = frozenset(channel.members)
        lost = frozenset(node.lost) & members
        waited_for: list[int] = []
        try:
            async with asyncio.timeout(timeout):
                while agreement.result is None:
                    survivors = sorted(members - lost - {me})
                    for peer in survivors:
                        node.tell_survivors(peer, id, agreement.round, lost, False)
                    said = {lost}
                    silent: set[int] = set()
                    for peer in survivors:
                        waited_for = [peer]
                        while True:
                            key = (agreement.round, peer)
                            if key in agreement.heard:
                                said.add(agreement.heard[key])
                                break
                            if agreement.result is not None:
                                break
                            if peer in node.lost or peer in node.left:
                                silent.add(peer)
                                break
                            agreement.changed.clear()
                            await agreement.changed.wait()
                    if agreement.result is not None:
                        break
                    union = lost.union(*said, silent, frozenset(node.lost) & members)
                    if said == {lost} and union == lost:
                        agreement.result = lost
                    else:
                        lost = union - {me}
                        agreement.round += 1
        except TimeoutError:
            ranks = tuple(channel.members.index(p) for p in waited_for)
            raise CollectiveTimeoutError(
                f"rank {channel.rank}, channel {channel.name!r}: shrink waited {timeout:g} s for rank "
                f"{', '.join(map(str, ranks))}; every survivor has to call shrink()",
                rank=channel.rank,
                missing=ranks,
            ) from None
        agreement.heard.clear()
        return agreement.result

    def _hear(self, peer: int, id: int, round: int, lost: list[int], final: bool) -> None:
        if id < 0:  # a peer was lost or has left: whoever waits for it should look again
            for agreement in self._agreements.values():
                agreement.changed.set()
            return
        agreement = self._agreements.setdefault(id, _Agreement())
        self._trim()
        if final:
            if agreement.result is None:
                agreement.result = frozenset(lost)
        elif agreement.result is not None:
            if round > agreement.round:
                self._node.tell_survivors(peer, id, round, agreement.result, True)
        elif round < 1024:
            agreement.heard[round, peer] = frozenset(lost)
        agreement.changed.set()

    def _trim(self) -> None:
        while len(self._agreements) > _MAX_REMEMBERED:
            self._agreements.popitem(last=False)
