"""Making process groups, as torch asks for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, RudaError
from .connecting import Options, claim, join
from .process_group import ProcessGroup
from .work import BackendError

__all__ = ["create"]


def create(group: Any, options: Any) -> ProcessGroup:
    """What torch calls to make a process group of this backend.

    A subgroup of a group of this backend shares its connections and is made without communication; any
    other group connects.

    Raises:
        BackendError: the ranks cannot be connected; the library's error is in ``.error``.
        TypeError: the options are another backend's.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options of the backend ruda are ruda_async.torch_backend.Options, not "
            f"{type(options).__name__}"
        )
    ranks = list(group.global_ranks_in_group)
    world = dist.group.WORLD
    try:
        if ranks and isinstance(world, ProcessGroup):
            if options is not None:
                raise ConfigError("a subgroup shares its connections: give pg_options to init_process_group")
            communicator = world.communicator.subgroup(ranks, f"torch {group.group_id}")
        else:
            claimed = None if ranks else claim(group.group_rank, group.group_size)
            communicator = claimed or join(
                group.store,
                group.group_rank,
                group.group_size,
                group.timeout,
                options or Options(),
                own_place=bool(ranks),
            )
    except RudaError as error:
        raise BackendError(error) from error
    return ProcessGroup(group.store, communicator, group.timeout, group.group_id)
