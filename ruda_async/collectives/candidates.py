"""The algorithms there are, by operation: what each costs, what speaks for it, and what it needs.

The formulas are those of the literature that `costs` names, in its quantities; ``docs/algorithms.md`` has
each algorithm's source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .costs import Case

__all__ = ["CANDIDATES", "Candidate"]


class Candidate(NamedTuple):
    """An algorithm of an operation.

    Attributes:
        algorithm: its name.
        seconds: the formula.
        reason: what speaks for it, as half a sentence.
        needs: what it cannot run without, as half a sentence; "" for nothing.
        can_run: the test of that, given the case and whether the documented order is asked for.
        first: where it goes before all others, whatever the estimates are: the model knows nothing of links
            within hosts being faster than those between them.
    """

    algorithm: str
    seconds: Callable[[Case], float]
    reason: str
    needs: str = ""
    can_run: Callable[[Case, bool], bool] = lambda case, exact: True
    first: Callable[[Case], bool] = lambda case: False


def _any_order(case: Case, exact: bool) -> bool:
    return not exact


def _power_of_two(case: Case, exact: bool) -> bool:
    return case.folds == 0


def _shared(case: Case, exact: bool) -> bool:
    return case.shared


def _hosts(case: Case, exact: bool) -> bool:
    return case.hosts > 1


_SHARED = ("memory that all ranks see, and no byte budget", _shared)
#: What speaks for shared memory, and what it needs.
_ADDED_WHERE_THEY_LIE = (
    "all ranks see the same memory: each adds its part from where the inputs lie",
    *_SHARED,
)
_COPIED_WHERE_THEY_LIE = (
    "all ranks see the same memory: each copies what it needs from where it lies",
    *_SHARED,
)
_LONG_BLOCKS_COPIED = ("all ranks see the same memory: long blocks are copied from there", *_SHARED)
_HOSTS = ("several hosts that ranks share", _hosts)
_ANY_ORDER = ('order="any"', _any_order)
_POWER_OF_TWO = ("a power of two of ranks", _power_of_two)

#: By operation; where two cost the same, the first is taken.
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "all_reduce": (
        Candidate(
            "shared",
            lambda c: c.show + c.share * c.nbytes * (2 * c.seen + c.gamma),
            *_ADDED_WHERE_THEY_LIE,
        ),
        Candidate(
            "hierarchical",
            lambda c: 4 * c.fan + 2 * c.apart * c.nbytes * c.beta + c.nbytes * c.gamma,
            "ranks share hosts: what can be added within a host is, so less goes between hosts",
            *_HOSTS,
            lambda c: c.hosts > 1 and c.wide > c.typical / 2,
        ),
        Candidate(
            "direct",
            lambda c: c.fan + c.peers * c.nbytes * (c.crowd + c.gamma),
            "one round, in which every rank adds everything",
        ),
        Candidate(
            "recursive_doubling",
            lambda c: (c.halvings + c.folds) * (c.alpha + c.wide * (c.whole + c.gamma)),
            "log2(ranks) rounds of whole messages",
        ),
        Candidate(
            "rabenseifner",
            lambda c: (
                (2 * c.halvings + c.folds) * c.alpha
                + (c.share + c.folds / 2) * ((c.wide + c.nbytes) * c.whole + c.nbytes * c.gamma)
            ),
            "halving and doubling: each byte moves about twice, in 2 log2(ranks) rounds",
        ),
        Candidate(
            "pairwise",
            lambda c: 2 * c.fan + c.share * c.nbytes * (2 * c.crowd + c.gamma),
            "each rank sums its shard, pipelined: two rounds at the least traffic there is",
        ),
        Candidate(
            "ring",
            lambda c: 2 * c.peers * c.alpha + c.share * ((c.wide + c.nbytes) * c.beta + c.nbytes * c.gamma),
            "the least traffic there is, and every rank hears one peer alone",
            *_ANY_ORDER,
        ),
    ),
    "reduce_scatter": (
        Candidate(
            "shared",
            lambda c: c.show + c.share * c.nbytes * (c.seen + c.gamma),
            *_ADDED_WHERE_THEY_LIE,
        ),
        Candidate(
            "recursive_halving",
            lambda c: c.halvings * c.alpha + c.share * (c.wide * c.whole + c.nbytes * c.gamma),
            "log2(ranks) rounds",
            *_POWER_OF_TWO,
        ),
        Candidate(
            "pairwise",
            lambda c: c.fan + c.share * c.nbytes * (c.crowd + c.gamma),
            "each rank receives its shard from all, pipelined, in one round",
        ),
        Candidate(
            "ring",
            lambda c: c.peers * c.alpha + c.share * (c.wide * c.beta + c.nbytes * c.gamma),
            "every rank hears one peer alone",
            *_ANY_ORDER,
        ),
    ),
    "reduce": (
        Candidate(
            "shared",
            lambda c: c.show + c.share * c.nbytes * (2 * c.seen + c.gamma),
            *_ADDED_WHERE_THEY_LIE,
        ),
        Candidate(
            "direct",
            lambda c: c.fan + c.peers * c.nbytes * (c.crowd + c.gamma),
            "the root takes all inputs in one round",
        ),
        Candidate(
            "binomial",
            lambda c: c.rounds * (c.alpha + c.wide * (c.whole + c.gamma)),
            "a binomial tree takes log2(ranks) rounds",
        ),
        Candidate(
            "reduce_scatter_gather",
            lambda c: 2 * c.fan + c.share * c.nbytes * (2 * c.crowd + c.gamma),
            "all ranks share the additions, and the root's link carries each byte once",
        ),
    ),
    "all_gather": (
        Candidate(
            "shared",
            lambda c: c.show + c.peers * c.nbytes * c.seen,
            *_COPIED_WHERE_THEY_LIE,
        ),
        Candidate(
            "hierarchical",
            lambda c: 4 * c.fan + c.apart * c.size * c.nbytes * c.beta,
            "ranks share hosts: a shard goes to each host once, and on within it",
            *_HOSTS,
            lambda c: c.hosts > 1 and c.size * c.nbytes > c.typical,
        ),
        Candidate(
            "direct",
            lambda c: c.fan + c.peers * c.nbytes * c.crowd,
            "every shard goes straight to everyone in one round",
        ),
        Candidate(
            "recursive_doubling",
            lambda c: c.rounds * c.alpha + c.peers * c.nbytes * c.whole,
            "log2(ranks) rounds (Bruck's form where the ranks are no power of two)",
        ),
        Candidate(
            "ring",
            lambda c: c.peers * (c.alpha + c.nbytes * c.beta),
            "every rank hears one peer alone",
        ),
    ),
    "all_gather_v": (
        Candidate(
            "shared",
            lambda c: c.fan + c.peers * 8 * c.typical * c.seen,
            *_LONG_BLOCKS_COPIED,
        ),
        Candidate(
            "direct",
            lambda c: c.fan + c.peers * 8 * c.typical * c.crowd,
            "every shard goes straight to everyone",
        ),
        Candidate(
            "ring",
            lambda c: c.peers * (c.alpha + 8 * c.typical * c.beta),
            "every rank hears one peer alone",
        ),
    ),
    "broadcast": (
        Candidate(
            "shared",
            lambda c: c.show + c.nbytes * c.seen,
            *_COPIED_WHERE_THEY_LIE,
        ),
        Candidate(
            "binomial",
            lambda c: c.rounds * (c.alpha + c.nbytes * c.beta),
            "a binomial tree takes log2(ranks) rounds",
        ),
        Candidate(
            "scatter_all_gather",
            lambda c: c.fan + c.peers * c.alpha + 2 * c.share * c.nbytes * c.beta,
            "the root sends each byte once, and all ranks pass the pieces on",
        ),
    ),
    "gather": (
        Candidate(
            "direct",
            lambda c: c.fan + c.peers * c.nbytes * c.crowd,
            "every shard goes straight to the root",
        ),
        Candidate(
            "binomial",
            lambda c: c.rounds * c.alpha + c.peers * c.nbytes * c.whole,
            "a binomial tree spares the root most messages",
        ),
    ),
    "scatter": (
        Candidate(
            "direct",
            lambda c: c.fan + c.peers * c.typical * c.beta,
            "every shard comes straight from the root",
        ),
        Candidate(
            "binomial",
            lambda c: c.rounds * c.alpha + c.peers * c.typical * c.whole,
            "a binomial tree spares the root most messages",
        ),
    ),
    "all_to_all": (
        Candidate(
            "shared",
            lambda c: c.show + c.share * c.nbytes * c.seen,
            *_COPIED_WHERE_THEY_LIE,
        ),
        Candidate(
            "pairwise",
            lambda c: c.fan + c.share * c.nbytes * c.crowd,
            "every block goes straight to its rank",
        ),
        Candidate(
            "bruck",
            lambda c: c.rounds * (c.alpha + c.overhead + c.nbytes / 2 * (c.whole + c.gamma)),
            "log2(ranks) rounds of joined blocks",
        ),
    ),
    "all_to_all_v": (
        Candidate(
            "shared",
            lambda c: c.fan + c.share * c.nbytes * c.seen,
            *_LONG_BLOCKS_COPIED,
        ),
        Candidate(
            "hierarchical",
            lambda c: 4 * c.fan + c.apart * c.nbytes * c.beta,
            "many ranks share hosts: blocks between hosts are joined, which is fewer messages in all",
            *_HOSTS,
            lambda c: c.hosts > 1 and 3 * c.together + 2 * c.hosts < c.size + 4,
        ),
        Candidate(
            "pairwise",
            lambda c: c.fan + c.share * c.nbytes * c.crowd,
            "every block goes straight to its rank",
        ),
    ),
    "barrier": (
        Candidate("dissemination", lambda c: c.rounds * c.alpha, "log2(ranks) rounds of empty messages"),
    ),
}
