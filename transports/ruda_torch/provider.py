"""torch.distributed's collectives, as a provider: what Gloo's and NCCL's have in common."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from ruda_async.transport import EngineProvider, NativeCall, NativeGroup, copy_in_turns

from .calls import TYPES
from .groups import Groups

__all__ = ["TorchProvider"]


class TorchProvider(EngineProvider[Any]):
    """See `ruda_async.transport.EngineProvider`.

    Args:
        dial: opens the store where the ranks of a process group meet.
        least: bytes of input from which a call is taken without being asked for by name.
    """

    failures = (RuntimeError, dist.DistError)
    #: Operators that it has not.
    lacking: tuple[str, ...] = ()

    def __init__(self, dial: Callable[[timedelta], Any], least: int) -> None:
        super().__init__(Groups(dial, self.make), least)
        self.label = self.name

    def make(self, store: Any, rank: int, size: int, wait: timedelta) -> Any:
        """A process group; blocks until all its ranks are there."""
        raise NotImplementedError

    def lacks(self, call: NativeCall) -> str | None:
        """See `EngineProvider.lacks`."""
        if call.operation == "all_gather_v":
            return "torch has no such operation"
        if call.operator is not None and (call.dtype not in TYPES or call.operator in self.lacking):
            return f"{self.name} has no {call.operator} of {call.dtype} as documented"
        return None

    async def prepare(
        self, group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview
    ) -> memoryview:
        """See `EngineProvider.prepare`.

        torch reduces and broadcasts in place, so the input is there already then.
        """
        if call.operation in ("all_reduce", "reduce", "broadcast"):
            work = out if group.owned and len(out) == call.nbytes else _room(call.nbytes)
            if len(source):
                await copy_in_turns(work, source)
            return work
        return out if group.owned else _room(len(out))


def _room(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data
