"""What runs on the driver (or in an actor that commands others): make ranks of a list of actors."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ..errors import CollectiveTimeoutError, ConfigError, PeerLostError, RudaError, TransportUnavailableError
from ..installing import how_to_install
from . import actors as inside
from .failing import Attempt
from .place import Place

__all__ = ["Group", "connect_actors", "connect_actors_async"]

#: Seconds that a meeting may take beyond its own deadline, so that the ranks' account of it arrives.
_GRACE = 10.0


class _Step(NamedTuple):
    """Calls of actors that run at once, one a rank.

    Attributes:
        refs: Ray's references to what they return.
        what: what they are for, as a verb.
        seconds: how long they may take.
        joins: the group that the actors join by them, if any.
        attempt: how they hear that it cannot form, where they join one.
    """

    refs: list[Any]
    what: str
    seconds: float
    joins: Group | None = None
    attempt: Attempt | None = None


#: Yields steps, is sent their results, and returns at the end.
_Steps = Generator[_Step, list[Any], None]


@dataclass(frozen=True)
class Group:
    """A list of actors that are ranks of one job.

    Attributes:
        name: what `communicator` takes inside the actors.
        actors: their handles, in rank order.
    """

    name: str
    actors: tuple[Any, ...]

    def close(self, timeout: float = 30.0) -> None:
        """Close the group's communicator in every actor.

        Raises:
            CollectiveTimeoutError: some actor did not answer in time.
            PeerLostError: an actor is dead.
        """
        _run(_leave(self, timeout))

    async def aclose(self, timeout: float = 30.0) -> None:
        """As `close`, without blocking the event loop."""
        await _run_async(_leave(self, timeout))


def connect_actors(
    actors: Sequence[Any],
    *,
    group: str = "default",
    url: str | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> Group:
    """Make rank *i* of ``actors[i]``, and return when all have joined.

    Blocking actors need nothing; asyncio actors inherit from `AsyncRank`. Inside, `communicator` or
    `async_communicator` is the actor's communicator until the group is connected again or closed. The
    address of rank 0 and a fresh secret travel through Ray.

    Args:
        actors: handles of different actors that are alive or starting.
        group: a name; an actor may be in several groups.
        url: the transport, and what parameters it takes, such as ``"tcp://?heartbeat=2"``. The host is that
            of rank 0 where the URL has none. By default ``RUDA_URL`` of rank 0's environment, else the
            preferred transport of one host where all actors are on one node, and that of a network where
            they are not.
        timeout: seconds for the meeting, and each actor's default for every call.
        options: as for `ruda_async.connect`.

    Raises:
        ConfigError: the list, the URL or an option cannot be used, or an asyncio actor is no `AsyncRank`.
        CollectiveTimeoutError: some actors did not come in time; ``missing`` has their ranks.
        PeerLostError: an actor is dead.
    """
    made, steps = _connect(actors, group, url, timeout, options)
    _run(steps)
    return made


async def connect_actors_async(
    actors: Sequence[Any],
    *,
    group: str = "default",
    url: str | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> Group:
    """As `connect_actors`, for a driver or an actor with an event loop, which is not blocked."""
    made, steps = _connect(actors, group, url, timeout, options)
    await _run_async(steps)
    return made


# ---------------------------------------------------------------------- the steps


def _connect(
    actors: Sequence[Any], group: str, url: str | None, timeout: float, options: dict[str, Any]
) -> tuple[Group, _Steps]:
    """Check the arguments; the group, and the steps that make it."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise TransportUnavailableError(
            f"ruda_async.ray needs Ray, which is not installed; {how_to_install('ray')}"
        ) from None
    made = Group(group, tuple(actors))
    if not isinstance(group, str) or not group:
        raise ConfigError(f"group={group!r} is not a name; give text that is not empty")
    if not made.actors:
        raise ConfigError("connect_actors got no actors; a group has at least one")
    ids = [getattr(actor, "_ray_actor_id", None) for actor in made.actors]
    for rank, id in enumerate(ids):
        if id is None:
            raise ConfigError(f"actors[{rank}] is {made.actors[rank]!r:.80}, which is no handle of an actor")
        if id in ids[:rank]:
            raise ConfigError(
                f"actors[{rank}] is the same actor as actors[{ids.index(id)}]; each rank is one of its own"
            )
    return made, _meet(made, url, timeout, {"timeout": timeout, **options})


def _meet(group: Group, url: str | None, timeout: float, options: dict[str, Any]) -> _Steps:
    actors, size = group.actors, len(group.actors)
    nodes = yield _Step([_call(actor, inside.here) for actor in actors], "answer", timeout)
    one_node = len({node.id for node in nodes}) == 1
    hosting = _call(actors[0], inside.host, group.name, url, size, one_node)
    place: Place
    (place,) = yield _Step([hosting], "answer", timeout)
    attempt = Attempt.new(group.name)
    joining = [
        actor._ruda_join.remote(attempt, rank, place, options)
        if hasattr(actor, "_ruda_join")
        else _call(actor, inside.join, attempt, rank, place, options)
        for rank, actor in enumerate(actors)
    ]
    yield _Step(joining, "join", timeout + _GRACE, group, attempt)


def _leave(group: Group, timeout: float) -> _Steps:
    yield _Step([_leaving(group, actor) for actor in group.actors], "leave", timeout)


def _leaving(group: Group, actor: Any) -> Any:
    if hasattr(actor, "_ruda_leave"):
        return actor._ruda_leave.remote(group.name)
    return _call(actor, inside.leave, group.name)


def _call(actor: Any, function: Any, *args: Any) -> Any:
    return actor.__ray_call__.remote(function, *args)


# ---------------------------------------------------------------------- waiting for them


def _run(steps: _Steps) -> None:
    results: Any = None
    while (step := _advance(steps, results)) is not None:
        futures = [ref.future() for ref in step.refs]
        try:
            concurrent.futures.wait(futures, step.seconds, concurrent.futures.FIRST_EXCEPTION)
            results = _results(step, futures)
        except BaseException as error:
            _undo(step, error)
            raise


async def _run_async(steps: _Steps) -> None:
    results: Any = None
    while (step := _advance(steps, results)) is not None:
        futures = [asyncio.wrap_future(ref.future()) for ref in step.refs]
        try:
            await asyncio.wait(futures, timeout=step.seconds, return_when=asyncio.FIRST_EXCEPTION)
            results = _results(step, futures)
        except BaseException as error:
            for future in futures:
                future.add_done_callback(_heard)
            _undo(step, error)
            raise


def _advance(steps: _Steps, results: Any) -> _Step | None:
    try:
        return steps.send(results)
    except StopIteration:
        return None


def _undo(step: _Step, error: BaseException) -> None:
    """Tell the actors that still join why they need not, and let those that did leave again.

    Nobody waits for that.
    """
    if step.joins is not None and step.attempt is not None:
        step.attempt.failed(error, step.refs)
        for actor in step.joins.actors:
            _leaving(step.joins, actor).future().add_done_callback(_heard)


def _heard(future: Any) -> None:
    """Take an error that nobody waits for, so that it is not reported as forgotten."""
    if not future.cancelled():
        future.exception()


def _results(step: _Step, futures: Sequence[Any]) -> list[Any]:
    """What the calls returned, in rank order, or the error of the first that failed."""
    for rank, future in enumerate(futures):
        if future.done() and (error := future.exception()) is not None:
            _raise(rank, error)
    missing = tuple(rank for rank, future in enumerate(futures) if not future.done())
    if missing:
        raise CollectiveTimeoutError(
            f"the actors of ranks {', '.join(map(str, missing[:16]))} of {len(futures)} did not {step.what} "
            f"within {step.seconds:g} s; they are busy with other methods, or Ray has no room to start "
            "them (see `ray status`)",
            missing=missing,
        )
    return [future.result() for future in futures]


def _raise(rank: int, error: BaseException) -> NoReturn:
    from ray.exceptions import RayActorError

    cause = getattr(error, "cause", None)
    if isinstance(cause, RudaError):
        if cause.rank is None:
            cause.rank = rank
        raise cause from error
    if isinstance(error, RayActorError):
        raise PeerLostError(f"the actor of rank {rank} is dead: {error}", rank=rank) from error
    raise error
