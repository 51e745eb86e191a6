"""Result memory is used again once nobody can see it, and not before."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ruda_async.tensors import adapter_for
from ruda_async.tensors.pool import POOLED, Pool, fresh_blocks, take


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
    assert sum(pool._kept) <= 5_000_000
    del held
    other = pool.take(4_000_000)  # only by giving idle blocks of another size back
    assert sum(pool._kept) <= 5_000_000
    place = where(other)
    del other
    assert where(pool.take(4_000_000)) == place


def test_scratch_does_not_drive_out_a_large_result() -> None:
    pool = Pool(limit=8_400_000)
    held, free = pool.take(4_000_000), pool.take(4_000_000)
    assert held is not None
    place = where(free)
    del free
    scratch = [pool.take(100_000) for _ in range(12)]
    assert [block is None for block in scratch] == [False] * 9 + [True] * 3
    assert where(pool.take(4_000_000)) == place


def test_fresh_blocks_are_those_that_were_made() -> None:
    size = 5 * POOLED
    held = [take(size) for _ in range(8)]  # whatever earlier tests left free
    with fresh_blocks() as outer:
        first = take(size)
        with fresh_blocks() as inner:
            second = take(size)
    assert [where(block) for block in outer + inner] == [where(first), where(second)]
    del first, outer, inner
    with fresh_blocks() as again:
        take(size)
    assert again == []
    del held


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
