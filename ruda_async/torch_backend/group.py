"""A process group, but for its calls: how they are started, what torch asks of it, and its end."""

# torch's own C++ types say less than what is given here.
# mypy: disable-error-code="override"

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from .. import sync
from ..errors import RudaError, TensorContractError
from . import calls
from .calls import Call
from .signatures import tensors_of
from .work import BackendError, Part, Work

__all__ = ["Group"]

#: Seconds that a group which is destroyed waits for calls that nobody waited for.
_DRAIN = 10.0
_CPU = torch.device("cpu")


class Group(dist.ProcessGroup):
    """The group as torch keeps it; see `ProcessGroup`, which has the calls."""

    def __init__(self, store: Store, communicator: sync.Communicator, timeout: timedelta, name: str) -> None:
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]
        self._store = store
        self._name = name
        self._description = "undefined"
        self.communicator = communicator
        self._timeout = timeout
        self._sequence = 0
        self._lock = threading.Lock()
        self._running: set[Part] = set()

    # ------------------------------------------------------------------ starting calls

    def _start(
        self,
        name: str,
        builders: Sequence[Callable[[], Call]],
        outputs: list[Tensor],
        timeout: timedelta | None,
    ) -> Work:
        """Start one call for each builder. A builder that fails starts one that fails on all ranks."""
        return self._submit(name, [_built(name, build) for build in builders], outputs, timeout)

    def _start_pair(self, name: str, build: Callable[[Tensor], Call], tensors: Any) -> Work:
        """Start a call of two ranks. A builder that fails does so here alone."""
        values = tensors_of(tensors)
        try:
            if len(values) != 1:
                raise TensorContractError(f"{name} of {len(values)} tensors; pass one")
            call = build(values[0])
        except TensorContractError as error:
            error.at(f"rank {self.rank()}, {name}", self.rank())
            raise BackendError(error) from error
        return self._submit(name, [call], values, None)

    def _submit(
        self, name: str, built: Sequence[Call], outputs: list[Tensor], timeout: timedelta | None
    ) -> Work:
        limit = timeout if timeout is not None and timeout > timedelta(0) else self._timeout
        seconds = max(limit.total_seconds(), 1e-3)
        comm = self.communicator
        label = f"rank {comm.rank} of {comm.world_size}, group {self._name!r}, {name}"
        try:
            with self._lock:  # the calls of one work follow each other, whatever other threads start
                self._sequence += 1
                parts = [
                    comm._loop.start(calls.carry_out(call, comm._inner, seconds), label).future
                    for call in built
                ]
                self._running.update(parts)
        except RudaError as error:
            raise BackendError(error) from error
        for part in parts:
            part.add_done_callback(self._running.discard)
        return Work(parts, label, outputs)

    # ------------------------------------------------------------------ facts that torch asks for

    def getBackendName(self) -> str:
        """``"ruda"``."""
        return "ruda"

    _get_backend_name = name = getBackendName

    # torch's C++ keeps these in backends, which a process group of Python has none of.

    def getGroupName(self) -> str:
        """torch's name of the group, by which functional collectives find it."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """What torch calls after the group was made."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the group is for, as `new_group` was told."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """What torch calls after the group was made."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def get_group_store(self) -> Store:
        """The store that torch made for this group."""
        return self._store

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: Any) -> Group:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend ruda moves CPU tensors, and has nothing for device {device}")
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass  # every rank counts from 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Leave in an orderly way, after the calls that were started; bounded in time."""
        for part in list(self._running):
            try:
                part.exception(_DRAIN)
            except BaseException:
                break
        self.communicator.close()

    def abort(self) -> None:
        """Drop all links at once; the other ranks see a lost peer."""
        self.communicator.abort("the process group was aborted")


def _built(name: str, build: Callable[[], Call]) -> Call:
    """The call, or one that fails on every rank because this one's arguments are bad."""
    try:
        return build()
    except TensorContractError as error:
        return calls.refusal(name, error)
    except Exception as error:
        return calls.refusal(name, TensorContractError(f"{type(error).__name__}: {error}"))
