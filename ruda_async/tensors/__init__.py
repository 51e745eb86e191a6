"""Tensors of any kind as bytes, and the arithmetic of reductions on those bytes.

Collectives see a tensor through its `TensorAdapter`: a dtype name, a shape, and contiguous bytes. They
never import numpy or torch themselves, and importing this package does not import torch.
"""

from __future__ import annotations

from .adapter import Target, TensorAdapter, TensorSpec, adapter_for, register_adapter
from .arithmetic import OPERATORS, Reducer, check_operator, order, reducer
from .blank import Blank, blank
from .device import DeviceMemory, adapter_for_call, as_view, device_memory, reducer_at
from .dtypes import DType, dtype_of
from .numpy_adapter import NumpyAdapter

__all__ = [
    "OPERATORS",
    "Blank",
    "DType",
    "DeviceMemory",
    "Reducer",
    "Target",
    "TensorAdapter",
    "TensorSpec",
    "adapter_for",
    "adapter_for_call",
    "as_view",
    "blank",
    "check_operator",
    "device_memory",
    "dtype_of",
    "order",
    "reducer",
    "reducer_at",
    "register_adapter",
]

register_adapter(NumpyAdapter())
