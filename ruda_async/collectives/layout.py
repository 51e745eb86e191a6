"""Which ranks of a group share a host, and who deals with whom for it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..tensors.arithmetic import Tree, order
from ..transport.locality import host_numbers

if TYPE_CHECKING:
    from ..transport.base import Capabilities

__all__ = ["Layout", "host_order", "layout_of", "narrowed", "subtrees"]


@lru_cache(maxsize=256)
def narrowed(capabilities: Capabilities, members: tuple[int, ...]) -> Capabilities:
    """A transport's capabilities for the group of `members`: with the hosts of these ranks alone."""
    hosts = capabilities.hosts
    if hosts is None or members == tuple(range(len(hosts))):
        return capabilities
    return replace(capabilities, hosts=host_numbers([hosts[member] for member in members]))


class Layout:
    """The hosts of a group.

    Attributes:
        hosts: the host of each rank.
        members: the ranks of each host, in order.
    """

    __slots__ = ("_mates", "_others", "_place", "_served", "hosts", "members")

    def __init__(self, hosts: tuple[int, ...]) -> None:
        ranks, numbers = range(len(hosts)), range(max(hosts) + 1)
        self.hosts = hosts
        self.members = tuple(tuple(rank for rank in ranks if hosts[rank] == host) for host in numbers)
        self._place = [self.members[hosts[rank]].index(rank) for rank in ranks]
        self._mates = [_round(self.members[hosts[rank]], self._place[rank]) for rank in ranks]
        self._others = [_round(tuple(numbers), host) for host in numbers]
        served: list[list[int]] = [[] for _ in ranks]
        for rank in ranks:
            for host in self.others(rank):
                served[self.proxy(host, rank)].append(rank)
        self._served = list(map(tuple, served))

    def proxy(self, host: int, rank: int) -> int:
        """The rank of `host` that deals with `rank` for all of that host; `rank` itself on its own.

        The ranks of other hosts are spread evenly over those of `host`.
        """
        if self.hosts[rank] == host:
            return rank
        members = self.members[host]
        return members[(self._place[rank] + self.hosts[rank]) % len(members)]

    def mates(self, rank: int) -> tuple[int, ...]:
        """The other ranks of `rank`'s host, from the next one round."""
        return self._mates[rank]

    def others(self, rank: int) -> tuple[int, ...]:
        """The hosts that are not `rank`'s, from the next one round."""
        return self._others[self.hosts[rank]]

    def served(self, proxy: int) -> tuple[int, ...]:
        """The ranks of other hosts with which `proxy` deals for its host, in rank order."""
        return self._served[proxy]


def _round(items: tuple[int, ...], place: int) -> tuple[int, ...]:
    """All but the one at `place`, from the next one round."""
    return items[place + 1 :] + items[:place]


@lru_cache(maxsize=256)
def layout_of(hosts: tuple[int, ...]) -> Layout:
    """The layout of `Capabilities.hosts`."""
    return Layout(hosts)


def host_order(layout: Layout) -> Tree:
    """An order of reduction in which each host's ranks combine first; not the documented one."""
    return _balanced([_balanced(list(members)) for members in layout.members])


def _balanced(nodes: list[Tree]) -> Tree:
    while len(nodes) > 1:
        pairs: list[Tree] = [(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
        nodes = pairs + nodes[len(nodes) & ~1 :]
    return nodes[0]


@lru_cache(maxsize=256)
def subtrees(hosts: tuple[int, ...], exact: bool) -> tuple[Tree, tuple[tuple[Tree, ...], ...]]:
    """The order of reduction, and for each host its largest parts that lie within the host.

    Args:
        hosts: the host of each rank.
        exact: the documented order; else `host_order`, where every host is one part.

    >>> subtrees((0, 0, 1, 1), True)
    (((0, 1), (2, 3)), (((0, 1),), ((2, 3),)))
    >>> subtrees((0, 1, 0, 1), True)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    layout = layout_of(hosts)
    tree = order(len(hosts)) if exact else host_order(layout)
    found: list[list[Tree]] = [[] for _ in layout.members]

    def visit(node: Tree) -> int | None:
        """The one host that `node` lies in, or None; then its parts have been entered."""
        if isinstance(node, int):
            return hosts[node]
        sides = [visit(side) for side in node]
        if sides[0] == sides[1] and sides[0] is not None:
            return sides[0]
        for side, host in zip(node, sides, strict=True):
            if host is not None:
                found[host].append(side)
        return None

    visit(tree)
    return tree, tuple(map(tuple, found))
