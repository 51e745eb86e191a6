from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.collectives.all_reduce import AllReduce
from ruda_async.collectives.operation import Settings
from ruda_async.collectives.request import decode_fingerprint
from ruda_async.errors import TensorContractError
from ruda_async.transport.base import DONE, Capabilities

from .reduction_model import PAIRS, distinct, documented, run_requests, same_bits, segments
from .strict_link import Broken, StrictGroup, StrictLink, run_strict

ALGORITHMS = ["direct", "recursive_doubling", "rabenseifner", "pairwise", "ring"]
SHAPES = [(), (1,), (7,), (5, 3), (64,), (2, 3, 11)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    size=st.integers(1, 9),
    pair=st.sampled_from(PAIRS),
    shape=st.sampled_from(SHAPES),
    segment=st.sampled_from([8, 24, 100, 1 << 19]),
    budget=st.sampled_from([None, 8, 13, 64]),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_every_algorithm_gives_the_documented_bits(
    algorithm: str,
    size: int,
    pair: Any,
    shape: tuple[int, ...],
    segment: int,
    budget: int | None,
    in_place: bool,
    seed: int,
) -> None:
    dtype, operator = pair
    inputs = distinct(seed, dtype, shape, size)
    values = [x.copy() for x in inputs]
    results, group = run_requests(
        size,
        lambda r: AllReduce(values[r], operator, out=values[r] if in_place else None),
        settings=Settings(algorithm=algorithm, max_bytes=budget),
        capabilities=segments(segment),
        seed=seed,
    )
    expected = documented(inputs, operator)
    for rank, result in enumerate(results):
        assert same_bits(result, expected)
        if in_place:
            assert result is values[rank]
        else:
            assert same_bits(values[rank], inputs[rank]), "the input was changed"
            assert not np.shares_memory(result, values[rank])
    if budget is not None:
        assert group.largest <= budget


@given(
    size=st.integers(2, 9),
    algorithm=st.sampled_from([None, *ALGORITHMS]),
    dtype=st.sampled_from(["float16", "float32", "float64", "int16"]),
    count=st.integers(1, 80),
    segment=st.sampled_from([4, 24, 1 << 19]),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_any_order_is_close_and_the_same_on_all_ranks(
    size: int, algorithm: str | None, dtype: str, count: int, segment: int, in_place: bool, seed: int
) -> None:
    inputs = distinct(seed, np.dtype(dtype), (count,), size)
    values = [x.copy() for x in inputs]
    results, _ = run_requests(
        size,
        lambda r: AllReduce(values[r], order="any", out=values[r] if in_place else None),
        settings=Settings(algorithm=algorithm),
        capabilities=segments(segment),
        seed=seed,
    )
    assert all(same_bits(result, results[0]) for result in results)
    magnitude = sum(np.abs(x.astype(np.float64)) for x in inputs)
    expected = documented(inputs, "sum")
    if dtype == "int16":
        assert same_bits(results[0], expected)
    else:
        error = np.abs(results[0].astype(np.float64) - expected.astype(np.float64))
        assert np.all(error <= 2 * size * np.finfo(dtype).eps * magnitude)


def test_the_ring_of_any_order_differs_from_the_documented_one() -> None:
    # Else the test above would not have run the ring.
    inputs = distinct(3, np.dtype("float32"), (400,), 5)
    results, _ = run_requests(
        5, lambda r: AllReduce(inputs[r], order="any"), settings=Settings(algorithm="ring")
    )
    assert not same_bits(results[0], documented(inputs, "sum"))


# ---------------------------------------------------------------------- forms of tensors


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_no_elements(size: int, shape: tuple[int, ...], algorithm: str | None) -> None:
    results, group = run_requests(
        size, lambda r: AllReduce(np.zeros(shape, np.float32)), settings=Settings(algorithm=algorithm)
    )
    assert all(result.shape == shape and result.dtype == np.float32 for result in results)
    assert (group.messages > 0) == (size > 1), "ranks have to hear of each other"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_layouts_of_distinct_values(size: int) -> None:
    base = [np.arange(60, dtype=np.float64).reshape(6, 10) * (r + 1) for r in range(size)]
    layouts: dict[str, Any] = {
        "transposed": lambda x: x.T,
        "strided": lambda x: x[::2, 1::3],
        "reversed": lambda x: x[::-1, ::-1],
        "expanded": lambda x: np.broadcast_to(x[:, :1], (6, 4)),
        "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    }
    for layout in layouts.values():
        views = [layout(x) for x in base]
        results, _ = run_requests(size, lambda r, views=views: AllReduce(views[r]))
        assert all(same_bits(result, documented(views, "sum")) for result in results)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_out_that_overlaps_the_input_in_part(algorithm: str, size: int) -> None:
    inputs = distinct(5, np.dtype("float32"), (50,), size)
    whole = [np.concatenate([x, np.zeros(7, np.float32)]) for x in inputs]
    results, _ = run_requests(
        size,
        lambda r: AllReduce(whole[r][:50], out=whole[r][7:]),
        settings=Settings(algorithm=algorithm),
        capabilities=segments(32),
    )
    for rank, result in enumerate(results):
        assert same_bits(result, documented(inputs, "sum"))
        assert np.shares_memory(result, whole[rank])


def test_out_that_is_strided() -> None:
    inputs = distinct(6, np.dtype("float16"), (4, 5), 3)
    outs = [np.zeros((5, 4), np.float16).T for _ in range(3)]
    results, _ = run_requests(3, lambda r: AllReduce(inputs[r], out=outs[r]))
    for result, out in zip(results, outs, strict=True):
        assert result is out
        assert np.array_equal(out, documented(inputs, "sum"))


def test_torch_and_numpy_ranks_get_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    inputs = distinct(8, np.dtype("float32"), (33,), 4)
    results, _ = run_requests(
        4, lambda r: AllReduce(torch.from_numpy(inputs[r]) if r % 2 else inputs[r], "mean")
    )
    for rank, result in enumerate(results):
        assert isinstance(result, torch.Tensor) == bool(rank % 2)
        assert same_bits(np.asarray(result), documented(inputs, "mean"))


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 8])
def test_messages_and_traffic(size: int) -> None:
    count = 1680  # divisible by all these sizes and by powers of two
    nbytes = 4 * count
    power = 1 << (size.bit_length() - 1)
    extra, rounds = size - power, int(math.log2(power))
    expected = {
        "direct": (size * (size - 1), size * (size - 1) * nbytes),
        "recursive_doubling": (2 * extra + power * rounds, (2 * extra + power * rounds) * nbytes),
        "rabenseifner": (2 * extra + 2 * power * rounds, (2 * extra + 2 * (power - 1)) * nbytes),
        "pairwise": (2 * size * (size - 1), 2 * (size - 1) * nbytes),
        "ring": (2 * size * (size - 1), 2 * (size - 1) * nbytes),
    }
    for algorithm, (messages, traffic) in expected.items():
        _, group = run_requests(
            size,
            lambda r: AllReduce(np.ones(count, np.float32), order="any"),
            settings=Settings(algorithm=algorithm),
        )
        assert (group.messages, group.payload_bytes) == (messages, traffic), algorithm


def test_half_precision_travels_narrow_where_all_inputs_meet() -> None:
    sent = {}
    for algorithm in ALGORITHMS:
        _, group = run_requests(
            4,
            lambda r: AllReduce(np.ones(64, np.float16), order="any"),
            settings=Settings(algorithm=algorithm),
        )
        sent[algorithm] = group.payload_bytes
    message, wide = 128, 256
    assert sent["direct"] == 12 * message
    assert sent["pairwise"] == 6 * message
    assert sent["recursive_doubling"] == 8 * wide
    assert sent["rabenseifner"] == sent["ring"] == 3 * (wide + message)


@pytest.mark.parametrize("algorithm", ["direct", "pairwise", "ring"])
def test_pipelines_cut_to_segments(algorithm: str) -> None:
    inputs = distinct(1, np.dtype("float32"), (5000,), 3)
    results, group = run_requests(
        3,
        lambda r: AllReduce(inputs[r]),
        settings=Settings(algorithm=algorithm, max_bytes=1024),
        capabilities=segments(512),
    )
    assert group.largest <= 512
    assert same_bits(results[1], documented(inputs, "sum"))


def test_the_transports_largest_message_is_kept() -> None:
    for algorithm in ALGORITHMS:
        _, group = run_requests(
            3,
            lambda r: AllReduce(np.ones(1000, np.float32)),
            settings=Settings(algorithm=algorithm),
            capabilities=Capabilities(max_message=999),
        )
        assert group.largest <= 999


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_long_work_lets_the_loop_turn(algorithm: str, dtype: str) -> None:
    nbytes = 4 << 20
    for size in (1, 2):
        _, group = run_requests(
            size,
            lambda r: AllReduce(np.ones(nbytes // np.dtype(dtype).itemsize, dtype), order="any"),
            settings=Settings(algorithm=algorithm),
        )
        assert group.turns >= 3 * size


class _Instant:
    """Rank 0's link to one peer that has sent already: nothing ever waits."""

    rank, size = 0, 2
    capabilities = Capabilities()
    settings: Any = Settings()
    providers: Any = ()

    async def allocate(self, adapter: Any, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return adapter.allocate(like, shape, dtype)

    def __init__(self, theirs: bytes) -> None:
        self.theirs = theirs

    def send(self, peer: int, *buffers: memoryview, lane: int = 0) -> Any:
        return DONE

    def recv_into(self, peer: int, *buffers: memoryview, lane: int = 0) -> Any:
        buffers[0][:] = self.theirs
        return DONE


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_two_ranks_swap_without_a_task_or_a_turn(dtype: str) -> None:
    mine, theirs = distinct(2, np.dtype(dtype), (2,), 2)
    request = AllReduce(mine)
    request.prepare(0, 2, Settings())
    # Outside any event loop: a task, a future or a turn would raise.
    with pytest.raises(StopIteration) as finished:
        request.run(_Instant(theirs.tobytes())).send(None)  # type: ignore[arg-type]
    assert same_bits(finished.value.value, documented([mine, theirs], "sum"))


# ---------------------------------------------------------------------- agreement and refusals


def _head(request: AllReduce[Any], settings: Settings | None = None) -> bytes:
    return request.prepare(0, 4, settings or Settings())


def test_the_fingerprint_holds_what_ranks_must_agree_on() -> None:
    x = np.ones((2, 3), np.float32)
    head = _head(AllReduce(x))
    seen = decode_fingerprint(head)
    assert seen is not None
    assert seen[:3] == ("all_reduce", "float32", (2, 3))
    assert seen.detail == (("operator", "sum"),)
    assert _head(AllReduce(x, name="all_reduce_sum", order="exact")) == head
    others = {
        _head(AllReduce(x, "max")),
        _head(AllReduce(x, order="any")),
        _head(AllReduce(x.T)),
        _head(AllReduce(x.astype(np.float64))),
        _head(AllReduce(x), Settings(algorithm="ring")),
        _head(AllReduce(x), Settings(max_bytes=64)),
    }
    assert len(others | {head}) == 7
    assert _head(AllReduce(x), Settings(order="any")) == _head(AllReduce(x, order="any"))


def test_refusals() -> None:
    x = np.ones(4, np.float64)
    with pytest.raises(TensorContractError, match=r"max_bytes=7.*bounded\(8\)"):
        _head(AllReduce(x), Settings(max_bytes=7))
    with pytest.raises(TensorContractError, match="order is 'exact' or 'any', not 'fast'"):
        _head(AllReduce(x, order="fast"))
    with pytest.raises(TensorContractError, match="all_reduce_sum: the operator"):
        _head(AllReduce(x, 3, name="all_reduce_sum"))  # type: ignore[arg-type]
    with pytest.raises(TensorContractError, match="median"):
        _head(AllReduce(x, "median"))
    with pytest.raises(TensorContractError, match="bool"):
        _head(AllReduce(np.ones(3, bool)))
    with pytest.raises(TensorContractError, match="mean"):
        _head(AllReduce(np.ones(3, np.int32), "mean"))
    with pytest.raises(TensorContractError):
        _head(AllReduce([1.0, 2.0]))
    with pytest.raises(TensorContractError):
        _head(AllReduce(x, out=np.ones(5, np.float64)))
    with pytest.raises(TensorContractError):
        _head(AllReduce(x, out=np.ones(4, np.float32)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cancel", [False, True])
async def test_an_end_before_time_leaves_nothing_running(algorithm: str, cancel: bool) -> None:
    group = StrictGroup(4, Settings(algorithm=algorithm), segments(64), break_after=None if cancel else 5)

    async def body(link: StrictLink) -> Any:
        request = AllReduce(np.ones(300, np.float32))
        request.prepare(link.rank, 4, group.settings)
        return await request.run(link)

    before = asyncio.all_tasks()
    ranks = [asyncio.ensure_future(body(StrictLink(group, r))) for r in range(3 if cancel else 4)]
    if cancel:  # rank 3 never comes
        for _ in range(100):  # far enough to be in the middle
            await asyncio.sleep(0)
        assert group.messages
        assert not any(rank.done() for rank in ranks)
        for rank in ranks:
            rank.cancel()
    outcomes = await asyncio.gather(*ranks, return_exceptions=True)
    kind = asyncio.CancelledError if cancel else Broken
    assert all(isinstance(outcome, kind) for outcome in outcomes), outcomes
    assert asyncio.all_tasks() == before


async def test_ranks_of_the_same_call_share_nothing() -> None:
    """Two calls of one form at once: plans are shared, buffers are not."""
    inputs = [distinct(s, np.dtype("float32"), (40,), 3) for s in (1, 2)]

    async def one(which: int) -> list[Any]:
        group = StrictGroup(3, seed=which)

        async def body(link: StrictLink) -> Any:
            request = AllReduce(inputs[which][link.rank])
            request.prepare(link.rank, 3, group.settings)
            return await request.run(link)

        return list(await run_strict(group, body))

    for which, results in enumerate(await asyncio.gather(one(0), one(1))):
        assert all(same_bits(x, documented(inputs[which], "sum")) for x in results)
