"""The protocol by which ranks agree which collectives all of them enter in backward.

Each rank knows which recorded collectives its own loss reaches. A vote tells every rank what every
other reaches; where some rank reaches a collective that this one's loss does not, its node is kept in this
loss's graph with a zero gradient. What that node depends on is then reached too, which may again be news to
somebody, so the vote is repeated until nobody adds anything: a monotone fixpoint.

The protocol is written as a generator that yields what to send and is sent what came, so that it runs
blocking over threads and awaited on a loop alike; it yields None where a loop may take a breath.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..errors import TensorContractError
from .engine import Call, keep

if TYPE_CHECKING:
    from .scope import CollectiveScope

__all__ = ["Ask", "Reach", "Steps", "complete"]

#: Nodes of a graph that are walked between breaths: some 100 µs.
_STRIDE = 256


class Ask(NamedTuple):
    """Gather `payload` over the ranks of `scope`."""

    scope: CollectiveScope
    payload: list[Any]


Steps = Generator[Ask | None, Any, Tensor]


class Reach:
    """The nodes from which a backward pass starts, and all that it would run."""

    def __init__(self) -> None:
        self.nodes: set[Any] = set()

    def add(self, root: Any) -> Generator[None, None, None]:
        """Walk everything below `root`."""
        nodes = self.nodes
        if root is None or root in nodes:
            return
        nodes.add(root)
        stack = [root]
        walked = 0
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in nodes:
                    nodes.add(node)
                    stack.append(node)
            walked += 1
            if walked % _STRIDE == 0:
                yield None


def _token(call: Call) -> Tensor:
    assert call.token is not None  # a recorded call keeps its token
    return call.token


class _Ballot:
    """One scope's part in one completion."""

    def __init__(self, scope: CollectiveScope, calls: Iterable[Call]) -> None:
        self.scope = scope
        # By name, since backward passes (create_graph) may have added theirs in another order elsewhere.
        self.calls = sorted(calls, key=lambda call: call.path)
        names = "\n".join(call.path for call in self.calls)
        self.digest = zlib.crc32(names.encode())
        self.tracked: int | None = None

    def vote(self, reach: Reach) -> list[Any]:
        reached = tracks = 0
        for i, call in enumerate(self.calls):
            reached |= (_token(call).grad_fn in reach.nodes) << i
            tracks |= call.tracks << i
        return ["mask", len(self.calls), self.digest, self._packed(reached), self._packed(tracks)]

    def _packed(self, bits: int) -> bytes:
        return bits.to_bytes((len(self.calls) + 7) // 8, "little")

    def missing(self, votes: list[Any], rank: int) -> tuple[list[Tensor], bool]:
        """The tokens to keep in this rank's graph, and whether any rank has some to keep in its own."""
        self._check(votes, rank)
        reached = [int.from_bytes(vote[3], "little") for vote in votes]
        if self.tracked is None:  # what is tracked does not change from vote to vote
            self.tracked = 0
            for vote in votes:
                self.tracked |= int.from_bytes(vote[4], "little")
            for i, call in enumerate(self.calls):
                call.inert = not self.tracked >> i & 1
        needed = 0
        for bits in reached:
            needed |= bits
        needed &= self.tracked
        here = needed & ~reached[rank]
        anywhere = any(needed & ~bits for bits in reached)
        return [_token(call) for i, call in enumerate(self.calls) if here >> i & 1], anywhere

    def _check(self, votes: list[Any], rank: int) -> None:
        mine = votes[rank]
        for other, vote in enumerate(votes):
            if vote[0] != mine[0]:
                raise TensorContractError(
                    f"rank {rank} and rank {other} complete different scopes together; give complete_scopes "
                    "every scope of this rank's groups, on every rank",
                    rank=other,
                )
            if vote[0] == "mask" and vote[1:3] != mine[1:3]:
                raise TensorContractError(
                    f"rank {rank} recorded {mine[1]} differentiable collectives in this scope and rank "
                    f"{other} {vote[1]}, or others; every rank has to make the same calls, with grad mode "
                    "on, between two completions",
                    rank=other,
                )


def complete(loss: Tensor, scopes: list[CollectiveScope], *, alone: bool) -> Steps:
    """The steps of one completion; returns the loss to call backward on.

    Args:
        alone: the one scope is all there is on every rank (no other groups to agree with).
    """
    ballots = [_Ballot(scope, scope._take()) for scope in scopes]
    try:
        tokens = yield from _settle(loss, ballots, alone)
    finally:
        for ballot in ballots:
            for call in ballot.calls:
                call.token = None  # ends the circle from a call over its node back to it
    return keep(loss, *tokens) if tokens else loss


def _settle(loss: Tensor, ballots: list[_Ballot], alone: bool) -> Generator[Ask | None, Any, list[Tensor]]:
    """Vote until nobody adds anything; the tokens to keep in this rank's graph."""
    rounds = 0 if alone else (yield from _distance([ballot.scope for ballot in ballots]))
    reach = Reach()
    yield from reach.add(loss.grad_fn)
    tokens: list[Tensor] = []
    again = True
    while again:
        again = False
        for ballot in ballots:
            votes = yield Ask(ballot.scope, ballot.vote(reach))
            missing, anywhere = ballot.missing(votes, ballot.scope.rank)
            again = again or anywhere
            for token in missing:
                tokens.append(token)
                yield from reach.add(token.grad_fn)
        for _ in range(rounds):  # let word of a change go round by way of the groups that ranks share
            heard = again
            for ballot in ballots:
                flags = yield Ask(ballot.scope, ["again", again])
                heard = heard or _flagged(flags, ballot.scope.rank)
            again = heard
    return tokens


def _flagged(flags: list[Any], rank: int) -> bool:
    for other, (kind, *_) in enumerate(flags):
        if kind != "again":
            raise TensorContractError(
                f"rank {rank} and rank {other} complete different scopes together; give complete_scopes "
                "every scope of this rank's groups, on every rank",
                rank=other,
            )
    return any(flag for _, flag in flags)


# ---------------------------------------------------------------------- overlapping groups


def _distance(scopes: list[CollectiveScope]) -> Generator[Ask | None, Any, int]:
    """How many rounds news needs to reach every rank that is linked to this one by shared groups.

    In each round every rank tells its groups which ranks' groups it knows. After as many rounds as the
    farthest rank is away it knows them all, sees so, and computes the greatest such number of any rank;
    all of them go on to that round, so that nobody is left waiting.
    """
    me = scopes[0]._member
    known: dict[int, list[list[int]]] = {me: [list(scope._members) for scope in scopes]}
    rounds = 0
    diameter: int | None = None
    while diameter is None or rounds < diameter:
        told = [[rank, groups] for rank, groups in known.items()]
        for scope in scopes:
            answers = yield Ask(scope, ["groups", told])
            for other, (kind, *content) in enumerate(answers):
                if kind != "groups":
                    raise TensorContractError(
                        f"rank {scope.rank} calls complete_scopes and rank {other} scope.complete; call the "
                        "same on every rank",
                        rank=other,
                    )
                for rank, groups in content[0]:
                    known.setdefault(rank, groups)
        rounds += 1
        everyone = {rank for groups in known.values() for group in groups for rank in group}
        if diameter is None and everyone <= known.keys():
            diameter = max(_eccentricity(rank, known) for rank in known)
    return diameter


def _eccentricity(rank: int, known: dict[int, list[list[int]]]) -> int:
    """The number of steps from `rank` to the farthest rank; ranks that share a group are one step apart."""
    seen = {rank}
    front = {rank}
    steps = 0
    while True:
        front = {near for far in front for group in known[far] for near in group} - seen
        if not front:
            return steps
        seen |= front
        steps += 1
