"""Moving data where ranks share hosts: each byte goes to another host once, and on within it.

All ranks of a host take part in the traffic between hosts: every rank elsewhere has one *proxy* among them
(`layout.Layout.proxy`), so that links are used side by side. In the counts below there are n ranks on H
hosts, h of them on each; the group's hosts may be of any size and in any order.

The shape of these algorithms, work within a node around work between nodes, is that of Karonis et al.,
"Exploiting hierarchy in parallel computer networks to optimize collective operation performance" (2000), and
Träff, "Efficient allgather for regular SMP-clusters" (2006), here without a single leader per node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from struct import pack, unpack
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from .layout import layout_of
from .messages import Placing, copy_all, cut, message_limit, scratch, split

if TYPE_CHECKING:
    from .layout import Layout
    from .operation import Link

__all__ = ["all_gather", "all_to_all_v", "layout_for", "staged"]

_WORD = 8
#: Lanes: straight from a rank to one that wants its data, through a proxy, and from proxies between hosts.
_STRAIGHT, _ON, _BETWEEN = 0, 1, 2


def layout_for(link: Link) -> Layout:
    """The layout of a group whose ranks share hosts."""
    hosts = link.capabilities.hosts
    if hosts is None:
        raise ValueError("a hierarchical algorithm needs ranks that share hosts")
    return layout_of(hosts)


async def staged(link: Link, chunks: int, stages: Sequence[Callable[[int], Awaitable[None]]]) -> None:
    """Take every chunk through the stages, each chunk a stage behind the one before.

    A stage may wait for what other ranks send in earlier stages of the same chunk: since all ranks take the
    same steps, the slowest of them has been sent all that it waits for.
    """
    for tick in range(chunks + len(stages) - 1):
        if tick:
            await link.turn()
        for depth in reversed(range(len(stages))):
            if 0 <= tick - depth < chunks:
                await stages[depth](tick - depth)


# ---------------------------------------------------------------------- all-gather


async def all_gather(link: Link, out: memoryview, shard_nbytes: int) -> None:
    """Each shard goes straight to its host-mates and to its proxy on every other host, which passes it on.

    Two rounds. Between hosts there are n(H-1) messages (per segment) and each host takes in (n-h) shards, the
    least there can be; sent directly it is n(n-h) messages and h times the bytes, and a ring takes n-1 shards
    into each host. Long shards are cut into segments, passed on while the next ones arrive.

    Args:
        link: the group, whose ranks share hosts.
        out: ``size * shard_nbytes`` bytes; this rank's shard lies at ``rank * shard_nbytes``.
        shard_nbytes: bytes of one rank's shard.
    """
    layout = layout_for(link)
    rank, limit = link.rank, message_limit(link)
    mates = layout.mates(rank)
    targets = [*(layout.proxy(host, rank) for host in layout.others(rank)), *mates]
    served = {member: layout.served(member) for member in (rank, *mates)}
    step = max(min(limit, link.capabilities.segment_bytes), 1)
    arriving: dict[int, list[Awaitable[None]]] = {}
    moving: dict[int, list[Awaitable[None]]] = {}

    def segment(source: int, number: int) -> memoryview:
        start = source * shard_nbytes
        return out[start + number * step : min(start + (number + 1) * step, start + shard_nbytes)]

    async def start(number: int) -> None:
        arriving[number] = [
            link.recv_into(source, segment(source, number), lane=_STRAIGHT) for source in served[rank]
        ]
        moving[number] = waits = [
            link.recv_into(mate, segment(mate, number), lane=_STRAIGHT) for mate in mates
        ]
        for mate in mates:
            if served[mate]:
                messages = cut([segment(source, number) for source in served[mate]], limit)
                waits += [link.recv_into(mate, *message, lane=_ON) for message in messages]
        waits += [link.send(target, segment(rank, number), lane=_STRAIGHT) for target in targets]

    async def pass_on(number: int) -> None:
        for arrival in arriving.pop(number):
            await arrival
        if served[rank]:
            for message in cut([segment(source, number) for source in served[rank]], limit):
                moving[number] += [link.send(mate, *message, lane=_ON) for mate in mates]

    async def finish(number: int) -> None:
        for transfer in moving.pop(number):
            await transfer

    await staged(link, max(-(-shard_nbytes // step), 1), (start, pass_on, finish))


# ---------------------------------------------------------------------- all-to-all-v


async def all_to_all_v(
    link: Link,
    outgoing: Sequence[memoryview],
    unit: int,
    place: Placing,
) -> None:
    """Rows for another host are joined by the destination's proxy here, which sends those of all its mates.

    Two rounds: to the proxy within the host, and from it to the destination. Between hosts each row travels
    once, as in a direct exchange, in at most 2n(H-1) messages (a table of lengths, and the rows where there
    are any; from a host with one rank the rows alone) instead of n(n-h). So there are never more messages,
    and 8h bytes more of tables for each destination and other host. Arguments as for `messages.uneven`.

    Raises:
        ProtocolError: a length is not a multiple of `unit`, or is not what follows.
    """
    layout = layout_for(link)
    rank, size = link.rank, link.size
    mates = layout.mates(rank)
    served = {member: layout.served(member) for member in (rank, *mates)}
    sends: list[Awaitable[None]] = []
    for mate in mates:
        sends.append(link.send(mate, outgoing[mate], lane=_STRAIGHT))
        if served[mate]:
            sends += _send_table(link, mate, [outgoing[peer] for peer in served[mate]], _ON)
    sends += await _forward(link, layout, outgoing, unit)
    lengths = [0] * size
    lengths[rank] = len(outgoing[rank])
    for mate in mates:
        lengths[mate] = _checked(link, mate, (await link.probe(mate, lane=_STRAIGHT)).nbytes, unit)
    for host in layout.others(rank):
        sources, proxy = layout.members[host], layout.proxy(host, rank)
        if len(sources) == 1:
            nbytes = (await link.probe(proxy, lane=_BETWEEN)).nbytes
            lengths[proxy] = _checked(link, proxy, nbytes, unit)
            continue
        table = await _take_table(link, proxy, len(sources), unit, _BETWEEN)
        for source, length in zip(sources, table, strict=True):
            lengths[source] = length
    blocks = split(await place(lengths), lengths)
    receives = [link.recv_into(mate, blocks[mate], lane=_STRAIGHT) for mate in mates]
    for host in layout.others(rank):
        sources = layout.members[host]
        if len(sources) == 1 or any(lengths[source] for source in sources):
            parts = [blocks[source] for source in sources]
            receives.append(link.recv_into(layout.proxy(host, rank), *parts, lane=_BETWEEN))
    await copy_all(link, blocks[rank], outgoing[rank])
    for transfer in (*receives, *sends):
        await transfer


async def _forward(
    link: Link, layout: Layout, outgoing: Sequence[memoryview], unit: int
) -> list[Awaitable[None]]:
    """Take what the mates have for the ranks that this one serves, and send it on with its own."""
    rank = link.rank
    here, served = layout.members[layout.hosts[rank]], layout.served(rank)
    sends: list[Awaitable[None]] = []
    if len(here) == 1:
        return [link.send(peer, outgoing[peer], lane=_BETWEEN) for peer in served]
    if not served:
        return sends
    taken: dict[int, list[memoryview]] = {rank: [outgoing[peer] for peer in served]}
    arriving: list[Awaitable[None]] = []
    for mate in layout.mates(rank):
        table = await _take_table(link, mate, len(served), unit, _ON)
        data = scratch(sum(table), outgoing[rank])
        taken[mate] = split(data, table)
        if len(data):
            arriving.append(link.recv_into(mate, data, lane=_ON))
    for arrival in arriving:
        await arrival
    for number, peer in enumerate(served):
        sends += _send_table(link, peer, [taken[member][number] for member in here], _BETWEEN)
    return sends


def _send_table(link: Link, peer: int, blocks: Sequence[memoryview], lane: int) -> list[Awaitable[None]]:
    """Send the lengths of `blocks`, and these where there is anything in them."""
    lengths = list(map(len, blocks))
    sends = [link.send(peer, memoryview(pack(f"<{len(lengths)}Q", *lengths)), lane=lane)]
    if any(lengths):
        sends.append(link.send(peer, *blocks, lane=lane))
    return sends


async def _take_table(link: Link, peer: int, count: int, unit: int, lane: int) -> list[int]:
    """The lengths of the blocks that `peer` sends next, checked against what comes."""
    data = scratch(count * _WORD)
    await link.recv_into(peer, data, lane=lane)
    lengths = [_checked(link, peer, length, unit) for length in unpack(f"<{count}Q", data)]
    total = sum(lengths)
    if total:
        nbytes = (await link.probe(peer, lane=lane)).nbytes
        if nbytes != total:
            raise ProtocolError(
                f"rank {peer} announced {total} bytes to rank {link.rank} and sent {nbytes}; see that all "
                "ranks run the same version",
                rank=peer,
            )
    return lengths


def _checked(link: Link, peer: int, nbytes: int, unit: int) -> int:
    """A block's length.

    Raises:
        ProtocolError: it is not a multiple of `unit`.
    """
    if nbytes % unit:
        raise ProtocolError(
            f"rank {peer} sent {nbytes} bytes to rank {link.rank}, which is no whole number of rows of {unit}"
            " bytes; see that all ranks run the same version",
            rank=peer,
        )
    return nbytes
