"""torch tensors on devices: CUDA's, with its streams.

Whatever torch can compute on serves as the device, the CPU too; that is how it is tested where no GPU is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from .adapter import Target, TensorSpec, check_out
from .device import as_view, say_staged
from .torch_adapter import ADAPTER, TorchAdapter, check_writable, host_bytes, torch_dtype, wrote
from .torch_arithmetic import TorchReducer

if TYPE_CHECKING:
    from .arithmetic import Reducer

__all__ = ["TorchDevice", "TorchMemory", "TorchResident", "TorchStaged"]

#: An integer of each size that an element may have: what is only moved is moved as its bits.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchMemory:
    """Bytes on a torch device; see `tensors.device.DeviceMemory`.

    Args:
        data: ``[n]`` of uint8, contiguous.
        device: whose stream orders what is done with it.
    """

    __slots__ = ("data", "device", "nbytes")

    def __init__(self, data: Tensor, device: TorchDevice) -> None:
        self.data = data
        self.device = device
        self.nbytes = data.numel()

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice, /) -> Self:
        return type(self)(self.data[part], self.device)

    def __setitem__(self, part: slice, source: Self, /) -> None:
        with self.device.queued():
            self.data[part].copy_(source.data)

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the first byte and of the one after the last."""
        start = self.data.data_ptr()
        return start, start + self.nbytes

    @property
    def device_index(self) -> int:
        """The number of the device."""
        return self.data.device.index or 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.data.data_ptr(), False),
            "strides": None,
            "version": 3,
            "stream": self.device.handle,
        }

    def scratch(self, nbytes: int) -> Self:
        """See `DeviceMemory.scratch`."""
        with self.device.queued():
            return type(self)(torch.empty(nbytes, dtype=torch.uint8, device=self.data.device), self.device)

    def transposed(self, itemsize: int, shape: tuple[int, ...], axes: tuple[int, ...]) -> Self:
        """See `DeviceMemory.transposed`."""
        with self.device.queued():
            elements = self.data.view(_CARRIERS[itemsize]).reshape(shape).permute(axes)
            return type(self)(elements.contiguous().view(-1).view(torch.uint8), self.device)

    def arithmetic(self, reducer: Reducer) -> Reducer:
        """See `DeviceMemory.arithmetic`."""
        found: Any = _reducer(reducer.dtype, reducer.operator, reducer.size)
        return found  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _reducer(dtype: str, operator: str, size: int) -> TorchReducer:
    return TorchReducer(dtype, operator, size)


class TorchDevice(TorchAdapter):
    """The adapter of one call for tensors of one device; see `TorchStaged` and `TorchResident`.

    It is made when the collective is called, and all that the call does on the device is queued on the stream
    that is current then, whatever other tasks of the loop make current meanwhile.

    Args:
        device: with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = stream_of_call(device) if device.type == "cuda" else None

    def queued(self) -> AbstractContextManager[Any]:
        """Inside it torch queues work on the call's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @property
    def handle(self) -> int:
        """The stream's number in the array interface, in which the default stream is 1."""
        return 1 if self._stream is None else self._stream.cuda_stream or 1

    def for_call(self, value: Tensor, resident: bool) -> TorchAdapter:
        return self

    def _copies(self, out: Tensor, staging: Tensor) -> Callable[[], Tensor]:
        """What copies `staging` to `out` at the end of the call."""

        def finish() -> Tensor:
            # To the host the copy waits for the device: who reads it there will not.
            with self.queued():
                return out.copy_(staging, non_blocking=out.is_cuda)

        return finish


class TorchStaged(TorchDevice):
    """Tensors pass through page-locked memory of the host.

    `read` waits until the device has written the tensor. Results are copied to the device while the host goes
    on.
    """

    def read(self, value: Tensor) -> memoryview:
        say_staged("CUDA")
        self.spec(value)
        host = self._room(tuple(value.shape), value.dtype)
        with self.queued():
            return host_bytes(host.copy_(value.detach()))

    def allocate(self, like: Tensor, shape: tuple[int, ...], dtype: str) -> Target[Tensor]:
        say_staged("CUDA")
        staging = self._room(shape, torch_dtype(dtype))

        def finish() -> Tensor:
            with self.queued():
                return staging.to(self.device, non_blocking=True)

        return Target(host_bytes(staging), finish)

    def into(self, out: Tensor, spec: TensorSpec) -> Target[Tensor]:
        if out.device != self.device:
            return ADAPTER.into(out, spec)
        say_staged("CUDA")
        check_out(ADAPTER, out, spec)
        check_writable(out)
        staging = self._room(spec.shape, out.dtype)
        return Target(host_bytes(staging), self._copies(out, staging))

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


class TorchResident(TorchDevice):
    """Tensors stay in device memory; buffers are `TorchMemory`."""

    def read(self, value: Tensor) -> memoryview:
        self.spec(value)
        plain = value.detach()
        if plain.is_neg() or not plain.is_contiguous():
            with self.queued():
                plain = plain.resolve_neg().contiguous()
        return self._view(plain)

    def allocate(self, like: Tensor, shape: tuple[int, ...], dtype: str) -> Target[Tensor]:
        with self.queued():
            tensor = torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)
        return Target(self._view(tensor), lambda: tensor)

    def into(self, out: Tensor, spec: TensorSpec) -> Target[Tensor]:
        check_out(ADAPTER, out, spec)
        check_writable(out)
        if out.device == self.device and out.is_contiguous() and not out.is_neg():
            return Target(self._view(out.detach()), lambda: wrote(out))
        with self.queued():
            staging = torch.empty(spec.shape, dtype=out.dtype, device=self.device)
        return Target(self._view(staging), self._copies(out, staging))

    def _view(self, tensor: Tensor) -> memoryview:
        return as_view(TorchMemory(tensor.view(-1).view(torch.uint8), self))


#: By the number of the device: the streams current in the thread that made a call which another one runs.
_noted: ContextVar[dict[int, Any] | None] = ContextVar("ruda_async streams", default=None)


def note_streams() -> None:
    """See `device.note_streams`."""
    cuda: Any = torch.cuda  # typed in part
    if cuda.is_initialized():
        _noted.set({index: cuda.current_stream(index) for index in range(cuda.device_count())})


def stream_of_call(device: torch.device) -> Any:
    """The stream of `device` that is current where the call was made."""
    noted = _noted.get()
    return torch.cuda.current_stream(device) if noted is None else noted[device.index]
