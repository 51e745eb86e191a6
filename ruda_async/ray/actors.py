"""What runs inside the actors: each joins its groups and keeps their communicators.

An actor is a process of its own, so the groups are kept in the module. The driver reaches a blocking actor by
Ray's ``__ray_call__``; an asyncio actor has to wait on its own event loop, which takes a method of its class:
`AsyncRank`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import environment
from ..errors import ConfigError
from .failing import Attempt
from .place import Host, Place

if TYPE_CHECKING:
    from ..communicator import AsyncCommunicator
    from ..sync import Communicator

__all__ = ["AsyncRank", "Node", "async_communicator", "communicator"]

#: Group → its communicator in this process.
_groups: dict[str, AsyncCommunicator | Communicator] = {}
#: Group → the meeting place that this process, as rank 0, has made and not yet used.
_hosts: dict[str, Host] = {}
#: Group → why this process did not get into it at the last attempt.
_failed: dict[str, str] = {}


class Node(NamedTuple):
    """Where an actor runs: Ray's name for the node, and the address by which others reach it."""

    id: str
    address: str


def communicator(group: str = "default") -> Communicator:
    """The blocking communicator of this actor in `group`.

    Raises:
        ConfigError: nobody connected it, or this is an asyncio actor.
    """
    from ..sync import Communicator

    found = _find(group)
    if not isinstance(found, Communicator):
        raise ConfigError(f"group {group!r} of this asyncio actor is async_communicator({group!r})")
    return found


def async_communicator(group: str = "default") -> AsyncCommunicator:
    """The asynchronous communicator of this asyncio actor in `group`; it belongs to the actor's event loop.

    Raises:
        ConfigError: nobody connected it, or this actor blocks.
    """
    from ..communicator import AsyncCommunicator

    found = _find(group)
    if not isinstance(found, AsyncCommunicator):
        raise ConfigError(f"group {group!r} of this blocking actor is communicator({group!r})")
    return found


def _find(group: str) -> AsyncCommunicator | Communicator:
    if group not in _groups:
        known = ", ".join(map(repr, sorted(_groups))) or "none"
        why = f"; the last attempt failed: {_failed[group]}" if group in _failed else ""
        raise ConfigError(
            f"this process is in no group {group!r} (it is in {known}){why}; call "
            f"ruda_async.ray.connect_actors(actors, group={group!r}) on the driver first"
        )
    return _groups[group]


# ---------------------------------------------------------------------- what the driver calls


def here(actor: object) -> Node:
    """Where this actor runs.

    Raises:
        ConfigError: it is an asyncio actor whose class cannot wait for its peers.
    """
    import ray

    # What makes an actor one of asyncio's, by Ray's own rule.
    waits = inspect.getmembers(
        type(actor), lambda m: inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m)
    )
    if waits and not isinstance(actor, AsyncRank):
        raise ConfigError(
            f"{_class_name(actor)} is an asyncio actor and does not inherit from ruda_async.ray.AsyncRank; "
            f"write class {_class_name(actor)}(ruda_async.ray.AsyncRank)"
        )
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def host(actor: object, group: str, url: str | None, world_size: int, one_node: bool) -> Place:
    """Make the place where `group` meets; this actor is its rank 0."""
    if (former := _hosts.pop(group, None)) is not None:
        former.close()  # its group never met
    _hosts[group] = Host(url, world_size, here(actor).address, one_node)
    return _hosts[group].place


def join(actor: object, attempt: Attempt, rank: int, place: Place, options: dict[str, Any]) -> None:
    """Join a group and keep its blocking communicator; a former one of that name is closed."""
    from ..connecting import connect
    from ..sync import opened

    leave(actor, attempt.group)
    with _joining(attempt, rank, place):
        _groups[attempt.group] = opened(attempt.unless_failed(connect(**options)))


@contextmanager
def _joining(attempt: Attempt, rank: int, place: Place) -> Iterator[None]:
    """The environment by which `rank` joins; an error is kept for those who ask for the group."""
    own = _hosts.pop(attempt.group, None) if rank == 0 else None
    try:
        with environment(place.variables(rank) if own is None else own.variables()):
            yield
        _failed.pop(attempt.group, None)
    except Exception as error:
        _failed[attempt.group] = str(error)
        raise
    finally:
        if own is not None:
            own.close()


def leave(actor: object, group: str) -> None:
    """Close the blocking communicator of `group`, if there is one."""
    former = _groups.pop(group, None)
    if former is not None:
        former.close()


class AsyncRank:
    """What asyncio actors inherit from to be ranks."""

    async def _ruda_join(self, attempt: Attempt, rank: int, place: Place, options: dict[str, Any]) -> None:
        from ..connecting import connect

        await self._ruda_leave(attempt.group)
        with _joining(attempt, rank, place):
            _groups[attempt.group] = await attempt.unless_failed(connect(**options))

    async def _ruda_leave(self, group: str) -> None:
        former: Any = _groups.pop(group, None)
        if former is not None:
            await former.close()


def _class_name(actor: object) -> str:
    return type(actor).__name__
