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
        """Whether all that was queued on the buffers' streams until now, and may touch them, is over.

        A buffer's stream is the one that its array interface names, else the current one.
        """
        ...

    def room(self, nbytes: int) -> memoryview:
        """Host memory that the device copies to and from at full speed."""
        ...

    def read(self, buffer: Buffer, *, settled: bool = False) -> memoryview:
        """A copy of device memory on the host, in stream order; waits for the device.

        `settled`: its fence has passed, so that nothing else that the stream has to do is waited for.
        """
        ...

    def write(self, buffer: Buffer, data: memoryview) -> None:
        """Copy host memory over device memory, in stream order; `data` may change afterwards.

        Where the buffer names its stream, the host does not wait for it.
        """
        ...


def on_device(buffers: Sequence[Buffer]) -> bool:
    """Whether any of `buffers` is device memory."""
    return any(
        type(buffer) is not memoryview and hasattr(buffer, "__cuda_array_interface__") for buffer in buffers
    )


class DeviceWindow:
    """A part of a device buffer; keeps the whole alive."""

    def __init__(self, owner: Any, start: int, stop: int) -> None:
        whole = owner.__cuda_array_interface__
        address, readonly = whole["data"]
        self.owner = owner
        #: The number of the device; None where the owner does not say.
        self.device_index: int | None = getattr(owner, "device_index", None)
        self.nbytes = stop - start
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (address + start, readonly),
            "strides": None,
            "version": 3,
            "stream": whole.get("stream"),
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

    def read(self, buffer: Buffer, *, settled: bool = False) -> memoryview:
        raise TypeError(f"{type(buffer).__name__} is device memory, and torch sees no CUDA device here")

    def write(self, buffer: Buffer, data: memoryview) -> None:
        raise TypeError(f"{type(buffer).__name__} is device memory, and torch sees no CUDA device here")


def _always() -> bool:
    return True


#: The accelerator of a host without one.
NO_DEVICE: Accelerator = _NoDevice()


class TorchAccelerator:
    """CUDA through torch: a buffer's stream orders all that is done with it."""

    def __init__(self, torch: Any, native: bool) -> None:
        self._torch = torch
        self.native = native
        #: By device: where memory is copied of which the fence has passed.
        self._aside: dict[Any, Any] = {}

    def _device(self, buffer: Any) -> Any:
        """The buffer's device; the current one where it does not say."""
        index = getattr(buffer, "device_index", None)
        return self._torch.device("cuda", self._torch.cuda.current_device() if index is None else index)

    def _tensor(self, buffer: Buffer) -> Any:
        return self._torch.as_tensor(buffer, device=self._device(buffer))

    def _stream(self, buffer: Any, device: Any) -> Any:
        """The stream that the buffer names, or else the current one."""
        cuda = self._torch.cuda
        handle = buffer.__cuda_array_interface__.get("stream")
        if handle is None:
            return cuda.current_stream(device)
        if handle == 1:  # what the array interface calls the default stream
            return cuda.default_stream(device)
        return cuda.ExternalStream(handle, device=device)

    def fence(self, buffers: Sequence[Buffer]) -> Callable[[], bool]:
        """See `Accelerator.fence`: an event on every stream that a buffer has."""
        cuda = self._torch.cuda
        streams = []
        for buffer in buffers:
            if not isinstance(buffer, memoryview) and buffer.nbytes:
                stream = self._stream(buffer, self._device(buffer))
                if stream not in streams:
                    streams.append(stream)
        events = []
        for stream in streams:
            event = cuda.Event()
            event.record(stream)
            events.append(event)
        return lambda: all(event.query() for event in events)

    def room(self, nbytes: int) -> memoryview:
        """See `Accelerator.room`: page-locked memory."""
        return memoryview(self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy())

    def read(self, buffer: Buffer, *, settled: bool = False) -> memoryview:
        """See `Accelerator.read`."""
        host = self.room(buffer.nbytes)
        if buffer.nbytes:
            tensor = self._tensor(buffer)
            cuda, device = self._torch.cuda, tensor.device
            if settled:
                stream = self._aside.get(device) or self._aside.setdefault(device, cuda.Stream(device))
            else:
                stream = self._stream(buffer, device)
            with cuda.stream(stream):
                self._torch.frombuffer(host, dtype=self._torch.uint8).copy_(tensor)
        return host

    def write(self, buffer: Buffer, data: memoryview) -> None:
        """See `Accelerator.write`: through page-locked memory, which torch keeps until it was copied."""
        tensor: Any = self._tensor(buffer)
        host = self._torch.empty(len(data), dtype=self._torch.uint8, pin_memory=True)
        memoryview(host.numpy())[:] = data
        named = getattr(buffer, "__cuda_array_interface__", {}).get("stream") is not None
        with self._torch.cuda.stream(self._stream(buffer, tensor.device)):
            tensor.copy_(host, non_blocking=named)


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
