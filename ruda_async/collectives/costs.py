"""What each algorithm costs: the literature's formulas over a few numbers of the transport.

The model is that of Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
MPICH" (2005) and Chan, Heimlich, Purkayastha & van de Geijn, "Collective communication: theory, practice, and
experience" (2007): a message of *n* bytes takes ``alpha + n * beta``, and combining *n* bytes takes
``n * gamma``. They let a rank have one message at a time under way. Here a rank posts many at once, so what
each further one costs is a number of its own, as in LogP (Culler et al., "LogP: towards a realistic model of
parallel computation", 1993): *k* messages in one round take `Case.fan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..transport.base import Capabilities

__all__ = ["CANDIDATES", "Candidate", "Case", "case_of"]

#: The share of a message's latency that is the ranks' own work, where the transport does not say it: what
#: further messages of a round cost. Measured over TCP and shared memory with as many ranks as cores.
_OVERHEAD = 0.4
#: How much longer a byte takes in a message that is not cut, so that nothing overlaps with its copies.
_WHOLE = 1.15
#: How much longer a byte takes for each peer beyond so many that send at once, and at most.
_CROWD, _FREELY, _CROWDED = 0.01, 8, 1.12
#: Through shared memory: how many rounds' latency it takes until all is told, and the share of a message's
#: time per byte that reading takes. Measured with two ranks on two cores.
_SHOWING, _SEEN = 8, 1 / 3


class Case(NamedTuple):
    """One call, as the formulas see it.

    Attributes:
        nbytes: bytes of this rank's input (for a broadcast: of the tensor).
        wide: bytes that an algorithm sends where it has to send unrounded partial results.
        size: the number of ranks.
        alpha: seconds for an empty message, one way.
        overhead: seconds for each further message of a round.
        beta: seconds for a byte on its way.
        gamma: seconds to combine a byte with another one.
        shared: whether all ranks see the same memory, and messages are not limited in size.
        hosts: the number of hosts, where several ranks share one and there are several; else 1.
        together: the most ranks that share a host, as far as known; else 1.
    """

    nbytes: int
    wide: int
    size: int
    alpha: float
    overhead: float
    beta: float
    gamma: float
    shared: bool = False
    hosts: int = 1
    together: int = 1

    @property
    def peers(self) -> int:
        """The other ranks."""
        return self.size - 1

    @property
    def share(self) -> float:
        """What of the whole is not this rank's own: ``(ranks - 1) / ranks``."""
        return (self.size - 1) / self.size

    @property
    def rounds(self) -> int:
        """``ceil(log2(ranks))``: the rounds of a tree."""
        return self.peers.bit_length()

    @property
    def folds(self) -> int:
        """2 where the ranks are no power of two: some hand their input over, and get the result back."""
        return 2 if self.size & (self.size - 1) else 0

    @property
    def halvings(self) -> int:
        """``floor(log2(ranks))``: the rounds of recursive halving or doubling, after folding."""
        return self.size.bit_length() - 1

    @property
    def fan(self) -> float:
        """One round in which a rank has a message to or from every other one: the latency."""
        return self.alpha + (self.peers - 1) * self.overhead if self.size > 1 else 0.0

    @property
    def crowd(self) -> float:
        """Seconds for a byte where all other ranks send at once."""
        return self.beta * min(1 + _CROWD * max(self.peers - _FREELY, 0), _CROWDED)

    @property
    def whole(self) -> float:
        """Seconds for a byte of a message that is not cut."""
        return self.beta * _WHOLE

    @property
    def show(self) -> float:
        """Seconds until all ranks know where all tensors lie in shared memory."""
        return _SHOWING * self.fan

    @property
    def seen(self) -> float:
        """Seconds for a byte that is read where it lies, or through slots in the cache."""
        return self.beta * _SEEN

    @property
    def apart(self) -> float:
        """What of the whole is not on this rank's host: ``(hosts - 1) / hosts``."""
        return (self.hosts - 1) / self.hosts

    @property
    def typical(self) -> float:
        """Bytes of a shard where not all ranks know how many: those that take as long as an empty message."""
        return self.alpha / self.beta


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


def case_of(nbytes: int, size: int, capabilities: Capabilities, widens: bool, unbounded: bool) -> Case:
    """The case of a call over a transport; see `selector.choose` for the arguments."""
    overhead, hosts = capabilities.overhead, capabilities.hosts
    if hosts is not None and len(hosts) != size:
        hosts = None
    return Case(
        nbytes=nbytes,
        wide=2 * nbytes if widens else nbytes,
        size=size,
        alpha=capabilities.latency,
        overhead=capabilities.latency * _OVERHEAD if overhead is None else overhead,
        beta=1 / capabilities.bandwidth,
        gamma=1 / capabilities.reduction,
        shared=capabilities.shared_memory and unbounded,
        hosts=1 if hosts is None else max(hosts) + 1,
        together=1 if hosts is None else max(map(hosts.count, hosts)),
    )


def _any_order(case: Case, exact: bool) -> bool:
    return not exact


def _power_of_two(case: Case, exact: bool) -> bool:
    return case.folds == 0


def _shared(case: Case, exact: bool) -> bool:
    return case.shared


def _hosts(case: Case, exact: bool) -> bool:
    return case.hosts > 1


_SHARED = ("memory that all ranks see, and no byte budget", _shared)
_HOSTS = ("several hosts that ranks share", _hosts)
_ANY_ORDER = ('order="any"', _any_order)
_POWER_OF_TWO = ("a power of two of ranks", _power_of_two)

#: By operation; where two cost the same, the first is taken.
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "all_reduce": (
        Candidate(
            "shared",
            lambda c: c.show + c.share * c.nbytes * (2 * c.seen + c.gamma),
            "all ranks see the same memory: each adds its part from where the inputs lie",
            *_SHARED,
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
            "all ranks see the same memory: each adds its part from where the inputs lie",
            *_SHARED,
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
            "all ranks see the same memory: each adds its part from where the inputs lie",
            *_SHARED,
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
            "all ranks see the same memory: each copies what it needs from where it lies",
            *_SHARED,
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
            "all ranks see the same memory: long blocks are copied from there",
            *_SHARED,
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
            "all ranks see the same memory: each copies what it needs from where it lies",
            *_SHARED,
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
            "all ranks see the same memory: each copies what it needs from where it lies",
            *_SHARED,
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
            "all ranks see the same memory: long blocks are copied from there",
            *_SHARED,
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
