"""Who is linked how: decided by every rank alike, from what all ranks said at the meeting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from ruda_async.transport import ConfigError, ProtocolError, host_numbers

__all__ = ["Bid", "Offer", "Plan", "decide"]

_REACHES = ("network", "host")
_MAX_REASON = 200
_MAX_BIDS = 64


class Bid(NamedTuple):
    """What a rank says of one transport.

    Attributes:
        reach, preference: the plugin's.
        payload: what the transport has to tell its peers, or None where this rank does without it.
        reason: then, why.
    """

    reach: str
    preference: int
    payload: bytes | None
    reason: str = ""


class Offer(NamedTuple):
    """What a rank says at the meeting: where it is, and its bids by scheme."""

    host: str
    bids: dict[str, Bid]

    def pack(self) -> bytes:
        """For `Job.meet`."""
        bids = {scheme: bid._replace(reason=bid.reason[:_MAX_REASON]) for scheme, bid in self.bids.items()}
        packed: bytes = msgpack.packb([self.host, bids])
        return packed

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> Offer:
        """Read and check what rank `rank` said.

        Raises:
            ProtocolError: it is no offer.
        """
        try:
            host, bids = msgpack.unpackb(data, max_array_len=4, max_map_len=_MAX_BIDS)
            if type(host) is not str or type(bids) is not dict:
                raise ValueError
            return cls(host, {str(scheme): _checked(Bid(*bid)) for scheme, bid in bids.items()})
        except (ValueError, TypeError, msgpack.UnpackException):
            raise ProtocolError(
                f"rank {rank} made no offer of links; see that all ranks have the same URL and version",
                rank=rank,
            ) from None


def _checked(bid: Bid) -> Bid:
    if (
        bid.reach not in _REACHES
        or type(bid.preference) is not int
        or not (bid.payload is None or type(bid.payload) is bytes)
        or type(bid.reason) is not str
    ):
        raise ValueError
    return bid


@dataclass(frozen=True, slots=True)
class Plan:
    """How one rank is linked, and what all ranks know alike.

    Attributes:
        routes: the scheme of the link to each other rank.
        hosts: as `Capabilities.hosts`.
        unused: why this rank does without a transport, by scheme.
        uniform: all pairs of the job are linked by the same transport.
    """

    routes: Mapping[int, str]
    hosts: tuple[int, ...] | None
    unused: Mapping[str, str]
    uniform: bool


def decide(rank: int, offers: Sequence[Offer]) -> Plan:
    """The plan of `rank`. All pairs are looked at, so that all ranks fail where one pair has no link.

    Raises:
        ConfigError: two ranks have no transport in common.
    """
    # Ranks that offer the same are looked at once: there are many ranks, and few kinds of them.
    kinds: dict[object, list[int]] = {}
    for each, offer in enumerate(offers):
        kinds.setdefault(_kind(offer), []).append(each)
    members = list(kinds.values())
    number = {each: kind for kind, ranks in enumerate(members) for each in ranks}
    table: dict[tuple[int, int], str] = {}
    for one, ranks in enumerate(members):
        for other, others in enumerate(members[: one + 1]):
            if one != other or len(ranks) > 1:
                low, high = sorted((ranks[0], others[0])) if one != other else ranks[:2]
                table[one, other] = table[other, one] = _link(offers, low, high)
    routes = {peer: table[number[rank], number[peer]] for peer in range(len(offers)) if peer != rank}
    unused = {scheme: bid.reason for scheme, bid in offers[rank].bids.items() if bid.payload is None}
    hosts = host_numbers([offer.host for offer in offers])
    return Plan(routes, hosts, unused, len(set(table.values())) == 1)


def _kind(offer: Offer) -> object:
    """Equal for ranks that are linked alike."""
    bids = ((s, bid.reach, bid.preference) for s, bid in offer.bids.items() if bid.payload is not None)
    return offer.host, frozenset(bids)


def _link(offers: Sequence[Offer], low: int, high: int) -> str:
    """The scheme for a pair of ranks.

    Raises:
        ConfigError: there is none.
    """
    ours, theirs = offers[low], offers[high]
    scheme = _best(ours, theirs)
    if scheme is None:
        where = "one host" if ours.host == theirs.host else "two hosts"
        raise ConfigError(
            f"ranks {low} and {high}, on {where}, have no transport in common that links them: rank {low} "
            f"has {_shown(ours)}; rank {high} has {_shown(theirs)}; install one on both, or take its scheme "
            "out of without="
        )
    return scheme


def _best(one: Offer, other: Offer) -> str | None:
    """The scheme for a pair: of those that both have, one within the host first, then the most preferred."""
    found: list[tuple[Any, ...]] = []
    for scheme, ours in one.bids.items():
        theirs = other.bids.get(scheme)
        if theirs is None or ours.payload is None or theirs.payload is None or ours.reach != theirs.reach:
            continue
        if ours.reach == "host" and one.host != other.host:
            continue
        found.append((ours.reach == "host", min(ours.preference, theirs.preference), scheme))
    return max(found)[-1] if found else None


def _shown(offer: Offer) -> str:
    parts = [
        scheme if bid.payload is not None else f"no {scheme} ({bid.reason})"
        for scheme, bid in sorted(offer.bids.items())
    ]
    return ", ".join(parts) or "none"
