"""Ranks that are Ray actors.

On the driver, `connect_actors` makes ranks of a list of actors; inside each of them, `communicator` (in
actors that block) or `async_communicator` (in asyncio actors, which inherit from `AsyncRank`) is what their
code calls. `register_backend` serves code that was written for ``ray.util.collective``.

Ray carries the meeting place and a fresh job secret; the tensors go from actor to actor by one of this
library's transports and never through Ray's object store.
"""

from __future__ import annotations

from .actors import AsyncRank, async_communicator, communicator
from .driver import Group, connect_actors, connect_actors_async

__all__ = [
    "AsyncRank",
    "Group",
    "async_communicator",
    "communicator",
    "connect_actors",
    "connect_actors_async",
    "register_backend",
]


def register_backend() -> None:
    """Make ``"ruda"`` a backend of ``ray.util.collective`` in this process. Harmless twice.

    Ray wants that in the driver and in every actor: call it in ``__init__``, or once for all workers by
    ``ray.init(runtime_env={"worker_process_setup_hook": "ruda_async.ray.register_backend"})``.

    Raises:
        TransportUnavailableError: Ray is not installed, or it has no registry of backends.
    """
    from .registering import register

    register()
