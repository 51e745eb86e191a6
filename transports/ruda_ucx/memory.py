"""Host and device memory as UCX wants it: pieces of buffers, and when a device is done with them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ruda_async.transport import Buffer, scatter

__all__ = ["NO_DEVICE", "Accelerator", "DeviceWindow", "find_accelerator", "on_device", "piece", "spread"]

_logger = logging.getLogger("ruda_async.ucx")


class Accelerator(Protocol):
    """What the transport asks of a device.

    Attributes:
        native: UCX reads and writes device memory itself; else payloads are staged through the host.
    """

    native: bool

    def fence(self, buffers: Sequence[Buffer]) -> Callable[[], bool]:
        """Whether all that was queued on the current stream until now, and may touch `buffers`, is over."""
        ...

    def room(self, nbytes: int) -> memoryview:
        """Host memory that the device copies to and from at full speed."""
        ...

    def read(self, buffer: Buffer) -> memoryview:
        """A copy of device memory on the host, in stream order; waits for the device."""
        ...

    def write(self, buffer: Buffer, data: memoryview) -> None:
        """Copy host memory over device memory, in stream order; `data` may change afterwards."""
        ...


def on_device(buffers: Sequence[Buffer]) -> bool:
    """Whether any of `buffers` is device memory."""
    return any(
        type(buffer) is not memoryview and hasattr(buffer, "__cuda_array_interface__") for buffer in buffers
    )


class DeviceWindow:
    """A part of a device buffer; keeps the whole alive."""

    def __init__(self, owner: Any, start: int, stop: int) -> None:
        address, readonly = owner.__cuda_array_interface__["data"]
        self.owner = owner
        self.nbytes = stop - start
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (address + start, readonly),
            "strides": None,
            "version": 3,
        }


def piece(buffer: Buffer, start: int, stop: int) -> Buffer:
    """The bytes `start` to `stop` of a buffer, without a copy."""
    if isinstance(buffer, memoryview):
        return buffer[start:stop]
    return DeviceWindow(buffer, start, stop)


def spread(data: memoryview, buffers: Sequence[Buffer], accelerator: Accelerator) -> None:
    """Copy `data` over host and device buffers in turn; the lengths must add up."""
    if not on_device(buffers):
        scatter(data, buffers)
        return
    at = 0
    for buffer in buffers:
        part = data[at : at + buffer.nbytes]
        at += buffer.nbytes
        if isinstance(buffer, memoryview):
            scatter(part, (buffer,))
        elif part:
            accelerator.write(buffer, part)


class _NoDevice:
    """Where there is no device: host memory is always ready."""

    native = False

    def fence(self, buffers: Sequence[Buffer]) -> Callable[[], bool]:
        return _always

    def room(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def read(self, buffer: Buffer) -> memoryview:
        raise TypeError(f"{type(buffer).__name__} is device memory, and torch sees no CUDA device here")

    def write(self, buffer: Buffer, data: memoryview) -> None:
        raise TypeError(f"{type(buffer).__name__} is device memory, and torch sees no CUDA device here")


def _always() -> bool:
    return True


#: The accelerator of a host without one.
NO_DEVICE: Accelerator = _NoDevice()


class TorchAccelerator:
    """CUDA through torch: its current stream orders everything."""

    def __init__(self, torch: Any, native: bool) -> None:
        self._torch = torch
        self.native = native

    def _tensor(self, buffer: Buffer) -> Any:
        return self._torch.as_tensor(buffer, device="cuda")

    def fence(self, buffers: Sequence[Buffer]) -> Callable[[], bool]:
        """See `Accelerator.fence`: an event on the current stream of every device that has a buffer."""
        cuda = self._torch.cuda
        devices = {self._tensor(b).device for b in buffers if not isinstance(b, memoryview) and b.nbytes}
        events = []
        for device in devices:
            event = cuda.Event()
            event.record(cuda.current_stream(device))
            events.append(event)
        return lambda: all(event.query() for event in events)

    def room(self, nbytes: int) -> memoryview:
        """See `Accelerator.room`: page-locked memory."""
        return memoryview(self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy())

    def read(self, buffer: Buffer) -> memoryview:
        """See `Accelerator.read`."""
        host = self.room(buffer.nbytes)
        if buffer.nbytes:
            self._torch.frombuffer(host, dtype=self._torch.uint8).copy_(self._tensor(buffer))
        return host

    def write(self, buffer: Buffer, data: memoryview) -> None:
        """See `Accelerator.write`: a blocking copy on the current stream."""
        host = data if not data.readonly else memoryview(bytearray(data))
        self._tensor(buffer).copy_(self._torch.frombuffer(host, dtype=self._torch.uint8))


def find_accelerator(cuda_support: bool) -> Accelerator:
    """The device of this process, if the program uses one: torch's CUDA.

    Args:
        cuda_support: what UCX's context says of itself; staging it is where that is False.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return NO_DEVICE
    if not cuda_support:
        _logger.info("UCX has no CUDA support with these settings: device memory is staged through the host")
    return TorchAccelerator(torch, cuda_support)
