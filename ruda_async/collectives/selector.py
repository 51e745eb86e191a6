"""Which algorithm a collective runs, and why: the one that `costs` says is the fastest.

All ranks decide alike, because all that the decision rests on is agreed: the fingerprint carries the
arguments, and the numbers of the transport are rank 0's on every rank (see `ruda_async.tuning`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from .costs import CANDIDATES, Candidate, case_of

if TYPE_CHECKING:
    from ..transport.base import Capabilities
    from .operation import Settings

__all__ = ["Choice", "choose", "known_algorithms"]


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

    Raises:
        ConfigError: the operation, or the algorithm that `settings` names, is not known.
    """
    return _choose(operation, nbytes, size, capabilities, settings.algorithm, exact, widens)


@lru_cache(maxsize=4096)
def _choose(
    operation: str,
    nbytes: int,
    size: int,
    capabilities: Capabilities,
    wanted: str | None,
    exact: bool,
    widens: bool,
) -> Choice:
    candidates = _ALGORITHMS.get(operation)
    if candidates is None:
        raise ConfigError(f"no operation is called {operation!r}; there are {', '.join(sorted(_ALGORITHMS))}")
    if wanted is not None and wanted not in _KNOWN:
        raise ConfigError(f"algorithm={wanted!r} is not known; there are {', '.join(_KNOWN)}")
    case = case_of(nbytes, size, capabilities, widens)
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
    best = candidates[estimates[0][0]]
    return Choice(best.algorithm, best.reason + passed_over, tuple(estimates))
