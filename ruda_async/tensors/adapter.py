"""The one door between the library and a tensor library: bytes out, bytes in.

An adapter is stateless and never holds on to a tensor. What it hands out is the tensor's own memory
wherever that is possible, so a contiguous tensor on the host costs no copy in either direction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..errors import TensorContractError

__all__ = ["Target", "TensorAdapter", "TensorSpec", "adapter_for", "check_out", "register_adapter"]

T = TypeVar("T")


class TensorSpec(NamedTuple):
    """What two tensors must agree on.

    Attributes:
        dtype: a name that `dtype_of` knows.
        shape: the lengths of the axes; ``()`` for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]


class Target(NamedTuple, Generic[T]):
    """A tensor in the making.

    Attributes:
        buffer: writable C-contiguous bytes (format ``B``) to fill.
        finish: returns the tensor once they are filled; called once.
    """

    buffer: memoryview
    finish: Callable[[], T]


class TensorAdapter(Protocol[T]):
    """How one kind of tensor is read and made. `register_adapter` adds a kind.

    Attributes:
        kind: the kind's name for error texts, such as ``"numpy"``.
        on_devices: its tensors may lie in device memory, of which the host and its streams know nothing.
            Such an adapter also has the method ``for_call(value, resident)``, asked when a call is made: the
            adapter for that call alone, which keeps to the stream that is current now. Its buffers are
            `DeviceMemory` if `resident`, and on the host otherwise (see `say_staged`). For a value that lies
            on the host it is the adapter itself.
    """

    kind: str
    on_devices: bool

    def accepts(self, value: object) -> bool:
        """Whether `value` is of this kind. The answer depends on its type alone and is cached by it.

        Raises:
            TensorContractError: it is of this kind, but a type of it that cannot travel.
        """
        ...

    def spec(self, value: T) -> TensorSpec:
        """Dtype and shape.

        Raises:
            TensorContractError: its dtype, layout or device is not supported.
        """
        ...

    def read(self, value: T) -> memoryview:
        """The elements in C order as contiguous bytes of format ``B``, perhaps read-only.

        The tensor's own memory where it is contiguous and on the host, else one copy. Empty where the
        tensor has no elements.

        Raises:
            TensorContractError: as `spec`.
        """
        ...

    def allocate(self, like: T, shape: tuple[int, ...], dtype: str) -> Target[T]:
        """A fresh contiguous tensor of `like`'s kind and device.

        Raises:
            TensorContractError: this kind has no such dtype.
        """
        ...

    def into(self, out: T, spec: TensorSpec) -> Target[T]:
        """Fill the caller's `out`: in place where it is contiguous, else through a staging buffer.

        Raises:
            TensorContractError: `out` is of another kind, dtype or shape, or cannot be written.
        """
        ...

    def movedim(self, value: T, source: int, destination: int) -> T:
        """A view with one axis moved.

        Raises:
            TensorContractError: there is no such axis.
        """
        ...


#: Adapters in the order they are asked; the last to be registered first.
_adapters: list[TensorAdapter[Any]] = []
_by_type: dict[type, TensorAdapter[Any]] = {}
_torch_is_known = False


def register_adapter(adapter: TensorAdapter[Any]) -> None:
    """Teach the library one more kind of tensor; it goes before those that are registered already.

    An adapter without the attribute `on_devices` is given it: False.
    """
    if not hasattr(adapter, "on_devices"):
        adapter.on_devices = False
    _adapters.insert(0, adapter)
    _by_type.clear()


def adapter_for(value: object) -> TensorAdapter[Any]:
    """The adapter for `value`, found once per type.

    Raises:
        TensorContractError: there is none; the text names the type and what is accepted.
    """
    adapter = _by_type.get(type(value))
    return adapter if adapter is not None else _find(value)


def _find(value: object) -> TensorAdapter[Any]:
    _load_torch(value)
    for adapter in _adapters:
        if adapter.accepts(value):
            _by_type[type(value)] = adapter
            return adapter
    kinds = sorted({adapter.kind for adapter in _adapters} | {"torch"})
    raise TensorContractError(
        f"a value of type {_type_name(value)} is no tensor; accepted are {', '.join(kinds)} tensors "
        "(convert lists and numbers with numpy.asarray or torch.as_tensor), and what register_adapter adds"
    )


def _load_torch(value: object) -> None:
    """Register the torch adapter at the first tensor. Whoever holds one has imported torch already."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and isinstance(value, tensor):
        load_torch()


def load_torch() -> None:
    """Register the torch adapter, if the program has imported torch."""
    global _torch_is_known
    if _torch_is_known or not hasattr(sys.modules.get("torch"), "Tensor"):
        return
    from .torch_adapter import ADAPTER

    if ADAPTER not in _adapters:
        _adapters.append(ADAPTER)
    _torch_is_known = True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_out(adapter: TensorAdapter[Any], out: object, spec: TensorSpec) -> None:
    """What every adapter's `into` checks first: kind, dtype and shape of `out`.

    Raises:
        TensorContractError: one differs; the text names both.
    """
    if adapter_for(out) is not adapter:
        raise TensorContractError(
            f"out= is of type {_type_name(out)}, but the input is a {adapter.kind} tensor; pass an out= of "
            "the same kind"
        )
    found = adapter.spec(out)
    if found != spec:
        raise TensorContractError(
            f"out= is {found.dtype}{list(found.shape)}, but the result is {spec.dtype}{list(spec.shape)}; "
            "pass an out= of that dtype and shape, or none"
        )
