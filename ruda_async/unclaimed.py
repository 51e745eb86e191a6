"""Messages that came for a receive which was cancelled before it could go on with them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from .tensors import Target, TensorAdapter, TensorSpec, adapter_for_call
from .transport.base import Envelope, Ready, Transport

__all__ = ["Unclaimed"]


class Unclaimed:
    """What the next receives of a peer and tag get before they ask the transport.

    At most one message waits for each of them: who receives it has the turn, and so had who left it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tensors: dict[tuple[int, int], tuple[Envelope, Any]] = {}

    def probe(self, member: int, wire_tag: int) -> Awaitable[Envelope]:
        """`Transport.probe`, of what waits here first."""
        waiting = self._tensors.get((member, wire_tag))
        return self._transport.probe(member, wire_tag) if waiting is None else Ready(waiting[0])

    def leave(
        self,
        member: int,
        wire_tag: int,
        envelope: Envelope,
        adapter: TensorAdapter[Any],
        target: Target[Any],
        spec: TensorSpec,
        out: Any,
    ) -> None:
        """Keep the message that fills `target`; what lies in the caller's `out` is copied."""
        if out is not None:
            fresh = adapter.allocate(out, spec.shape, spec.dtype)
            fresh.buffer[:] = target.buffer
            target = fresh
        self._tensors[member, wire_tag] = (envelope, target.finish())

    def take(self, member: int, wire_tag: int, spec: TensorSpec, like: Any, out: Any) -> Target[Any] | None:
        """What waits here, as a tensor of `like`'s kind and device, or in `out`; None if nothing does."""
        waiting = self._tensors.get((member, wire_tag))
        if waiting is None:
            return None
        pattern = like if out is None else out
        # On the host, whatever devices the two lie on.
        adapter = adapter_for_call(pattern, False)
        target = (
            adapter.into(out, spec) if out is not None else adapter.allocate(pattern, spec.shape, spec.dtype)
        )
        tensor = waiting[1]
        target.buffer[:] = adapter_for_call(tensor, False).read(tensor)
        del self._tensors[member, wire_tag]
        return target
