"""Every collective on tensors of a played device, and what numpy makes of the ranks' inputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from fake_device import numpy_dtype

from ruda_async.collectives.costs import CANDIDATES
from ruda_async.tensors import order

__all__ = ["ALGORITHMS", "CALLS", "ROWS", "shard", "tree_sum", "values"]

ROWS = 12  # what the world sizes of these tests divide
COUNTS = [[(3 * rank + 2 * peer) % 5 for peer in range(6)] for rank in range(6)]


def values(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random numbers, whose sum depends on the order."""
    rng = np.random.default_rng(rank)
    if dtype.startswith(("int", "uint")):
        return rng.integers(0, 100, shape).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))).astype(numpy_dtype(dtype))


def tree_sum(inputs: list[np.ndarray], mean: bool = False) -> np.ndarray:
    """The documented sum: by the tree of `order`, halves in float32."""
    dtype = inputs[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype

    def add(node: Any) -> Any:
        return inputs[node].astype(wide) if isinstance(node, int) else add(node[0]) + add(node[1])

    total = add(order(len(inputs)))
    return (total / wide.type(len(inputs)) if mean else total).astype(dtype)


def shard(whole: np.ndarray, rank: int, size: int, axis: int = 0) -> np.ndarray:
    return np.split(whole, size, axis)[rank]


def exchanged(inputs: list[np.ndarray], rank: int) -> np.ndarray:
    size = len(inputs)
    parts = []
    for source, rows in enumerate(inputs):
        at = sum(COUNTS[source][:rank])
        parts.append(rows[at : at + COUNTS[source][rank]])
    assert len(parts) == size
    return np.concatenate(parts)


#: For each call: the operation, this rank's input, the call, and numpy's result from all ranks' inputs.
Call = tuple[str, Callable[[int, int], tuple[int, ...]], Callable[..., Awaitable[Any]], Callable[..., Any]]
SAME = lambda rank, size: (ROWS, 5)  # noqa: E731
CALLS: dict[str, Call] = {
    "all_gather": ("all_gather", SAME, lambda c, x: c.all_gather(x), lambda xs, r: np.concatenate(xs)),
    "all_gather along an axis": (
        "all_gather",
        SAME,
        lambda c, x: c.all_gather_dim(x, 1),
        lambda xs, r: np.concatenate(xs, 1),
    ),
    "all_gather_v": (
        "all_gather_v",
        lambda rank, size: (3 * rank, 5),
        lambda c, x: c.all_gather_v(x),
        lambda xs, r: np.concatenate(xs),
    ),
    "broadcast": ("broadcast", SAME, lambda c, x: c.broadcast(x, c.world_size - 1), lambda xs, r: xs[-1]),
    "gather": ("gather", SAME, lambda c, x: c.gather(x, 0), lambda xs, r: None if r else np.concatenate(xs)),
    "scatter": (
        "scatter",
        SAME,
        lambda c, x: c.scatter(x if c.rank == 0 else None, 0, like=x),
        lambda xs, r: shard(xs[0], r, len(xs)),
    ),
    "all_to_all": (
        "all_to_all",
        SAME,
        lambda c, x: c.all_to_all(x),
        lambda xs, r: np.concatenate([shard(x, r, len(xs)) for x in xs]),
    ),
    "all_to_all along axes": (
        "all_to_all",
        SAME,
        lambda c, x: c.all_to_all_dim(x, split_dim=0, concat_dim=1),
        lambda xs, r: np.concatenate([shard(x, r, len(xs)) for x in xs], 1),
    ),
    "all_to_all_v": (
        "all_to_all_v",
        lambda rank, size: (sum(COUNTS[rank][:size]), 5),
        lambda c, x: c.all_to_all_v(x, COUNTS[c.rank][: c.world_size]),
        exchanged,
    ),
    "all_reduce": ("all_reduce", SAME, lambda c, x: c.all_reduce_sum(x), lambda xs, r: tree_sum(xs)),
    "all_reduce mean": (
        "all_reduce",
        SAME,
        lambda c, x: c.all_reduce(x, "mean"),
        lambda xs, r: tree_sum(xs, mean=True),
    ),
    "all_reduce max": ("all_reduce", SAME, lambda c, x: c.all_reduce(x, "max"), lambda xs, r: np.max(xs, 0)),
    "reduce": (
        "reduce",
        SAME,
        lambda c, x: c.reduce(x, c.world_size - 1),
        lambda xs, r: tree_sum(xs) if r == len(xs) - 1 else None,
    ),
    "reduce_scatter": (
        "reduce_scatter",
        SAME,
        lambda c, x: c.reduce_scatter_sum(x),
        lambda xs, r: shard(tree_sum(xs), r, len(xs)),
    ),
    "reduce_scatter mean": (
        "reduce_scatter",
        lambda rank, size: (4, ROWS),
        lambda c, x: c.reduce_scatter_dim(x, 1, "mean"),
        lambda xs, r: shard(tree_sum(xs, mean=True), r, len(xs), 1),
    ),
}
ALGORITHMS = [
    (name, candidate.algorithm)
    for name, (operation, *_) in CALLS.items()
    for candidate in CANDIDATES[operation]
    if candidate.algorithm != "shared"
]
