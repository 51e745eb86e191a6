"""Tensors in device memory: what stands in for a memoryview where the host cannot reach the bytes.

Algorithms slice, measure and copy memory, and hand it to the transport; arithmetic is the reducer's. So
they run over device memory as it is, if that can be sliced, measured and copied in the same words. Who makes
it is a tensor's adapter: only there it is known what the device is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from .adapter import TensorAdapter, adapter_for, load_torch

if TYPE_CHECKING:
    from .arithmetic import Reducer

__all__ = [
    "DeviceMemory",
    "adapter_for_call",
    "as_view",
    "device_memory",
    "note_streams",
    "on_note_streams",
    "reducer_at",
    "say_staged",
]

T = TypeVar("T")

_log = logging.getLogger("ruda_async")


class DeviceMemory(Protocol):
    """A contiguous run of bytes on a device; a `ruda_async.transport.DeviceBuffer`.

    Everything that is asked of it is queued on one stream of the device: the one that was current when the
    collective was called. The host waits for nothing. A transport reads it when that stream has written it,
    and writes it when that stream has let go of it.

    What stands for a memoryview is typed as one (see `as_view`), because to algorithms it is the same.
    Whoever reads its bytes on the host gets a TypeError, since it has no buffer protocol.

    Attributes:
        nbytes: its length, which `len` gives too.
        span: the addresses of its first byte and of the one after its last.
        device_index: the number of its device.
    """

    nbytes: int

    @property
    def span(self) -> tuple[int, int]: ...

    @property
    def device_index(self) -> int: ...

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self:
        """A part of it, of step 1; no copy."""
        ...

    def __setitem__(self, part: slice, source: Self, /) -> None:
        """Copy `source`, which is as long and does not overlap it, over a part."""
        ...

    def scratch(self, nbytes: int) -> Self:
        """Fresh memory on the same device, aligned for every dtype, not initialised."""
        ...

    def transposed(self, itemsize: int, shape: tuple[int, ...], axes: tuple[int, ...]) -> Self:
        """The elements, an array of `shape` in C order, by the given axes; a copy if that differs."""
        ...

    def arithmetic(self, reducer: Reducer) -> Reducer:
        """What computes as `reducer` does, to the bit, on memory of this device."""
        ...


def as_view(memory: DeviceMemory) -> memoryview:
    """`memory` as algorithms take it."""
    return cast(memoryview, memory)


def device_memory(view: memoryview) -> DeviceMemory | None:
    """`view` as what it is, where it is no memory of the host's."""
    return None if type(view) is memoryview else cast(DeviceMemory, view)


def adapter_for_call(value: T, resident: bool) -> TensorAdapter[T]:
    """`adapter_for`, and of an adapter that has them the one for this call; see `TensorAdapter.for_call`.

    To be asked when the call is made, for its stream.
    """
    adapter = adapter_for(value)
    if adapter.on_devices:
        adapter = cast(Any, adapter).for_call(value, resident)
    return adapter


def reducer_at(view: memoryview, reducer: Reducer) -> Reducer:
    """`reducer`, or what does the same where `view` lies."""
    memory = device_memory(view)
    return reducer if memory is None else memory.arithmetic(reducer)


# ---------------------------------------------------------------------- calls that another thread runs

#: What keeps this thread's current streams in its context, for each kind of device.
_notes: list[Callable[[], None]] = []


def on_note_streams(note: Callable[[], None]) -> None:
    """Have `note` called by `note_streams`."""
    _notes.append(note)


def note_streams() -> None:
    """Keep in this context which streams are current in this thread, for a call that another one will run."""
    load_torch()
    for note in _notes:
        note()


# ---------------------------------------------------------------------- staging

_said: set[str] = set()


def say_staged(kind: str) -> None:
    """Log once in this process that tensors of a kind pass through host memory."""
    if kind not in _said:
        _said.add(kind)
        _log.info(
            "%s tensors are staged through page-locked host memory, because the transport in use does not "
            "take device memory",
            kind,
        )
