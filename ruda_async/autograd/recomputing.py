"""Forward calls that a checkpoint makes again, in the middle of a backward pass.

On the communicator itself a pass that fails would leave ranks a call apart. So they are made on a channel
whose name has the number of the communicator's next call, the same on all ranks, and of the failures since.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..channel import Channel
from ..communicator import AsyncCommunicator
from ..sync import Communicator

__all__ = ["abandon", "made_again", "moment", "recomputes"]

_moments = itertools.count(1)


def moment() -> int:
    """A number that grows with time."""
    return next(_moments)


class _Failures(NamedTuple):
    """How many passes have failed since the channel's next call had this number, and when the last."""

    number: int = 0
    passes: int = 0
    latest: int = 0


_failures: weakref.WeakKeyDictionary[Channel, _Failures] = weakref.WeakKeyDictionary()


def recomputes() -> bool:
    """Whether this thread is in a backward pass, so that a forward call here is one made again."""
    return torch._C._current_graph_task_id() != -1


def _failed(channel: Channel) -> _Failures:
    found = _failures.get(channel, _Failures())
    return found if found.number == channel.next else _Failures(channel.next)


def _name(channel: Channel) -> str:
    return f"recomputed {channel.next}.{_failed(channel).passes}"


def abandon(comm: AsyncCommunicator, since: int) -> str | None:
    """The pass that began at the moment `since` has failed here: the next makes its calls elsewhere.

    Returns:
        the name of the channel on which the failed one made them; None if this was called for it already.
    """
    channel = comm._channel
    before = _failed(channel)
    if before.latest > since:
        return None
    name = _name(channel)
    _failures[channel] = _Failures(channel.next, before.passes + 1, moment())
    return name


@contextmanager
def made_again(comm: Communicator) -> Iterator[Communicator]:
    """Where to make a forward call: on `comm` itself, or in a backward pass on the channel for those."""
    if not recomputes():
        yield comm
        return
    twin = comm.channel(_name(comm._inner._channel))
    try:
        yield twin
    finally:
        twin.close()  # the next call counts on from there
