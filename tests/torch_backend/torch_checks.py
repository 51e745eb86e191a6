"""What `test_against_gloo` and its neighbours run on every rank, with this library's group and Gloo's.

Each check takes the two groups of the same ranks. It runs in processes that `run_checks` starts together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, _functional_collectives

import ruda_async.torch_backend
from ruda_async import CollectiveTimeoutError, TensorContractError
from ruda_async.torch_backend import BackendError

Group = Any
Check = Callable[[Group, Group], None]

CHECKS: dict[str, Check] = {}

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
#: What Gloo moves nothing of.
OTHERS = (
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def run_checks(checks: dict[str, Check]) -> dict[str, str]:
    """All checks on this rank: name → the traceback of one that failed."""
    torch.set_num_threads(1)
    dist.init_process_group("ruda", init_method="ruda://", timeout=timedelta(seconds=60))
    failures = {}
    for name, function in checks.items():
        ruda, gloo = dist.new_group(), dist.new_group(backend="gloo")
        try:
            function(ruda, gloo)
        except Exception:
            failures[name] = traceback.format_exc()
    dist.destroy_process_group()
    return failures


def numbers(dtype: torch.dtype, *shape: int, rank: int | None = None) -> Tensor:
    """Small whole numbers of any dtype, other ones on each rank; sums of them are exact."""
    seed = dist.get_rank() if rank is None else rank
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + seed * 3) % 5).reshape(shape).to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    """Equal to the bit."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), (a, b)


def expect_error(call: Callable[[], object], kind: type[BaseException]) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call()
    error = caught.value
    assert isinstance(error, dist.DistBackendError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.error, kind), error
    assert error.__cause__ is error.error
    return error


# ---------------------------------------------------------------------- reductions


@check
def all_reduce(ruda: Group, gloo: Group) -> None:
    for dtype in (*FLOATS, *INTS):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            ours, theirs = numbers(dtype, 3, 4), numbers(dtype, 3, 4)
            dist.all_reduce(ours, op, group=ruda)
            dist.all_reduce(theirs, op, group=gloo)
            same(ours, theirs)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            ours, theirs = numbers(dtype, 5), numbers(dtype, 5)
            dist.all_reduce(ours, op, group=ruda)
            dist.all_reduce(theirs, op, group=gloo)
            same(ours, theirs)


@check
def all_reduce_of_what_gloo_refuses(ruda: Group, gloo: Group) -> None:
    size = dist.get_world_size()
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        ours = torch.ones(3, dtype=dtype)
        dist.all_reduce(ours, group=ruda)
        assert ours.tolist() == [size] * 3
    flag = torch.tensor([dist.get_rank() == 0, False, True])
    every = flag.clone()
    dist.all_reduce(flag, group=ruda)
    dist.all_reduce(every, ReduceOp.PRODUCT, group=ruda)
    assert flag.tolist() == [True, False, True]
    assert every.tolist() == [False, False, True]


@check
def averages_and_scaled_sums(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mean = (size - 1) / 2
    for dtype in FLOATS:
        value = torch.full((4,), float(rank), dtype=dtype)
        dist.all_reduce(value, ReduceOp.AVG, group=ruda)
        same(value, torch.full((4,), mean, dtype=dtype))
        scaled = torch.full((4,), float(rank), dtype=dtype)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), group=ruda)
        same(scaled, torch.full((4,), mean * size / 2, dtype=dtype))
        shard = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(
            shard, torch.full((2 * size,), float(rank), dtype=dtype), ReduceOp.AVG, ruda
        )
        same(shard, torch.full((2,), mean, dtype=dtype))
    for op in (ReduceOp.AVG, dist._make_nccl_premul_sum(2.0)):
        expect_error(
            lambda op=op: dist.all_reduce(torch.ones(2, dtype=torch.int32), op, ruda), TensorContractError
        )


@check
def reduce(ruda: Group, gloo: Group) -> None:
    for root in range(dist.get_world_size()):
        ours, theirs = numbers(torch.float32, 6), numbers(torch.float32, 6)
        dist.reduce(ours, root, group=ruda)
        dist.reduce(theirs, root, group=gloo)
        same(ours, theirs if dist.get_rank() == root else numbers(torch.float32, 6))


@check
def reduce_scatter(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        inputs = [numbers(dtype, 2, 3) + i for i in range(size)]
        total = [sum(numbers(dtype, 2, 3, rank=r) + i for r in range(size)) for i in range(size)]
        ours = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter(ours, inputs, group=ruda)
        same(ours, total[rank])
        ours = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(ours, torch.cat(inputs), group=ruda)
        same(ours, total[rank])
    uneven = [torch.full((i + 1,), float(rank)) for i in range(size)]
    ours = torch.empty(rank + 1)
    dist.reduce_scatter(ours, uneven, group=ruda)
    same(ours, torch.full((rank + 1,), size * (size - 1) / 2))


@check
def sparse_all_reduce(ruda: Group, gloo: Group) -> None:
    rank = dist.get_rank()
    for entries in (rank, 2):  # no entry on rank 0, then as many on each
        where = torch.stack([torch.arange(entries), (torch.arange(entries) + rank) % 4])
        value = torch.sparse_coo_tensor(where, torch.ones(entries, 3) * (rank + 1), (6, 4, 3))
        ours, theirs = value.clone(), value.clone()
        dist.all_reduce(ours, group=ruda)
        dist.all_reduce(theirs, group=gloo)
        same(ours.to_dense(), theirs.to_dense())
    expect_error(lambda: dist.all_reduce(ours, ReduceOp.MAX, group=ruda), TensorContractError)


# ---------------------------------------------------------------------- moving


@check
def gathers(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (*FLOATS, *INTS, *OTHERS):
        value = numbers(dtype, 2, 3)
        everyone = [numbers(dtype, 2, 3, rank=r) for r in range(size)]
        apart = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        whole = torch.empty(size * 2, 3, dtype=dtype)
        together = list(torch.empty(size, 2, 3, dtype=dtype))  # views of one buffer
        rooted = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(apart, value, group=ruda)
        dist.all_gather(together, value, group=ruda)
        dist.all_gather_into_tensor(whole, value, group=ruda)
        dist.gather(value, rooted if rank == 1 else None, dst=1, group=ruda)
        for found in (apart, together, whole.split(2), rooted if rank == 1 else everyone):
            for one, expected in zip(found, everyone, strict=True):
                same(one, expected)
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)), group=ruda)
    assert [t.tolist() for t in uneven] == [[float(r)] * (r + 1) for r in range(size)]


@check
def broadcast_and_scatter(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (*FLOATS, *INTS, *OTHERS, torch.complex64):
        value = numbers(dtype, 3, 2)
        dist.broadcast(value, 1, group=ruda)
        same(value, numbers(dtype, 3, 2, rank=1))
        part = torch.empty(4, dtype=dtype)
        blocks = [numbers(dtype, 4, rank=r) for r in range(size)]
        dist.scatter(part, blocks if rank == 0 else None, src=0, group=ruda)
        same(part, blocks[rank])


@check
def all_to_all(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        output, value = torch.empty(size * 2, 3, dtype=dtype), numbers(dtype, size * 2, 3)
        dist.all_to_all_single(output, value, group=ruda)
        same(output, torch.cat([numbers(dtype, size * 2, 3, rank=r)[rank * 2 :][:2] for r in range(size)]))
        # Rank r sends s rows to rank s, and so receives `rank` rows from each.
        rows = sum(range(size))
        output = torch.empty(rank * size, 3, dtype=dtype)
        dist.all_to_all_single(output, numbers(dtype, rows, 3), [rank] * size, list(range(size)), group=ruda)
        begin = sum(range(rank))
        same(output, torch.cat([numbers(dtype, rows, 3, rank=r)[begin:][:rank] for r in range(size)]))
        outputs = [torch.empty(r + 1, dtype=dtype) for r in range(size)]
        dist.all_to_all(outputs, [numbers(dtype, rank + 1) for _ in range(size)], group=ruda)
        for r in range(size):
            same(outputs[r], numbers(dtype, r + 1, rank=r))


@check
def tensors_that_do_not_lie_in_a_row(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    value = (torch.arange(6.0).reshape(2, 3) + rank).t()  # [3, 2], transposed
    total = value * size + sum(range(size)) - rank * size
    reduced = value.clone(memory_format=torch.preserve_format)
    assert not reduced.is_contiguous()
    dist.all_reduce(reduced, group=ruda)
    assert torch.equal(reduced, total)
    sent = torch.arange(6.0).reshape(2, 3).t() + rank
    dist.broadcast(sent, 1, group=ruda)
    assert torch.equal(sent, torch.arange(6.0).reshape(2, 3).t() + 1)
    outputs = [torch.zeros(2, 3).t() for _ in range(size)]
    dist.all_gather(outputs, value, group=ruda)
    for r, one in enumerate(outputs):
        assert torch.equal(one, value - rank + r)
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    dist.all_reduce(parameter, group=ruda)  # a leaf that requires a gradient, as Gloo takes it
    assert parameter.tolist() == [float(sum(range(size)))] * 2
    for shape in ((0,), (0, 4), ()):
        dist.all_reduce(torch.zeros(shape), group=ruda)
        dist.broadcast(torch.zeros(shape), 0, group=ruda)


@check
def coalesced(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    values = [torch.full((n + 1,), float(rank + n)) for n in range(4)]
    with dist._coalescing_manager(group=ruda, async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value, group=ruda)
    manager.wait()
    for n, value in enumerate(values):
        assert value.tolist() == [float(sum(range(size)) + n * size)] * (n + 1)
    wholes = [torch.empty(size * (n + 1)) for n in range(3)]
    with dist._coalescing_manager(group=ruda):
        for n, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, torch.full((n + 1,), float(rank)), group=ruda)
    for n, whole in enumerate(wholes):
        assert whole.tolist() == [float(r) for r in range(size) for _ in range(n + 1)]
    shards = [torch.empty(n + 1) for n in range(3)]
    with dist._coalescing_manager(group=ruda):
        for n, shard in enumerate(shards):
            dist.reduce_scatter_tensor(shard, torch.full((size * (n + 1),), float(n)), group=ruda)
    for n, shard in enumerate(shards):
        assert shard.tolist() == [float(n * size)] * (n + 1)
    ruda._allgather_base(wholes[0], torch.full((1,), float(rank))).wait()
    assert wholes[0].tolist() == [float(r) for r in range(size)]


@check
def functional_collectives(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    value = numbers(torch.float32, size * 2, 3)
    for group in (ruda, gloo):
        assert dist.get_process_group_ranks(group) == list(range(size))
    f = _functional_collectives
    for call in (
        lambda g: f.all_reduce(value, "sum", g),
        lambda g: f.all_gather_tensor(value, 0, g),
        lambda g: f.all_gather_tensor(value, 1, g),
        lambda g: f.reduce_scatter_tensor(value, "sum", 0, g),
        lambda g: f.all_to_all_single(value, None, None, g),
        lambda g: f.broadcast(value, 1, g),
        lambda g: f.all_reduce_coalesced([value, value + 1], "sum", g)[1],
        lambda g: f.all_gather_into_tensor_coalesced([value, value + 1], g)[1],
        lambda g: f.reduce_scatter_tensor_coalesced([value, value + 1], "sum", [0, 0], g)[1],
    ):
        same(f.wait_tensor(call(ruda)).clone(), f.wait_tensor(call(gloo)).clone())
    assert f.all_reduce(torch.full((1,), float(rank)), "avg", ruda).tolist() == [(size - 1) / 2]


@check
def objects(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "pad": "x" * rank * 1000}, group=ruda)
    assert [one["rank"] for one in found] == list(range(size))
    box = [("from", rank)]
    dist.broadcast_object_list(box, src=1, group=ruda)
    assert box == [("from", 1)]
    rooted: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, rooted, dst=0, group=ruda)
    assert rooted == ([2 * r for r in range(size)] if rank == 0 else None)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, 0, group=ruda)
    assert mine == [f"for {rank}"]


# ---------------------------------------------------------------------- point to point


@check
def point_to_point(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    incoming = torch.empty(3, 2)
    operations = [
        dist.P2POp(dist.isend, torch.full((3, 2), float(rank)), after, ruda),
        dist.P2POp(dist.irecv, incoming, before, ruda),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(incoming, torch.full((3, 2), float(before)))
    sends = [dist.isend(torch.full((2,), float(tag)), after, ruda, tag) for tag in range(8)]
    for tag in reversed(range(8)):
        got = torch.empty(2)
        dist.recv(got, before, ruda, tag)
        assert got.tolist() == [float(tag)] * 2
    for work in sends:
        work.wait()
    expect_error(lambda: ruda.send([torch.ones(1)], size + 5, 0).wait(), TensorContractError)


@check
def receive_from_any(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        heard = []
        for _ in range(2 * (size - 1)):
            got = torch.empty(4)
            source = dist.recv(got, group=ruda)
            assert got.tolist() == [float(source)] * 4
            heard.append(source)
        assert sorted(heard) == sorted(2 * list(range(1, size)))
    else:
        for _ in range(2):
            dist.send(torch.full((4,), float(rank)), 0, ruda)
    dist.barrier(group=ruda)


# ---------------------------------------------------------------------- handles


@check
def handles(ruda: Group, gloo: Group) -> None:
    size = dist.get_world_size()
    value = torch.ones(1 << 16)
    work = dist.all_reduce(value, group=ruda, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait()[0] == 2 * size
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is value
    # Callbacks may start calls and wait for them, as torch's own communication hooks do, many at a time.
    nested = [dist.all_reduce(torch.ones(1), group=ruda, async_op=True).get_future() for _ in range(8)]
    orders = [
        future.then(lambda done, group=group: _reduce_again(done.value()[0], group))
        for future, group in zip(nested, [dist.new_group() for _ in nested], strict=True)
    ]
    assert [order.wait().item() for order in orders] == [float(size * size)] * 8


def _reduce_again(value: Tensor, group: Group) -> Tensor:
    dist.all_reduce(value, group=group)
    return value


@check
def subgroups(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    evens, odds = dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(1, size, 2)))
    mine = odds if rank % 2 else evens
    value = torch.tensor([rank])
    dist.all_reduce(value, group=mine)
    assert value.item() == sum(range(rank % 2, size, 2))
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        value = torch.tensor([rank])
        dist.broadcast(value, size - 1, group=pair)
        assert value.item() == size - 1
        dist.destroy_process_group(pair)
    links = ruda.communicator.stats()["peers"]
    assert len(links) == size - 1  # groups share connections


# ---------------------------------------------------------------------- failure


@check
def bad_input_fails_everywhere(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    value = torch.ones(2, dtype=torch.float8_e5m2 if rank == 1 else torch.float32)
    error = expect_error(lambda: dist.all_reduce(value, group=ruda), TensorContractError)
    assert error.rank == 1
    future = ruda.allreduce(
        [torch.ones(2, dtype=torch.float8_e5m2 if rank == 1 else torch.float32)]
    ).get_future()
    with pytest.raises(RuntimeError, match="float8"):
        future.wait()
    outputs = [torch.empty(2) for _ in range(size - (rank == 0))]  # one too few on rank 0
    error = expect_error(lambda: ruda.allgather([outputs], [torch.ones(2)]).wait(), TensorContractError)
    assert error.rank == 0
    good = torch.ones(2)
    dist.all_reduce(good, group=ruda)
    assert good.tolist() == [size] * 2


@check
def differing_calls_fail_everywhere(ruda: Group, gloo: Group) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    expect_error(
        lambda: dist.all_reduce(torch.ones(3 if rank else 2), group=ruda),
        ruda_async.CollectiveMismatchError,
    )
    value = torch.ones(2)
    dist.all_reduce(value, group=ruda)
    assert value.tolist() == [size] * 2


@check
def timeouts(ruda: Group, gloo: Group) -> None:
    rank = dist.get_rank()
    if rank != 1:
        work = dist.barrier(group=ruda, async_op=True)
        error = expect_error(lambda: work.wait(timedelta(milliseconds=20)), CollectiveTimeoutError)
        assert not work.is_completed()
    dist.barrier(group=gloo)
    if rank == 1:
        work = dist.barrier(group=ruda, async_op=True)
    work.wait()
    if rank != 1:
        error = expect_error(
            lambda: ruda_async.torch_backend.monitored_barrier(ruda, timedelta(seconds=5)),
            CollectiveTimeoutError,
        )
        assert "Ranks 1 failed to pass monitoredBarrier in 5000 ms" in str(error), error
        assert error.error.missing == (1,)
    else:
        dist.recv(torch.empty(1), 0, group=gloo)
        expect_error(lambda: dist.barrier(group=ruda), CollectiveTimeoutError)
    if rank == 0:
        dist.send(torch.ones(1), 1, group=gloo)
    dist.barrier(group=ruda)
    ruda_async.torch_backend.monitored_barrier(ruda)
