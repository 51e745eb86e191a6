"""Which algorithm a collective runs, and why: the one that `costs` says is the fastest.

All ranks decide alike, because all that the decision rests on is agreed: the fingerprint carries the
arguments, and the numbers of the transport are rank 0's on every rank (see `ruda_async.tuning`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..tensors import dtype_of
from .candidates import CANDIDATES, Candidate
from .costs import case_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..transport.base import Capabilities
    from ..transport.provider import NativeCall, Provider
    from .operation import Settings

__all__ = ["Choice", "NativeChoice", "choose", "choose_provider", "known_algorithms"]


class Choice(NamedTuple):
    """The outcome.

    Attributes:
        algorithm: its name.
        reason: half a sentence for people.
        estimates: all that can run and the seconds that the model gives them, the fastest first.
    """

    algorithm: str
    reason: str
    estimates: tuple[tuple[str, float], ...]


class NativeChoice(NamedTuple):
    """Whether a provider runs a call.

    Attributes:
        provider: which; None where the call goes by the table.
        reason: why, or why the one that was asked for does not; empty where there is nothing to say.
    """

    provider: Provider | None
    reason: str


_ALGORITHMS: dict[str, dict[str, Candidate]] = {
    operation: {candidate.algorithm: candidate for candidate in candidates}
    for operation, candidates in CANDIDATES.items()
}
#: What an algorithm needs to be picked may be more than what it needs to run: these run in any order.
_RUNS_EXACTLY = frozenset((("all_reduce", "ring"),))
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
        nbytes: bytes of this rank's input (for a broadcast: of the tensor).
        size: the number of ranks.
        capabilities: the transport's.
        settings: ``algorithm`` is taken where this operation has one of that name and it can run.
        exact: sums have to be in the documented order.
        widens: partial results take twice the bytes of the elements (half-precision sums).
        providers: the transport's; their names are no algorithms', and no mistake.

    Raises:
        ConfigError: the operation, or the algorithm that `settings` names, is not known.
    """
    wanted = settings.algorithm
    if wanted is not None and any(provider.name == wanted for provider in providers):
        wanted = None
    unbounded = settings.max_bytes is None
    return _choose(operation, nbytes, size, capabilities, wanted, exact, widens, unbounded)


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
    candidates = _ALGORITHMS.get(operation)
    if candidates is None:
        raise ConfigError(f"no operation is called {operation!r}; there are {', '.join(sorted(_ALGORITHMS))}")
    if wanted is not None and wanted not in _KNOWN:
        raise ConfigError(f"algorithm={wanted!r} is not known; there are {', '.join(_KNOWN)}")
    case = case_of(nbytes, size, capabilities, widens, unbounded)
    estimates = sorted(
        ((c.algorithm, c.seconds(case)) for c in candidates.values() if c.can_run(case, exact)),
        key=lambda estimate: estimate[1],
    )
    passed_over = ""
    if wanted is not None:
        named = candidates.get(wanted)
        if named is None:
            passed_over = f" (algorithm={wanted!r} is not one for {operation})"
        elif (operation, wanted) in _RUNS_EXACTLY or named.can_run(case, exact):
            return Choice(wanted, f"asked for by algorithm={wanted!r}", tuple(estimates))
        else:
            passed_over = f" (algorithm={wanted!r} needs {named.needs})"
    able = [candidate for candidate in candidates.values() if candidate.can_run(case, exact)]
    best = next((c for c in able if c.first(case)), None) or candidates[estimates[0][0]]
    return Choice(best.algorithm, best.reason + passed_over, tuple(estimates))
