"""torch tensors. Imported when the first tensor is met, so the library does not import torch itself."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import TensorContractError
from .adapter import Target, TensorSpec, check_out
from .device import on_note_streams
from .dtypes import DTYPES
from .numpy_adapter import host_array

__all__ = ["ADAPTER", "TorchAdapter", "check_writable", "host_bytes", "torch_dtype", "wrote"]

Array = npt.NDArray[Any]

#: torch's dtype by name, and the other way round; an older torch lacks some.
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
#: Dtypes that numpy lacks travel as integers of the same width.
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    dtype: torch.uint16 if name == "bfloat16" else torch.uint8
    for name, dtype in _DTYPES.items()
    if name.startswith(("bfloat16", "float8"))
}
_STRIDED = torch.strided

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class TorchAdapter:
    """`torch.Tensor` and `torch.nn.Parameter`, strided, on the CPU or a CUDA device.

    Results are plain tensors that require no gradient. On the CPU they live in memory that numpy
    allocated, which their storage cannot resize. For CUDA tensors each call has an adapter of its own.
    """

    kind = "torch"
    # What torch was built with, not what there is: to ask the driver would spoil a later fork.
    on_devices = torch.version.cuda is not None or torch.version.hip is not None

    def for_call(self, value: Tensor, resident: bool) -> TorchAdapter:
        """See `TensorAdapter.on_devices`."""
        if value.is_cpu:
            return self
        self.spec(value)
        from .torch_device import TorchResident, TorchStaged

        return (TorchResident if resident else TorchStaged)(value.device)

    def accepts(self, value: object) -> bool:
        if type(value) is Tensor or type(value) is torch.nn.Parameter:
            return True
        if isinstance(value, Tensor):
            _refuse_subclass(value)
        return False

    def spec(self, value: Tensor) -> TensorSpec:
        name = _NAMES.get(value.dtype)
        if name is None or value.layout is not _STRIDED or not (value.is_cpu or value.is_cuda):
            _refuse(value)
        if _is_wrapped(value):
            _refuse_wrapped()
        return TensorSpec(name, tuple(value.shape))

    def read(self, value: Tensor) -> memoryview:
        plain = value.detach() if value.requires_grad else value
        try:
            if plain.is_cpu and plain.dtype in _NAMES and plain.is_contiguous():
                return _bytes_of(_carried(plain).numpy())
        except (TypeError, RuntimeError):
            pass  # negated lazily, or nothing that `spec` accepts
        self.spec(value)
        if plain.is_cuda:
            return self.for_call(value, False).read(value)
        return host_bytes(plain.resolve_neg().contiguous())

    def allocate(self, like: Tensor, shape: tuple[int, ...], dtype: str) -> Target[Tensor]:
        if like.is_cuda:
            return self.for_call(like, False).allocate(like, shape, dtype)
        native = torch_dtype(dtype)
        # numpy allocates and wraps a small array in half the time of torch.empty and Tensor.numpy.
        array = host_array(shape, dtype)
        tensor = torch.from_numpy(array)
        if not array.size:  # numpy gives it strides of 0, with which torch refuses views
            tensor = torch.empty(shape, dtype=native)
        elif native in _CARRIERS:
            tensor = tensor.view(native)
        return Target(_bytes_of(array), lambda: tensor)

    def into(self, out: Tensor, spec: TensorSpec) -> Target[Tensor]:
        check_out(ADAPTER, out, spec)
        if out.is_cuda:
            return self.for_call(out, False).into(out, spec)
        check_writable(out)
        if out.is_contiguous() and not out.is_neg():
            return Target(host_bytes(out), lambda: wrote(out))
        staging = torch.empty(spec.shape, dtype=out.dtype)
        return Target(host_bytes(staging), lambda: out.copy_(staging))

    def movedim(self, value: Tensor, source: int, destination: int) -> Tensor:
        try:
            return value.movedim(source, destination)
        except IndexError as error:
            raise TensorContractError(
                f"a tensor of shape {list(value.shape)} has no axis {source} to move to {destination}"
            ) from error


#: The one instance.
ADAPTER = TorchAdapter()


def _note_streams() -> None:
    from .torch_device import note_streams

    note_streams()


if TorchAdapter.on_devices:
    on_note_streams(_note_streams)


def check_writable(out: Tensor) -> None:
    """Refuse an `out` that cannot be written in place.

    Raises:
        TensorContractError: it requires a gradient, or its elements share memory.
    """
    if out.requires_grad:
        raise TensorContractError(
            "out= requires a gradient, which writing in place would break; pass out.detach()"
        )
    if any(s == 0 and n > 1 for s, n in zip(out.stride(), out.shape, strict=True)) and out.numel():
        raise TensorContractError("out= is an expanded tensor whose elements share memory; pass out.clone()")


def wrote(out: Tensor) -> Tensor:
    """`out`, of whose change autograd must learn as it would of one by torch itself."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def host_bytes(value: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return _bytes_of(_carried(value).numpy())


def _carried(value: Tensor) -> Tensor:
    """`value`, or a view of its bits as integers where numpy lacks the dtype."""
    carrier = _CARRIERS.get(value.dtype)
    return value if carrier is None else value.view(carrier)


def _bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array of a dtype that numpy has, without a copy."""
    try:
        return array.data.cast("B")
    except TypeError:  # no elements, which the cast does not take
        return array.reshape(-1).view(np.uint8).data


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`.

    Raises:
        TensorContractError: this torch has none.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise TensorContractError(
            f"torch {torch.__version__} has no dtype {name!r}; it has {', '.join(_DTYPES)}"
        ) from None


def _refuse(value: Tensor) -> NoReturn:
    """Say what about `value` cannot travel."""
    dtype, device = value.dtype, value.device.type
    if value.layout is not _STRIDED:
        raise TensorContractError(
            f"a tensor of layout {value.layout} is not supported; pass .to_dense(), or its indices and values"
        )
    if value.is_quantized:
        raise TensorContractError(
            f"a quantized tensor ({dtype}) is not supported; pass .int_repr() or .dequantize()"
        )
    if dtype.is_complex:
        raise TensorContractError(f"{dtype} is not supported; pass torch.view_as_real(tensor)")
    if dtype not in _NAMES:
        raise TensorContractError(f"{dtype} is not supported; there are {', '.join(_DTYPES)}")
    if device == "meta":
        raise TensorContractError("a tensor on the meta device has no data; pass one made with device='cpu'")
    raise TensorContractError(f"a tensor on device {device!r} is not supported; pass .cpu()")


def _refuse_wrapped() -> NoReturn:
    raise TensorContractError(
        "a tensor inside torch.func.vmap, grad or another transform has no data of its own; call the "
        "collective outside of the transform"
    )


def _refuse_subclass(value: Tensor) -> NoReturn:
    kind = type(value)
    remedy = "pass .as_subclass(torch.Tensor)"
    if hasattr(value, "to_local"):
        remedy = "pass .to_local(), this rank's shard"
    elif kind.__name__ in ("FakeTensor", "FunctionalTensor"):
        remedy = "it has no data; call the collective outside of tracing"
    elif isinstance(value, torch.nn.Parameter):
        remedy = "it has no shape yet; run the module once first"
    raise TensorContractError(
        f"the tensor subclass {kind.__module__}.{kind.__qualname__} is not supported; {remedy}"
    )
