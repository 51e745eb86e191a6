from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.collectives.operation import Settings
from ruda_async.collectives.reduce import Reduce
from ruda_async.collectives.request import decode_fingerprint
from ruda_async.errors import TensorContractError

from .reduction_model import PAIRS, distinct, documented, run_requests, same_bits, segments
from .strict_link import StrictGroup, StrictLink, run_strict

ALGORITHMS = ["direct", "binomial", "reduce_scatter_gather"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    place=st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    pair=st.sampled_from(PAIRS),
    shape=st.sampled_from([(), (1,), (7,), (5, 3), (64,)]),
    segment=st.sampled_from([8, 24, 1 << 19]),
    budget=st.sampled_from([None, 8, 13, 64]),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_every_algorithm_gives_the_documented_bits_at_every_root(
    algorithm: str,
    place: tuple[int, int],
    pair: Any,
    shape: tuple[int, ...],
    segment: int,
    budget: int | None,
    in_place: bool,
    seed: int,
) -> None:
    (size, root), (dtype, operator) = place, pair
    inputs = distinct(seed, dtype, shape, size)
    values = [x.copy() for x in inputs]
    results, group = run_requests(
        size,
        lambda r: Reduce(values[r], root, operator, out=values[r] if in_place else None),
        settings=Settings(algorithm=algorithm, max_bytes=budget),
        capabilities=segments(segment),
        seed=seed,
    )
    for rank, result in enumerate(results):
        if rank == root:
            assert same_bits(result, documented(inputs, operator))
            assert (result is values[rank]) == in_place
        else:
            assert result is None
        if rank != root or not in_place:
            assert same_bits(values[rank], inputs[rank]), "the input was changed"
    if budget is not None:
        assert group.largest <= budget


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_elements(size: int) -> None:
    results, group = run_requests(size, lambda r: Reduce(np.zeros((3, 0)), size - 1))
    assert results[-1].shape == (3, 0)
    assert results[:-1] == [None] * (size - 1)
    assert (group.messages > 0) == (size > 1)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_messages_and_traffic(size: int) -> None:
    count = 1680
    nbytes = 4 * count
    agreement = size * (size - 1).bit_length()  # empty messages
    expected = {
        "direct": (size - 1 + agreement, (size - 1) * nbytes),
        "binomial": (size - 1 + agreement, (size - 1) * nbytes),
        "reduce_scatter_gather": (
            size * (size - 1) + size - 1,
            (size - 1) * nbytes + (size - 1) * nbytes // size,
        ),
    }
    for algorithm, cost in expected.items():
        _, group = run_requests(
            size,
            lambda r: Reduce(np.ones(count, np.float32), 1),
            settings=Settings(algorithm=algorithm),
        )
        assert (group.messages, group.payload_bytes) == cost, algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 40])
async def test_no_rank_returns_before_all_have_entered(algorithm: str, size: int, count: int) -> None:
    for late in range(size):
        group = StrictGroup(size, Settings(algorithm=algorithm), seed=late)
        entered: set[int] = set()

        async def body(
            link: StrictLink,
            group: StrictGroup = group,
            entered: set[int] = entered,
            late: int = late,
        ) -> None:
            if link.rank == late:
                # All others do what they can without this rank.
                for _ in range(200):
                    await link.turn()
            entered.add(link.rank)
            request = Reduce(np.ones(count, np.float32), 0)
            request.prepare(link.rank, size, group.settings)
            await request.run(link)
            assert len(entered) == size, f"rank {link.rank} returned without rank {late}"

        await run_strict(group, body)


def test_the_fingerprint() -> None:
    def head(root: Any, op: str = "sum") -> bytes:
        return Reduce(np.ones(3, np.float32), root, op).prepare(1, 4, Settings())

    seen = decode_fingerprint(head(2))
    assert seen is not None
    assert seen.detail == (("operator", "sum"), ("root", 2))
    assert len({head(0), head(1), head(2), head(2, "max")}) == 4
    assert head(np.int64(2)) == head(2)


@pytest.mark.parametrize("root", [4, -1, True, 1.0, None, "0"])
def test_an_unknown_root_is_refused(root: Any) -> None:
    with pytest.raises(TensorContractError, match=r"reduce: root.*3"):
        Reduce(np.ones(3), root).prepare(0, 4, Settings())


def test_out_matters_on_the_root_alone() -> None:
    wrong = np.ones(5)
    Reduce(np.ones(3), 1, out=wrong).prepare(0, 4, Settings())
    with pytest.raises(TensorContractError):
        Reduce(np.ones(3), 1, out=wrong).prepare(1, 4, Settings())
