"""Result memory is used again once nobody can see it, and not before."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ruda_async.tensors import adapter_for
from ruda_async.tensors.pool import POOLED, Pool


def where(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    pool = Pool()
    first = pool.take(2_000_000)
    place = where(first)
    part = first[100:200].view(np.float32)
    del first
    second = pool.take(2_000_000)
    assert where(second) != place  # `part` still sees the first block
    del part
    assert where(pool.take(1_990_000)) == place  # of nearly the same size


def test_limit() -> None:
    pool = Pool(limit=5_000_000)
    held = [pool.take(2_000_000) for _ in range(4)]
    assert [h is None for h in held] == [False, False, True, True]
    assert pool._kept <= 5_000_000
    del held
    other = pool.take(4_000_000)  # only by giving idle blocks of another size back
    assert pool._kept <= 5_000_000
    place = where(other)
    del other
    assert where(pool.take(4_000_000)) == place


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_results_hold_their_memory(kind: str) -> None:
    like = np.zeros(1, np.float32)
    if kind == "torch":
        like = pytest.importorskip("torch").zeros(1)
    adapter = adapter_for(like)
    shape = (POOLED // 4 + 3,)
    results = []
    for i in range(4):
        target = adapter.allocate(like, shape, "float32")
        np.frombuffer(target.buffer, np.float32)[:] = i
        results.append(target.finish())
        del target
        gc.collect()
    for i, result in enumerate(results):
        assert (result == i).all()
    views = [result[5:9] for result in results]
    del results, result
    for _ in range(4):
        np.frombuffer(adapter.allocate(like, shape, "float32").buffer, np.uint8)[:] = 255
    assert [float(view[0]) for view in views] == [0, 1, 2, 3]
