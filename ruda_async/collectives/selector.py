"""Which algorithm a collective runs, and why.

One table per operation. Rows are tried from the top, the first that applies is taken, and each says its
reason in words, so that `Communicator.explain` can. Thresholds are given in *pipes*: latency times
bandwidth, the bytes that fit on the wire while one message travels. A message much smaller than that
costs its latency, a much larger one its bytes. All ranks decide alike, because all that the decision
rests on is agreed: the fingerprint carries the arguments and the transport's capabilities are shared.

The thresholds follow Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations
in MPICH" (2005), moved to where pipelined direct exchange beats recursion on an event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..tensors import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..transport.base import Capabilities
    from ..transport.provider import NativeCall, Provider
    from .operation import Settings

__all__ = ["Choice", "NativeChoice", "choose", "choose_provider", "known_algorithms"]


class Choice(NamedTuple):
    """The outcome: an algorithm's name and the reason, as half a sentence for people."""

    algorithm: str
    reason: str


class NativeChoice(NamedTuple):
    """Whether a provider runs a call.

    Attributes:
        provider: which; None where the call goes by the table.
        reason: why, or why the one that was asked for does not; empty where there is nothing to say.
    """

    provider: Provider | None
    reason: str


class _Case(NamedTuple):
    """One call, as the tables see it.

    Attributes:
        nbytes: bytes of this rank's input.
        size: the number of ranks.
        pipe: bytes under way at once, ``latency * bandwidth``.
        segment: the payload at which throughput has levelled off.
        exact: whether the documented order of summation is asked for.
        wide: bytes that an algorithm sends where it has to send unrounded partial results.
        shared: whether all ranks see the same memory, and messages are not limited in size.
        hosts: the number of hosts, where several ranks share one and there are several; else 1.
        together: the most ranks that share a host, as far as known; else 1.
    """

    nbytes: int
    size: int
    pipe: float
    segment: int
    exact: bool
    wide: int
    shared: bool
    hosts: int
    together: int


class _Row(NamedTuple):
    algorithm: str
    applies: Callable[[_Case], bool]
    reason: str


def _always(_: _Case) -> bool:
    return True


def _power_of_two(case: _Case) -> bool:
    return case.size & (case.size - 1) == 0


#: From this size on, telling where tensors lie costs less than sending them.
_SHARED = 320 * 1024

_TABLES: dict[str, tuple[_Row, ...]] = {
    "all_reduce": (
        _Row(
            "shared",
            lambda c: c.shared and c.nbytes >= _SHARED,
            "all ranks see the same memory: each adds its part from where the inputs lie",
        ),
        _Row(
            "direct",
            lambda c: c.size <= 2 and c.nbytes <= 16 * c.pipe,
            "one round is fastest while both ranks can add everything",
        ),
        _Row(
            "direct",
            lambda c: c.size <= 8 and (c.size - 1) * c.nbytes <= c.pipe,
            "few ranks and few bytes: one round saves more than the repeated additions cost",
        ),
        _Row(
            "recursive_doubling",
            lambda c: c.wide <= c.pipe / 2,
            "few bytes: log2(ranks) rounds are the least latency",
        ),
        _Row(
            "hierarchical",
            lambda c: c.hosts > 1,
            "ranks share hosts: what can be added within a host is, so less goes between hosts",
        ),
        _Row(
            "ring",
            lambda c: not c.exact and c.size > 8 and c.nbytes >= c.size * c.segment,
            "any order is allowed and the message is long: a ring keeps every link busy with one peer",
        ),
        _Row(
            "rabenseifner",
            lambda c: c.size > 4 and c.wide <= 4 * c.pipe,
            "halving and doubling take log2(ranks) rounds and move each byte about twice",
        ),
        _Row(
            "pairwise",
            _always,
            "many bytes: each rank sums its shard, pipelined, at the least traffic there is",
        ),
    ),
    "reduce_scatter": (
        _Row(
            "shared",
            lambda c: c.shared and c.nbytes >= _SHARED,
            "all ranks see the same memory: each adds its part from where the inputs lie",
        ),
        _Row(
            "recursive_halving",
            lambda c: c.size > 4 and _power_of_two(c) and c.wide <= 4 * c.pipe,
            "few bytes on a power of two of ranks: log2(ranks) rounds are the least latency",
        ),
        _Row(
            "ring",
            lambda c: not c.exact and c.size > 8 and c.nbytes >= c.size * c.segment,
            "any order is allowed and the message is long: a ring keeps every link busy with one peer",
        ),
        _Row("pairwise", _always, "each rank receives its shard from all, pipelined, in one round"),
    ),
    "reduce": (
        _Row(
            "shared",
            lambda c: c.shared and c.nbytes >= _SHARED,
            "all ranks see the same memory: each adds its part from where the inputs lie",
        ),
        _Row(
            "direct",
            lambda c: c.size <= 4 and c.nbytes <= c.pipe,
            "few ranks and few bytes: the root takes all inputs in one round",
        ),
        _Row(
            "binomial", lambda c: c.wide <= 4 * c.pipe, "few bytes: a binomial tree takes log2(ranks) rounds"
        ),
        _Row(
            "reduce_scatter_gather",
            _always,
            "many bytes: all ranks share the additions and the root's link carries each byte once",
        ),
    ),
    "all_gather": (
        _Row(
            "shared",
            lambda c: c.shared and c.nbytes >= _SHARED,
            "all ranks see the same memory: each copies what it needs from where it lies",
        ),
        _Row(
            "hierarchical",
            lambda c: c.hosts > 1 and c.size * c.nbytes > c.pipe,
            "ranks share hosts: a shard goes to each host once, and on within it",
        ),
        _Row(
            "direct",
            lambda c: c.size <= 4 or (c.size <= 8 and c.nbytes <= c.pipe),
            "few ranks: every shard goes straight to everyone in one round",
        ),
        _Row(
            "recursive_doubling",
            lambda c: c.size * c.nbytes <= 2 * c.pipe,
            "few bytes: log2(ranks) rounds (Bruck's form where the ranks are no power of two)",
        ),
        _Row("ring", _always, "many bytes: a ring keeps every link busy with one peer"),
    ),
    "all_gather_v": (
        _Row(
            "shared", lambda c: c.shared, "all ranks see the same memory: long blocks are copied from there"
        ),
        _Row("direct", lambda c: c.size <= 8, "few ranks: every shard goes straight to everyone"),
        _Row("ring", _always, "many ranks: a ring keeps every link busy with one peer"),
    ),
    "broadcast": (
        _Row(
            "shared",
            lambda c: c.shared and c.nbytes >= _SHARED,
            "all ranks see the same memory: each copies what it needs from where it lies",
        ),
        _Row(
            "binomial",
            lambda c: c.size <= 2 or c.nbytes <= 8 * c.pipe,
            "few ranks or few bytes: a binomial tree takes log2(ranks) rounds",
        ),
        _Row(
            "scatter_all_gather",
            _always,
            "many bytes: the root sends each byte once and all ranks pass the pieces on",
        ),
    ),
    "gather": (
        _Row("direct", lambda c: c.size <= 8, "few ranks: every shard goes straight to the root"),
        _Row("binomial", _always, "many ranks: a binomial tree spares the root most messages"),
    ),
    "scatter": (
        _Row("direct", lambda c: c.size <= 8, "few ranks: every shard comes straight from the root"),
        _Row("binomial", _always, "many ranks: a binomial tree spares the root most messages"),
    ),
    "all_to_all": (
        _Row(
            "shared",
            lambda c: c.shared and c.nbytes >= _SHARED,
            "all ranks see the same memory: each copies what it needs from where it lies",
        ),
        _Row(
            "bruck",
            lambda c: c.size >= 8 and c.nbytes <= 256 * c.size,
            "at most 256 bytes a pair on many ranks: log2(ranks) rounds of joined blocks",
        ),
        _Row("pairwise", _always, "every block goes straight to its rank"),
    ),
    "all_to_all_v": (
        _Row(
            "shared", lambda c: c.shared, "all ranks see the same memory: long blocks are copied from there"
        ),
        _Row(
            "hierarchical",
            lambda c: c.hosts > 1 and 3 * c.together + 2 * c.hosts < c.size + 4,
            "many ranks share hosts: blocks between hosts are joined, which is fewer messages in all",
        ),
        _Row("pairwise", _always, "every block goes straight to its rank"),
    ),
    "barrier": (_Row("dissemination", _always, "log2(ranks) rounds of empty messages"),),
}

#: Where an algorithm that is asked for by name still cannot run: what it needs, and the test.
_NEEDS: dict[tuple[str, str], tuple[Callable[[_Case], bool], str]] = {
    ("reduce_scatter", "recursive_halving"): (_power_of_two, "a power of two of ranks"),
    ("reduce_scatter", "ring"): (lambda c: not c.exact, 'order="any"'),
    **{
        (operation, "shared"): (lambda c: c.shared, "memory that all ranks see, and no byte budget")
        for operation, rows in _TABLES.items()
        if any(row.algorithm == "shared" for row in rows)
    },
}
_NEEDS |= {
    (operation, "hierarchical"): (lambda c: c.hosts > 1, "several hosts that ranks share")
    for operation in ("all_reduce", "all_gather", "all_to_all_v")
}

_ALGORITHMS: dict[str, frozenset[str]] = {
    operation: frozenset(row.algorithm for row in rows) for operation, rows in _TABLES.items()
}
_KNOWN: tuple[str, ...] = tuple(sorted(frozenset().union(*_ALGORITHMS.values())))


def known_algorithms() -> tuple[str, ...]:
    """All names that ``algorithm=`` takes, of whatever operation, sorted."""
    return _KNOWN


def choose(
    operation: str,
    nbytes: int,
    size: int,
    capabilities: Capabilities,
    settings: Settings,
    *,
    exact: bool = True,
    widens: bool = False,
    providers: Sequence[Provider] = (),
) -> Choice:
    """Decide which algorithm runs `operation`.

    Args:
        operation: the canonical name, such as ``"all_reduce"``.
        nbytes: bytes of this rank's input (for a broadcast: of the tensor; for a scatter: of the shard).
        size: the number of ranks.
        capabilities: the transport's.
        settings: ``algorithm`` is taken where this operation has one of that name and it can run.
        exact: sums have to be in the documented order.
        widens: partial results take twice the bytes of the elements (half-precision sums).
        providers: the transport's; `choose_provider` has asked them, and none takes this call.

    Raises:
        ConfigError: the operation, or the algorithm that `settings` names, is not known.
    """
    wanted = settings.algorithm
    if wanted is not None and any(provider.name == wanted for provider in providers):
        wanted = None
    return _choose(operation, nbytes, size, capabilities, wanted, exact, widens, settings.max_bytes is None)


def choose_provider(
    providers: Sequence[Provider],
    call: NativeCall,
    members: tuple[int, ...],
    settings: Settings,
    exact: bool,
) -> NativeChoice:
    """Decide whether a provider runs `call`: the one asked for by name, or else the first that wants it.

    Nothing is native within a byte budget, since a provider's messages are its own; nor where
    ``algorithm=`` names something else that this operation has.

    Args:
        providers: the transport's, the most preferred first.
        call: the call, as all ranks agree on it.
        members: the job's rank of each group rank.
        settings: the communicator's.
        exact: sums have to be in the documented order.
    """
    wanted = settings.algorithm
    named = next((provider for provider in providers if provider.name == wanted), None)
    if named is None and wanted in _ALGORITHMS.get(call.operation, ()):
        return NativeChoice(None, "")
    for provider in (named,) if named is not None else providers:
        objection = _objection(provider, call, members, settings, exact)
        if named is not None:
            if objection is None:
                return NativeChoice(named, f"asked for by algorithm={wanted!r}")
            return NativeChoice(None, f" (algorithm={wanted!r} is not taken: {objection})")
        reason = None if objection is not None else provider.reason(call, members)
        if reason is not None:
            return NativeChoice(provider, reason)
    return NativeChoice(None, "")


def _objection(
    provider: Provider, call: NativeCall, members: tuple[int, ...], settings: Settings, exact: bool
) -> str | None:
    if settings.max_bytes is not None:
        return f"its messages do not keep to max_bytes={settings.max_bytes}"
    if exact and not provider.exact and call.operator is not None and dtype_of(call.dtype).kind == "float":
        return 'it adds in an order of its own, which takes order="any"'
    return provider.objection(call, members)


@lru_cache(maxsize=4096)
def _choose(
    operation: str,
    nbytes: int,
    size: int,
    capabilities: Capabilities,
    wanted: str | None,
    exact: bool,
    widens: bool,
    unbounded: bool,
) -> Choice:
    rows = _TABLES.get(operation)
    if rows is None:
        raise ConfigError(f"no operation is called {operation!r}; there are {', '.join(sorted(_TABLES))}")
    if wanted is not None and wanted not in _KNOWN:
        raise ConfigError(f"algorithm={wanted!r} is not known; there are {', '.join(_KNOWN)}")
    hosts = capabilities.hosts if capabilities.hosts is not None and len(capabilities.hosts) == size else None
    case = _Case(
        nbytes,
        size,
        capabilities.latency * capabilities.bandwidth,
        capabilities.segment_bytes,
        exact,
        2 * nbytes if widens else nbytes,
        capabilities.shared_memory and unbounded,
        1 if hosts is None else max(hosts) + 1,
        1 if hosts is None else max(map(hosts.count, hosts)),
    )
    passed_over = ""
    if wanted is not None:
        if wanted in _ALGORITHMS[operation]:
            can_run, need = _NEEDS.get((operation, wanted), (_always, ""))
            if can_run(case):
                return Choice(wanted, f"asked for by algorithm={wanted!r}")
            passed_over = f" (algorithm={wanted!r} needs {need})"
        else:
            passed_over = f" (algorithm={wanted!r} is not one for {operation})"
    row = next(row for row in rows if row.applies(case))
    return Choice(row.algorithm, row.reason + passed_over)
