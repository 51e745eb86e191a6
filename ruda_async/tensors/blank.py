"""Tensors made from a shape and a dtype alone."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import TensorContractError
from .adapter import TensorAdapter, adapter_for

__all__ = ["Blank", "blank"]


class Blank(NamedTuple):
    """What to allocate: by which adapter, like what, of which dtype and shape."""

    adapter: TensorAdapter[Any]
    like: Any
    shape: tuple[int, ...]
    dtype: str


def blank(shape: int | tuple[int, ...], dtype: Any) -> Blank:
    """How to make a tensor of `shape` and `dtype`: torch's where `dtype` is one of torch's, else numpy's.

    Raises:
        TensorContractError: they are no shape and dtype that this library carries.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    if set(map(type, lengths)) != {int} or min(lengths) < 0:
        if any(isinstance(n, bool) or not hasattr(n, "__index__") or n < 0 for n in lengths):
            raise TensorContractError(f"empty: the shape is of whole numbers from 0 on, not {shape!r}")
        lengths = tuple(int(n) for n in lengths)
    try:
        adapter, like, name = _kind(dtype)
    except TypeError:
        raise TensorContractError(
            f"empty: {dtype!r} is neither a numpy nor a torch dtype; such as np.float32 (bfloat16 "
            "is torch.bfloat16, or that of ml_dtypes)"
        ) from None
    return Blank(adapter, like, lengths, name)


@lru_cache(maxsize=64)
def _kind(dtype: Any) -> tuple[TensorAdapter[Any], Any, str]:
    """The adapter, a tensor without elements, and the name of its dtype; `TypeError` where there is none."""
    torch = sys.modules.get("torch")
    like: Any
    if torch is not None and isinstance(dtype, torch.dtype):
        like = torch.empty(0, dtype=dtype)
    else:
        like = np.empty(0, dtype)
    adapter = adapter_for(like)
    return adapter, like, adapter.spec(like).dtype
