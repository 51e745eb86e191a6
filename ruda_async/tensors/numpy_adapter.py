"""numpy arrays and scalars. bfloat16 and float8 arrays are those of `ml_dtypes`."""

from __future__ import annotations

from math import prod
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import TensorContractError
from .adapter import Target, TensorSpec, check_out
from .dtypes import DTYPES, dtype_of
from .pool import POOLED, take

__all__ = ["NumpyAdapter", "empty_array", "host_array"]

Array = npt.NDArray[Any]

#: Dtype names that numpy itself does not have.
_EXTENDED = frozenset(name for name in DTYPES if name.startswith(("bfloat16", "float8")))
#: Native dtype by name, and name by dtype; the extended ones and other byte orders join when met.
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in DTYPES if name not in _EXTENDED}
_PLAIN = frozenset(_DTYPES.values())
_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _DTYPES.items()}

_REMEDIES = {
    "c": "pass .real and .imag as two arrays, or .view() it as floats",
    "f": "convert it with .astype('float64')",
    "m": "pass .view('int64')",
    "M": "pass .view('int64')",
    "O": "use the object collectives, or convert it with .astype() to a number",
    "S": "use the object collectives for text",
    "U": "use the object collectives for text",
    "T": "use the object collectives for text",
    "V": "pass each field as an array of its own",
}


class NumpyAdapter:
    """`numpy.ndarray`, its subclasses but masked arrays, and numpy scalars (as arrays of no axes).

    Results are plain arrays in native byte order; an input in another byte order is converted.
    """

    kind = "numpy"
    on_devices = False

    def accepts(self, value: object) -> bool:
        if isinstance(value, np.ma.MaskedArray):
            raise TensorContractError(
                "a masked array has no single value where it is masked; pass .filled(value), and .mask as an "
                "array of its own where peers need it"
            )
        return isinstance(value, (np.ndarray, np.generic))

    def spec(self, value: Array) -> TensorSpec:
        dtype = value.dtype
        return TensorSpec(_NAMES.get(dtype) or _learn(dtype), value.shape)

    def read(self, value: Array) -> memoryview:
        if value.dtype in _PLAIN:
            try:
                return value.data.cast("B")
            except TypeError:
                pass  # strided, or without elements
        array = np.asarray(value)
        name = _NAMES.get(array.dtype) or _learn(array.dtype)
        return _bytes_of(np.ascontiguousarray(array, dtype=_native(name)))

    def allocate(self, like: Array, shape: tuple[int, ...], dtype: str) -> Target[Array]:
        array = empty_array(shape, _DTYPES.get(dtype) or _native(dtype))
        return Target(_bytes_of(array), lambda: array)

    def into(self, out: Array, spec: TensorSpec) -> Target[Array]:
        check_out(self, out, spec)
        if not isinstance(out, np.ndarray):
            raise TensorContractError(
                f"out= is a scalar of type {type(out).__name__}, which cannot be written"
            )
        if not out.flags.writeable:
            raise TensorContractError("out= is a read-only array; pass a writable one, such as out.copy()")
        if out.size and any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
            raise TensorContractError(
                "out= is an expanded array whose elements share memory; pass out.copy()"
            )
        native = _native(spec.dtype)
        if out.flags.c_contiguous and out.dtype == native:
            return Target(_bytes_of(out), lambda: out)
        staging = np.empty(spec.shape, native)

        def finish() -> Array:
            out[...] = staging
            return out

        return Target(_bytes_of(staging), finish)

    def movedim(self, value: Array, source: int, destination: int) -> Array:
        try:
            return np.moveaxis(np.asarray(value), source, destination)
        except ValueError as error:
            raise TensorContractError(
                f"an array of shape {list(value.shape)} has no axis {source} to move to {destination}"
            ) from error


def host_array(shape: tuple[int, ...], dtype: str) -> Array:
    """An uninitialised array for `dtype`, as unsigned integers of its width where numpy lacks it."""
    native = _DTYPES.get(dtype)
    if native is None or dtype in _EXTENDED:
        native = _DTYPES["uint16" if dtype_of(dtype).itemsize == 2 else "uint8"]
    return empty_array(shape, native)


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array; a large one in memory that may have been used before."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < POOLED:
        return np.empty(shape, dtype)
    return take(nbytes).view(dtype).reshape(shape)


def _bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array in native byte order, without a copy."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # an extended dtype, or no elements, which the cast does not take
        return array.reshape(-1).view(np.uint8).data


def _native(name: str) -> np.dtype[Any]:
    """The dtype called `name`.

    Raises:
        TensorContractError: numpy has none, or only with `ml_dtypes`, which is not installed.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    dtype_of(name)
    try:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise TensorContractError(
            f"numpy has no {name} of its own; install or upgrade ml_dtypes (pip install -U ml_dtypes)"
        ) from None
    _DTYPES[name] = dtype
    _NAMES[dtype] = name
    return dtype


def _learn(dtype: np.dtype[Any]) -> str:
    """The name of a dtype met for the first time."""
    native = dtype.newbyteorder("=")
    name = _NAMES.get(native)
    if name is None:
        name = native.name
        if name not in _EXTENDED or native != _native(name):
            _refuse(dtype)
    _NAMES[dtype] = name
    return name


def _refuse(dtype: np.dtype[Any]) -> NoReturn:
    what = "structured dtype" if dtype.names is not None else "dtype"
    remedy = _REMEDIES.get(dtype.kind)
    if dtype.isbuiltin == 2:  # registered by another package, such as an ml_dtypes type that cannot travel
        remedy = "convert it with .astype() to one of these"
    raise TensorContractError(f"{what} {dtype} is not supported; there are {', '.join(DTYPES)}: {remedy}")
