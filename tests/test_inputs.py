"""Every operation on tensors without elements, in every layout and of every dtype that travels."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import outcome, run_ranks

from ruda_async import AsyncCommunicator, TensorContractError

torch = pytest.importorskip("torch")

#: name → (the call, its result on a rank out of all ranks' inputs; an error where it refuses them)
Call = Callable[[AsyncCommunicator, Any], Awaitable[Any]]
Model = Callable[[list[np.ndarray], int], np.ndarray | None]


def parts(rows: int, world: int) -> list[int]:
    """How many rows go to each rank in the uneven exchange."""
    counts = [0] * world
    for row in range(rows):
        counts[row * row % world] += 1
    return counts


def shard(value: np.ndarray, world: int, rank: int, axis: int = 0) -> np.ndarray:
    if value.shape[axis] % world:
        raise TensorContractError("not divisible")
    return np.split(value, world, axis)[rank]


def with_rows(inputs: list[np.ndarray]) -> list[np.ndarray]:
    """As uneven operations need them: a number of bytes is to tell a number of rows."""
    if 0 in inputs[0].shape[1:]:
        raise TensorContractError("an axis of length 0")
    return inputs


def exchanged(inputs: list[np.ndarray], rank: int) -> np.ndarray:
    with_rows(inputs)
    blocks = [np.split(x, np.cumsum(parts(len(x), len(inputs)))[:-1])[rank] for x in inputs]
    return np.concatenate(blocks)


async def exchange(comm: AsyncCommunicator, value: Any) -> Any:
    found = await comm.all_to_all_v(value, parts(len(value), comm.world_size))
    assert len(found.value) == sum(found.receive_counts)
    return found.value


async def around(comm: AsyncCommunicator, value: Any) -> Any:
    """What the rank before sends."""
    if comm.world_size == 1:
        return await comm.broadcast(value, 0)
    sending = comm.channel("around").send(value, (comm.rank + 1) % comm.world_size)
    if comm.rank == 0:
        await sending
    got = await comm.channel("around").recv((comm.rank - 1) % comm.world_size, like=value)
    if comm.rank:
        await sending
    return got


async def uneven(comm: AsyncCommunicator, value: Any) -> Any:
    return (await comm.all_gather_v(value))[0]


MOVES: dict[str, tuple[Call, Model]] = {
    "all_gather": (lambda c, x: c.all_gather(x), lambda xs, r: np.concatenate(xs)),
    "all_gather_dim": (lambda c, x: c.all_gather_dim(x, -1), lambda xs, r: np.concatenate(xs, -1)),
    "all_gather_v": (uneven, lambda xs, r: np.concatenate(with_rows(xs))),
    "gather": (lambda c, x: c.gather(x, 0), lambda xs, r: None if r else np.concatenate(xs)),
    "scatter": (
        lambda c, x: c.scatter(x if c.rank == 0 else None, 0, **({} if c.rank == 0 else {"like": x})),
        lambda xs, r: shard(xs[0], len(xs), r),
    ),
    "broadcast": (lambda c, x: c.broadcast(x, c.world_size - 1), lambda xs, r: xs[-1]),
    "all_to_all": (
        lambda c, x: c.all_to_all(x),
        lambda xs, r: np.concatenate([shard(x, len(xs), r) for x in xs]),
    ),
    "all_to_all_v": (exchange, exchanged),
    "send and recv": (around, lambda xs, r: xs[r - 1]),
}
SUMS: dict[str, tuple[Call, Model]] = {
    "all_reduce": (lambda c, x: c.all_reduce(x), lambda xs, r: sum(xs[1:], xs[0])),
    "max": (lambda c, x: c.all_reduce(x, "max"), lambda xs, r: np.maximum.reduce(xs)),
    "reduce": (lambda c, x: c.reduce(x, 0), lambda xs, r: None if r else sum(xs[1:], xs[0])),
    "reduce_scatter": (
        lambda c, x: c.reduce_scatter(x),
        lambda xs, r: shard(sum(xs[1:], xs[0]), len(xs), r),
    ),
    "reduce_scatter_dim": (
        lambda c, x: c.reduce_scatter_dim(x, -1),
        lambda xs, r: shard(sum(xs[1:], xs[0]), len(xs), r, -1),
    ),
}
CALLS = MOVES | SUMS


def same(found: Any, expected: np.ndarray | None) -> bool:
    """The same dtype, shape and bits."""
    if found is None or expected is None:
        return found is expected
    if isinstance(found, torch.Tensor):
        raw = found.contiguous().view(torch.uint8).numpy()
        return found.shape == expected.shape and bool(raw.tobytes() == expected.tobytes())
    return bool(
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_without_elements(url: str, name: str, world: int) -> None:
    """The right result, or a refusal on every rank after which the next call works."""
    call, model = CALLS[name]

    async def body(comm: AsyncCommunicator) -> None:
        for shape in ((0,), (0, 4), (3, 0), (0, 0), (2, 0, 5)):
            for kind in (np.asarray, torch.from_numpy):
                inputs = [np.zeros(shape, np.float32)] * world
                found = await outcome(call(comm, kind(inputs[comm.rank])))
                try:
                    expected = model(inputs, comm.rank)
                except TensorContractError:
                    assert isinstance(found, TensorContractError), (shape, found)
                    continue
                if expected is None:
                    assert found is None
                else:
                    assert found.shape == expected.shape, (shape, found)
                    assert str(found.dtype).endswith("float32")

    await run_ranks(world, body, url=url)


NUMPY_LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: x.T,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, 1::3],
    "reversed": lambda x: x[::-1, ::-1],
    "one row": lambda x: np.broadcast_to(x[1], x.shape),
    "one column": lambda x: np.broadcast_to(x[:, 2:3], x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}
TORCH_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, 1::3],
    "one row": lambda x: x[1].expand(x.shape),
    "one column": lambda x: x[:, 2:3].expand(x.shape),
    "one number": lambda x: x[1, 2].expand(x.shape),
}


@pytest.mark.parametrize("size", [6, 600], ids=["small", "large"])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_every_layout(url: str, name: str, size: int) -> None:
    """Of distinct values: with equal ones, bytes read in another order would show nowhere."""
    call, model = CALLS[name]
    base = [np.arange(size * size, dtype=np.float32).reshape(size, size) + 0.5 * r for r in range(3)]

    async def body(comm: AsyncCommunicator) -> None:
        for layout, arrange in NUMPY_LAYOUTS.items():
            inputs = [arrange(x) for x in base]
            assert same(await call(comm, inputs[comm.rank]), model(inputs, comm.rank)), layout
        for layout, arrange in TORCH_LAYOUTS.items():
            tensors = [arrange(torch.from_numpy(x)) for x in base]
            expected = model([x.numpy() for x in tensors], comm.rank)
            assert same(await call(comm, tensors[comm.rank]), expected), layout

    await run_ranks(3, body, url=url)


NARROW = [
    *("bfloat16", "float16", "bool", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", sorted(MOVES))
async def test_every_dtype_moves_as_its_bits(url: str, name: str, dtype: str) -> None:
    """NaNs with their payloads and negative zeros among them."""
    call, model = MOVES[name]
    to_numpy = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(zlib.crc32(f"{name} {dtype}".encode()))
    raw = [
        rng.integers(0, 2 if dtype == "bool" else 256, (6, 6 * to_numpy.itemsize), np.uint8) for _ in "abc"
    ]
    inputs = [x.view(to_numpy) for x in raw]

    async def body(comm: AsyncCommunicator) -> None:
        expected = model(inputs, comm.rank)
        assert same(await call(comm, inputs[comm.rank]), expected)
        tensor = torch.from_numpy(raw[comm.rank].copy()).view(getattr(torch, dtype))
        found = await call(comm, tensor)
        assert found is None or found.dtype == tensor.dtype
        assert same(found, expected)

    await run_ranks(3, body, url=url)


@pytest.mark.parametrize("dtype", ["bool", *[name for name in NARROW if name.startswith("float8")]])
@pytest.mark.parametrize("name", sorted(SUMS))
async def test_what_is_not_added_is_refused_by_name(name: str, dtype: str) -> None:
    call, _ = SUMS[name]

    async def body(comm: AsyncCommunicator) -> None:
        for value in (
            np.zeros((3, 3), getattr(ml_dtypes, dtype, dtype)),
            torch.zeros(3, 3).to(getattr(torch, dtype)),
        ):
            if name == "max" and dtype == "bool":
                continue  # an order there is
            error = await outcome(call(comm, value))
            assert isinstance(error, TensorContractError), error
            assert dtype in str(error)

    await run_ranks(3, body)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_a_mean_is_over_ranks_and_not_over_elements(url: str, kind: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for length in (3, 12, 30_000):
            value = np.arange(length, dtype=np.float64) * (comm.rank + 1)
            whole = torch.from_numpy(value) if kind == "torch" else value
            expected = np.arange(length) * 2.0
            assert np.asarray(await comm.all_reduce(whole, "mean")).tolist() == expected.tolist()
            mine = np.asarray(await comm.reduce_scatter(whole, "mean"))
            assert mine.tolist() == np.split(expected, 3)[comm.rank].tolist()
            at_root = await comm.reduce(whole, 2, "mean")
            assert (at_root is None) == (comm.rank != 2)
            assert at_root is None or np.asarray(at_root).tolist() == expected.tolist()
        integers = np.arange(3) if kind == "numpy" else torch.arange(3)
        for call in (comm.all_reduce, comm.reduce_scatter):
            error = await outcome(call(integers, "mean"))
            assert isinstance(error, TensorContractError)
            assert "int64" in str(error)
            assert "float" in str(error)  # the way out

    await run_ranks(3, body, url=url)


@pytest.mark.timeout(120)
async def test_a_sum_has_the_same_bits_at_every_size_and_in_every_run(url: str) -> None:
    """From 1 KiB to 64 MiB: other algorithms, segments and memory, and one order of addition."""
    rng = np.random.default_rng(3)
    pieces = [(rng.standard_normal(256) * 10.0 ** rng.integers(-6, 7, 256)).astype(np.float32) for _ in "abc"]
    expected = ((pieces[0] + pieces[1]) + pieces[2]).tobytes()

    async def body(comm: AsyncCommunicator) -> None:
        for _ in range(2):
            for times in (1, 1 << 10, 1 << 16):
                total = await comm.all_reduce_sum(np.tile(pieces[comm.rank], times))
                assert (total.reshape(times, 256).view(np.uint32) == np.frombuffer(expected, np.uint32)).all()

    await run_ranks(3, body, url=url, limit=100, timeout=90)
