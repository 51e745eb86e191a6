"""One collective in flight on this rank: the narrow door from algorithms to the transport.

Algorithms see ranks of their own group, numbered ``0 … size-1``, and three verbs. Tags, heads, deadlines,
failure and the transport stay on this side of the door.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from ..heap import Heap
    from ..tensors import Target, TensorAdapter
    from ..transport.base import Buffer, Capabilities, Envelope
    from ..transport.provider import NativeCall, Provider
    from .native import Native

__all__ = ["Link", "Settings"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What was chosen for a communicator and algorithms must respect.

    Attributes:
        algorithm: the name of the preferred algorithm, or None for the selector's table.
        order: ``"exact"`` for the documented summation order, ``"any"`` to let algorithms choose.
        max_bytes: the byte budget of one message (`comm.bounded`), or None.
        device_memory: tensors in device memory go down as they are; as `Node.device_memory` has it.
    """

    algorithm: str | None = None
    order: str = "exact"
    max_bytes: int | None = None
    device_memory: bool = False


class Link(Protocol):
    """What an algorithm may do. `lane` separates concurrent message streams of one operation.

    Messages between two ranks on one lane keep their order, so both sides must post sends and receives
    of a lane in the same order. Lanes are ``0 … 15``. The first message to a peer on a lane carries the
    operation's fingerprint as its head, added and checked behind this door: an algorithm never sees it.
    """

    rank: int
    size: int
    capabilities: Capabilities
    settings: Settings
    #: Memory that all ranks of the group see; None where the transport has none.
    heap: Heap | None
    #: Who runs whole collectives here; see `transport.provider`.
    providers: tuple[Provider, ...]

    def native(self, call: NativeCall, exact: bool = True) -> Native | None:
        """The turn of this operation where a provider runs it; to be asked for before anything is awaited.

        Args:
            call: what all ranks agree on.
            exact: reductions have to be in the documented order.
        """
        ...

    def send(self, peer: int, *buffers: Buffer, lane: int = 0) -> Awaitable[None]:
        """Start one message to `peer`; finished when the buffers may be changed again."""
        ...

    def recv_into(self, peer: int, *buffers: Buffer, lane: int = 0) -> Awaitable[None]:
        """Start to receive the next message from `peer` into `buffers`, which it must fill exactly."""
        ...

    def probe(self, peer: int, lane: int = 0) -> Awaitable[Envelope]:
        """Wait for the next message from `peer` without taking it; its head was checked."""
        ...

    async def turn(self) -> None:
        """Let the event loop run other work; algorithms call it between blocks of long local work."""
        ...

    async def allocate(
        self, adapter: TensorAdapter[T], like: T, shape: tuple[int, ...], dtype: str
    ) -> Target[T]:
        """`TensorAdapter.allocate`, from `heap` where there is one and the tensor is large."""
        ...

    def open(self, peer: int, number: int) -> memoryview:
        """Memory of `peer`; only with a `heap`. See `Regions.open`."""
        ...

    def signal(self, peer: int) -> None:
        """Something was written to shared memory that `peer` may wait for."""
        ...

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Count bytes that move otherwise than by `send` and `recv_into`."""
        ...

    def watch(self, peer: int, ready: Callable[[], bool]) -> Awaitable[None]:
        """Wait for something that `peer` writes to shared memory."""
        ...
