from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.collectives.operation import Settings
from ruda_async.collectives.reduce_scatter import ReduceScatter
from ruda_async.collectives.request import decode_fingerprint
from ruda_async.errors import TensorContractError

from .reduction_model import PAIRS, distinct, documented, run_requests, same_bits, segments

ALGORITHMS = ["pairwise", "recursive_halving", "ring"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    size=st.one_of(st.integers(1, 9), st.sampled_from([2, 4, 8, 16])),
    pair=st.sampled_from(PAIRS),
    shard=st.sampled_from([(1,), (3,), (2, 5), (17,)]),
    segment=st.sampled_from([8, 24, 1 << 19]),
    budget=st.sampled_from([None, 8, 13, 64]),
    seed=st.integers(0, 1 << 20),
)
def test_every_algorithm_gives_the_documented_bits(
    algorithm: str,
    size: int,
    pair: Any,
    shard: tuple[int, ...],
    segment: int,
    budget: int | None,
    seed: int,
) -> None:
    dtype, operator = pair
    rows = shard[0]
    inputs = distinct(seed, dtype, (rows * size, *shard[1:]), size)
    values = [x.copy() for x in inputs]
    results, group = run_requests(
        size,
        lambda r: ReduceScatter(values[r], operator),
        settings=Settings(algorithm=algorithm, max_bytes=budget),
        capabilities=segments(segment),
        seed=seed,
    )
    expected = documented(inputs, operator)
    for rank, result in enumerate(results):
        assert same_bits(result, expected[rank * rows : (rank + 1) * rows])
        assert same_bits(values[rank], inputs[rank]), "the input was changed"
        assert not np.shares_memory(result, values[rank])
    if budget is not None:
        assert group.largest <= budget


@given(
    size=st.integers(2, 9),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    rows=st.integers(1, 30),
    segment=st.sampled_from([4, 24, 1 << 19]),
    budget=st.sampled_from([None, 8]),
    seed=st.integers(0, 1 << 20),
)
def test_the_ring_is_close(
    size: int, dtype: str, rows: int, segment: int, budget: int | None, seed: int
) -> None:
    inputs = distinct(seed, np.dtype(dtype), (rows * size,), size)
    results, group = run_requests(
        size,
        lambda r: ReduceScatter(inputs[r], order="any"),
        settings=Settings(algorithm="ring", max_bytes=budget),
        capabilities=segments(segment),
        seed=seed,
    )
    magnitude = sum(np.abs(x.astype(np.float64)) for x in inputs)
    error = np.abs(np.concatenate(results).astype(np.float64) - documented(inputs, "sum").astype(np.float64))
    assert np.all(error <= 2 * size * np.finfo(dtype).eps * magnitude)
    assert budget is None or group.largest <= budget


def test_a_budget_below_a_partial_sum_still_works_on_the_ring() -> None:
    inputs = distinct(1, np.dtype("float16"), (12,), 3)
    results, group = run_requests(
        3,
        lambda r: ReduceScatter(inputs[r], order="any"),
        settings=Settings(algorithm="ring", max_bytes=3),
    )
    assert group.largest <= 3
    assert same_bits(np.concatenate(results), documented(inputs, "sum"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("dim", "shape"), [(1, (3, 8)), (-1, (2, 3, 4)), (1, (2, 4, 3)), (-2, (8, 2))])
@pytest.mark.parametrize("given_out", [False, True])
def test_along_an_axis(algorithm: str, dim: int, shape: tuple[int, ...], given_out: bool) -> None:
    size = 4
    inputs = distinct(4, np.dtype("float32"), shape, size)
    expected = np.split(documented(inputs, "sum"), size, axis=dim)
    outs = [np.zeros_like(part) for part in expected] if given_out else [None] * size
    results, _ = run_requests(
        size,
        lambda r: ReduceScatter(inputs[r], dim=dim, out=outs[r], name="reduce_scatter_dim"),
        settings=Settings(algorithm=algorithm),
    )
    for result, part, out in zip(results, expected, outs, strict=True):
        assert result.shape == part.shape
        assert np.array_equal(result, part)
        assert out is None or result is out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_out_that_lies_in_the_input(algorithm: str, size: int) -> None:
    inputs = distinct(9, np.dtype("float32"), (5 * size,), size)
    values = [x.copy() for x in inputs]
    results, _ = run_requests(
        size,
        lambda r: ReduceScatter(values[r], out=values[r][:5]),
        settings=Settings(algorithm=algorithm),
    )
    assert same_bits(np.concatenate(results), documented(inputs, "sum"))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (6, 0)])
def test_no_elements(size: int, shape: tuple[int, ...]) -> None:
    results, group = run_requests(size, lambda r: ReduceScatter(np.zeros(shape, np.int16)))
    assert all(result.shape == (shape[0] // size, *shape[1:]) for result in results)
    assert (group.messages > 0) == (size > 1)


def test_messages_and_traffic() -> None:
    expected = {"pairwise": 8 * 7, "recursive_halving": 8 * 3, "ring": 8 * 7}
    nbytes = 4 * 800
    for algorithm, messages in expected.items():
        _, group = run_requests(
            8,
            lambda r: ReduceScatter(np.ones(800, np.float32), order="any"),
            settings=Settings(algorithm=algorithm),
        )
        assert (group.messages, group.payload_bytes) == (messages, 7 * nbytes), algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_work_lets_the_loop_turn(algorithm: str) -> None:
    for size in (1, 2):
        _, group = run_requests(
            size,
            lambda r: ReduceScatter(np.ones(1 << 20, np.float32), order="any"),
            settings=Settings(algorithm=algorithm),
        )
        assert group.turns >= 2 * size


def test_the_fingerprint() -> None:
    def head(x: np.ndarray, **options: Any) -> bytes:
        return ReduceScatter(x, **options).prepare(1, 2, Settings())

    x = np.ones((4, 6), np.float32)
    seen = decode_fingerprint(head(x))
    assert seen is not None
    assert seen[:3] == ("reduce_scatter", "float32", (4, 6))
    assert head(x, dim=-2, name="reduce_scatter_dim") == head(x, name="reduce_scatter_sum")
    assert head(x, dim=-1) == head(x, dim=1) != head(x)


def test_refusals() -> None:
    def prepare(x: np.ndarray, **options: Any) -> None:
        ReduceScatter(x, **options).prepare(0, 4, Settings())

    with pytest.raises(TensorContractError, match=r"reduce_scatter_sum.*scalar.*all_reduce"):
        prepare(np.array(1.0), name="reduce_scatter_sum")
    with pytest.raises(TensorContractError, match=r"shape \[6, 2\].* 4 does not divide; pad it to 8"):
        prepare(np.ones((6, 2)))
    with pytest.raises(TensorContractError, match=r"axis 1 of shape \[4, 2\]"):
        prepare(np.ones((4, 2)), dim=1)
    with pytest.raises(TensorContractError, match=r"dim=2 is not an axis of shape \[4, 4\]"):
        prepare(np.ones((4, 4)), dim=2)
    with pytest.raises(TensorContractError, match="dim is an axis number"):
        prepare(np.ones((4, 4)), dim=True)
    with pytest.raises(TensorContractError, match=r"out has shape \[4, 4\] and the result \[4, 1\]"):
        prepare(np.ones((4, 4)), dim=1, out=np.ones((4, 4)))
    with pytest.raises(TensorContractError):
        prepare(np.ones((4, 4)), out=np.ones((4, 4)))
