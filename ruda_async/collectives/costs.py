"""What a call costs: the literature's quantities over a few numbers of the transport.

The formulas made of them, an algorithm each, are in `candidates`.

The model is that of Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
MPICH" (2005) and Chan, Heimlich, Purkayastha & van de Geijn, "Collective communication: theory, practice, and
experience" (2007): a message of *n* bytes takes ``alpha + n * beta``, and combining *n* bytes takes
``n * gamma``. They let a rank have one message at a time under way. Here a rank posts many at once, so what
each further one costs is a number of its own, as in LogP (Culler et al., "LogP: towards a realistic model of
parallel computation", 1993): *k* messages in one round take `Case.fan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..transport.base import Capabilities

__all__ = ["Case", "case_of", "overhead_of"]

#: Seconds of a rank's own work in a round, beyond its messages: what the interpreter needs.
_WORK = 10e-6
#: The share of a message's latency that is the ranks' own work, where the transport does not say it: what
#: further messages of a round cost. Measured over TCP and shared memory with as many ranks as cores.
_OVERHEAD = 0.4
#: How much longer a byte takes in a message that is not cut, so that nothing overlaps with its copies.
_WHOLE = 1.15
#: How much longer a byte takes for each peer beyond so many that send at once, and at most.
_CROWD, _FREELY, _CROWDED = 0.01, 8, 1.12
#: Through shared memory: how many rounds' latency it takes until all is told, and the share of a message's
#: time per byte that reading takes. Measured with two ranks on two cores.
_SHOWING, _SEEN = 4, 1 / 3


class Case(NamedTuple):
    """One call, as the formulas see it.

    Attributes:
        nbytes: bytes of this rank's input (for a broadcast: of the tensor).
        wide: bytes that an algorithm sends where it has to send unrounded partial results.
        size: the number of ranks.
        alpha: seconds for a round with an empty message, one way.
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


def overhead_of(capabilities: Capabilities) -> float:
    """Seconds for each further message of a round, said by the transport or not."""
    own = capabilities.overhead
    return capabilities.latency * _OVERHEAD if own is None else own


def case_of(nbytes: int, size: int, capabilities: Capabilities, widens: bool, unbounded: bool) -> Case:
    """The case of a call over a transport; see `selector.choose` for the arguments."""
    hosts = capabilities.hosts
    if hosts is not None and len(hosts) != size:
        hosts = None
    return Case(
        nbytes=nbytes,
        wide=2 * nbytes if widens else nbytes,
        size=size,
        alpha=capabilities.latency + _WORK,
        overhead=overhead_of(capabilities) + _WORK * _OVERHEAD,
        beta=1 / capabilities.bandwidth,
        gamma=1 / capabilities.reduction,
        shared=capabilities.shared_memory and unbounded,
        hosts=1 if hosts is None else max(hosts) + 1,
        together=1 if hosts is None else max(map(hosts.count, hosts)),
    )
