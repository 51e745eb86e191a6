from __future__ import annotations

import asyncio
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import DTYPES, LAYOUTS, Link, assert_same, group_of, run, torch_bits, values
from strict_link import Broken

from ruda_async import TensorContractError
from ruda_async.collectives.all_to_all import AllToAll
from ruda_async.collectives.request import decode_fingerprint

ALGORITHMS = ("pairwise", "bruck")


def model(inputs: list[Any], split_dim: int = 0, concat_dim: int = 0) -> list[Any]:
    size = len(inputs)
    parts = [np.split(value, size, axis=split_dim) for value in inputs]
    return [np.concatenate([parts[s][r] for s in range(size)], axis=concat_dim) for r in range(size)]


@given(
    size=st.integers(1, 12),
    algorithm=st.sampled_from((None, *ALGORITHMS)),
    shape=st.sampled_from([(1,), (2,), (0,), (0, 4), (3, 0), (2, 3), (1, 2, 3)]),
    split_dim=st.integers(-3, 2),
    concat_dim=st.integers(-3, 2),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    max_bytes=st.sampled_from([None, 3, 64]),
    give_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_split_and_concatenate(
    size: int,
    algorithm: str | None,
    shape: tuple[int, ...],
    split_dim: int,
    concat_dim: int,
    dtype: str,
    layout: str,
    max_bytes: int | None,
    give_out: bool,
    seed: int,
) -> None:
    axes = range(-len(shape), len(shape))
    split_dim, concat_dim = (dim if dim in axes else 0 for dim in (split_dim, concat_dim))
    whole = list(shape)
    whole[split_dim] *= size
    inputs = [values(rank + 100 * seed, tuple(whole), dtype, layout) for rank in range(size)]
    before = [value.tobytes() for value in inputs]
    expected = model(inputs, split_dim, concat_dim)
    outs = [np.empty_like(value) if give_out else None for value in expected]
    group = group_of(size, algorithm=algorithm, max_bytes=max_bytes, seed=seed)
    results = run(
        group,
        lambda rank: AllToAll(inputs[rank], split_dim=split_dim, concat_dim=concat_dim, out=outs[rank]),
    )
    for rank, result in enumerate(results):
        assert_same(result, expected[rank])
        assert inputs[rank].tobytes() == before[rank]
        assert not np.shares_memory(result, inputs[rank])
        if give_out:
            assert result is outs[rank]


@pytest.mark.parametrize("size", range(1, 18))
def test_counts_of_messages_and_bytes(size: int) -> None:
    def count(algorithm: str) -> tuple[int, int]:
        group = group_of(size, algorithm=algorithm)
        run(group, lambda rank: AllToAll(values(rank, (size,))))
        return group.messages, group.payload_bytes

    rounds = ceil(log2(size)) if size > 1 else 0
    steps = sum(place.bit_count() for place in range(size))
    assert count("pairwise") == (size * (size - 1), size * (size - 1) * 4)
    assert count("bruck") == (size * rounds, size * steps * 4)


def test_large_blocks_along_other_axes_are_arranged_between_turns() -> None:
    inputs = [values(rank, (300, 4, 300)) for rank in range(2)]
    group = group_of(2)
    results = run(group, lambda rank: AllToAll(inputs[rank], split_dim=1, concat_dim=2))
    assert group.turns > 2 * 5
    for result, expected in zip(results, model(inputs, 1, 2), strict=True):
        assert_same(result, expected)


def test_in_place() -> None:
    inputs = [values(rank, (6, 2)) for rank in range(3)]
    expected = model([value.copy() for value in inputs])
    run(group_of(3), lambda rank: AllToAll(inputs[rank], out=inputs[rank]))
    for value, wanted in zip(inputs, expected, strict=True):
        assert_same(value, wanted)


def test_expanded_inputs() -> None:
    inputs = [np.broadcast_to(values(rank, (1, 4)), (6, 4)) for rank in range(3)]
    for result, expected in zip(
        run(group_of(3), lambda rank: AllToAll(inputs[rank], split_dim=0, concat_dim=1)),
        model(inputs, 0, 1),
        strict=True,
    ):
        assert_same(result, expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "bool", "uint16"])
@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (0, 1)])
def test_torch(name: str, dims: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    width = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2, (2, 4, 6 * width), dtype=torch.uint8, generator=random)
    inputs = list(bits.view(dtype))
    carrier = np.uint16 if width == 2 else np.uint8
    expected = model([np.frombuffer(torch_bits(value), carrier).reshape(4, 6) for value in inputs], *dims)
    results = run(group_of(2), lambda rank: AllToAll(inputs[rank], split_dim=dims[0], concat_dim=dims[1]))
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert tuple(result.shape) == wanted.shape
        assert torch_bits(result) == wanted.tobytes()


@pytest.mark.parametrize(
    ("value", "arguments", "text"),
    [
        (np.float32(1), {}, "all_to_all works along the leading axis"),
        (np.zeros(4), {}, "length 4, which the world size 3 does not divide; pad it to 6"),
        (np.zeros((3, 4)), {"split_dim": 1}, "axis 1 of shape .* use all_to_all_v"),
        (np.zeros((3, 4)), {"split_dim": 2}, "split_dim=2 is not an axis"),
        (np.zeros((3, 4)), {"concat_dim": -3}, "concat_dim=-3 is not an axis"),
        (np.zeros((3, 4)), {"concat_dim": 1.0}, "concat_dim is the number of an axis, not 1.0"),
        (np.zeros((3, 4)), {"out": np.zeros((4, 3))}, r"\[4, 3\].*\[3, 4\]"),
    ],
)
def test_refusals(value: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        AllToAll(value, **arguments).prepare(0, 3, group_of(3).settings)


def test_the_fingerprint() -> None:
    def head(**arguments: Any) -> Any:
        request = AllToAll(values(0, (2, 4)), **arguments)
        return decode_fingerprint(request.prepare(0, 2, group_of(2).settings))

    assert head() == ("all_to_all", "float32", (2, 4), ())
    assert head() == head(split_dim=-2, concat_dim=0, name="all_to_all_dim")
    assert head(split_dim=1).detail == (("split_dim", 1), ("concat_dim", 0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("break_after", [0, 4, 12])
async def test_a_broken_link_leaves_nothing_running(algorithm: str, break_after: int) -> None:
    group = group_of(5, algorithm=algorithm, break_after=break_after)

    async def body(rank: int) -> Any:
        request = AllToAll(values(rank, (5,)))
        link = Link(group, rank)
        request.prepare(rank, 5, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(5)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Broken, np.ndarray}
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
