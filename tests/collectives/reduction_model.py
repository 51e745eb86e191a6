"""What reductions must give, written down again without the library; and how tests run requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ruda_async.collectives.operation import Settings
from ruda_async.transport.base import Capabilities

from .strict_link import StrictGroup, StrictLink, run_strict

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64")] + [BFLOAT16]
INTEGERS = [
    np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
]
BOOL = np.dtype(bool)

_ARITHMETIC = ["sum", "prod", "max", "min"]
#: Every pair of dtype and operator that the contract allows.
PAIRS = (
    [(dtype, op) for dtype in FLOATS for op in [*_ARITHMETIC, "mean"]]
    + [(dtype, op) for dtype in INTEGERS for op in [*_ARITHMETIC, "band", "bor", "bxor"]]
    + [(BOOL, op) for op in ("max", "min", "band", "bor", "bxor")]
)

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def documented(inputs: Sequence[np.ndarray], operator: str) -> np.ndarray:
    """The result in the documented order: a fold to a power of two, then a tree of neighbours."""
    dtype, size = inputs[0].dtype, len(inputs)
    half = dtype in (np.dtype("float16"), BFLOAT16)
    wide = np.dtype("float32") if half else dtype
    apply = _UFUNCS[operator]
    power = 1
    while power * 2 <= size:
        power *= 2
    extra = size - power
    with np.errstate(all="ignore"):
        values = [np.asarray(x).astype(wide) for x in inputs]
        values = [apply(values[2 * i], values[2 * i + 1]) for i in range(extra)] + values[2 * extra :]
        while len(values) > 1:
            values = [apply(values[i], values[i + 1]) for i in range(0, len(values), 2)]
        result = values[0]
        if operator == "mean":
            result = result / wide.type(size)
        return np.asarray(result).astype(dtype)


def distinct(seed: int, dtype: np.dtype, shape: Sequence[int], size: int) -> list[np.ndarray]:
    """Inputs for `size` ranks: floats whose sum depends on the order, integers of the full range."""
    rng = np.random.default_rng(seed)
    if dtype == BOOL:
        values = [rng.integers(0, 2, shape) for _ in range(size)]
    elif dtype in INTEGERS:
        info = np.iinfo(dtype)
        values = [rng.integers(info.min, info.max, shape, dtype, endpoint=True) for _ in range(size)]
    else:
        spread = 3.0 if dtype.itemsize == 2 else 8.0
        values = [
            rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread, shape)) for _ in range(size)
        ]
    return [np.asarray(x).astype(dtype) for x in values]  # of no axes, numpy draws plain numbers


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether dtype, shape and every bit are equal."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def run_requests(
    size: int,
    request: Callable[[int], Any],
    *,
    settings: Settings | None = None,
    capabilities: Capabilities | None = None,
    seed: int = 0,
) -> tuple[Sequence[Any], StrictGroup]:
    """Make, prepare and run each rank's request; the results in rank order, and the group's counters."""
    group = StrictGroup(size, settings, capabilities, seed)
    heads: set[bytes] = set()

    async def body(link: StrictLink) -> Any:
        mine = request(link.rank)
        heads.add(mine.prepare(link.rank, size, group.settings))
        return await mine.run(link)

    results = asyncio.run(run_strict(group, body))
    assert len(heads) == 1, "ranks disagree on the fingerprint of one call"
    return results, group


def segments(nbytes: int) -> Capabilities:
    """Capabilities whose pipelines cut to `nbytes`."""
    return Capabilities(segment_bytes=nbytes)
