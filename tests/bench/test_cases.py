"""Inputs, expected results and the check of results, against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import in_threads

from ruda_async import sync
from ruda_async.bench import raw
from ruda_async.bench.cases import Case, bus_factor
from ruda_async.bench.contender import Data, Unsupported
from ruda_async.bench.local import LocalWork
from ruda_async.bench.plan import OPERATIONS, Subject

MOVING = [operation for operation in OPERATIONS if operation != "barrier"]


def all_ranks(operation: str, nbytes: int, world: int, dtype: str, row: int = 4) -> list[Case]:
    return [Case(operation, nbytes, world, rank, dtype, row) for rank in range(world)]


def reference(cases: list[Case]) -> list[Any]:
    """Every rank's result, from all inputs, by the words of the contract."""
    values = [case.value() for case in cases]
    world = len(cases)
    total = (
        np.sum([value.astype(np.float64) for value in values], axis=0)
        if len({v.shape for v in values}) == 1
        else 0
    )
    match cases[0].operation:
        case "all_reduce":
            return [total] * world
        case "reduce_scatter":
            return np.split(total, world)
        case "all_gather":
            return [np.concatenate(values)] * world
        case "broadcast":
            return [values[0]] * world
        case "all_to_all":
            return [np.concatenate([np.split(v, world)[r] for v in values]) for r in range(world)]
        case "send":
            return [values[rank - 1] for rank in range(world)]
    parts = [np.split(v, np.cumsum(sent)[:-1]) for v, sent in zip(values, cases[0].counts, strict=True)]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(world)]


@given(
    st.sampled_from(MOVING),
    st.integers(1, 5000),
    st.integers(2, 5),
    st.sampled_from(["float32", "float16", "int64", "uint8"]),
)
def test_right_results_pass_and_any_wrong_element_is_found(
    operation: str, nbytes: int, world: int, dtype: str
) -> None:
    cases = all_ranks(operation, nbytes, world, dtype)
    for case, result in zip(cases, reference(cases), strict=True):
        right = result.astype(dtype)
        assert case.nbytes >= nbytes
        assert case.value().shape == case.shape
        assert case.fault(right) == ""
        assert case.result().shape == right.shape
        for at in {0, right.size // 2, right.size - 1} if right.size else ():
            wrong = right.copy()
            wrong.reshape(-1)[at] += 1
            assert f"element {at} of the result" in case.fault(wrong)
        assert "elements, not" in case.fault(right.reshape(-1)[:-1] if right.size else np.zeros(1, dtype))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all", "all_to_all_v"])
def test_a_result_of_ranks_in_wrong_order_is_found(operation: str) -> None:
    case = Case(operation, 4096, 3, 1, "float32")
    right = np.concatenate([case.expected(*segment) for segment in case.segments])
    assert case.fault(np.roll(right, 5)) != ""
    assert case.fault(np.roll(right, 512)) != ""
    assert case.fault(right.astype(np.float64)) == "the result's dtype is float64, not float32"
    assert case.fault(None) == "there is no result"


def test_an_expert_layer_is_what_it_is_said_to_be() -> None:
    case = Case("all_to_all_v", 512 << 10, 4, 2, "float16", 4096)
    assert case.shape == (64, 4096)
    assert all(sum(sent) == 64 for sent in case.counts)
    assert len({tuple(sent) for sent in case.counts}) == 4
    assert len(set(case.counts[0])) > 1  # uneven


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert (
        bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    )
    assert bus_factor("broadcast", 4) == bus_factor("send", 4) == 1


@pytest.mark.parametrize("operation", MOVING)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("reuse", [False, True])
def test_local_work_gives_the_result(operation: str, dtype: str, reuse: bool) -> None:
    for case in all_ranks(operation, 300_001, 3, dtype):
        contender = LocalWork(Subject("numpy"), case.rank, alone=False)
        contender.prepare(Data(case, reuse, empty=False))
        assert contender.check() == ""
        assert len(contender.block(2)) == 2


def test_local_work_of_tasks_is_all_done_by_rank_0() -> None:
    blocks = []
    for case in all_ranks("all_reduce", 8, 3, "float32"):
        contender = LocalWork(Subject("numpy"), case.rank, alone=True)
        contender.prepare(Data(case, False, False))
        assert contender.check() == ""
        blocks.append(len(contender.block(4)))
    assert blocks == [4, 0, 0]
    with pytest.raises(Unsupported, match="no local work"):
        contender.prepare(Data(Case("barrier", 0, 3, 0, "float32"), False, False))


@pytest.mark.parametrize("world", [2, 3])
def test_raw_sockets_give_the_result(world: int) -> None:
    def body(comm: sync.Communicator) -> list[str]:
        contender = raw.RawSockets(Subject("raw"), comm, 10)
        faults = []
        for operation in OPERATIONS:
            for nbytes in (8, 5000, 3 * raw.CHUNK + 4):
                case = Case(operation, nbytes, comm.world_size, comm.rank, "float32", 64)
                contender.prepare(Data(case, True, False))
                faults += [contender.check(), contender.check()]
                assert len(contender.block(2)) == 2
        comm.barrier()
        contender.close()
        return faults

    assert {fault for faults in in_threads(world, body) for fault in faults} == {""}
