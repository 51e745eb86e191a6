"""`clip_grad_norm_` against torch's on the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rank_threads import in_threads
from torch import Tensor, nn

from ruda_async import CollectiveCancelledError, ConfigError, RudaError, sync
from ruda_async.training import NonFiniteGradientError, clip_grad_norm_


def _parameter(seed: int, size: int = 5, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(size, dtype=dtype))
    p.grad = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return p


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
def test_replicated_and_sharded(norm_type: float, max_norm: float) -> None:
    whole = [_parameter(0), *(_parameter(1 + rank) for rank in range(3))]
    norm = torch.nn.utils.clip_grad_norm_(whole, max_norm, norm_type)

    def body(comm: sync.Communicator) -> float:
        shared, own, unused = _parameter(0), _parameter(1 + comm.rank), nn.Parameter(torch.zeros(2))
        found = clip_grad_norm_([shared, unused], max_norm, comm, sharded=[own], norm_type=norm_type)
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        for mine, other in ((shared, whole[0]), (own, whole[1 + comm.rank])):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-15)
        return found.item()

    assert len(set(in_threads(3, body))) == 1


def test_a_grid_counts_each_expert_once() -> None:
    whole = [_parameter(0), _parameter(1), _parameter(2)]
    norm = torch.nn.utils.clip_grad_norm_(whole, 1.0)

    def body(comm: sync.Communicator) -> None:
        row = comm.split(comm.rank // 2)  # has each expert once; columns replicate them
        shared, expert = _parameter(0), _parameter(1 + comm.rank % 2)
        found = clip_grad_norm_([shared], 1.0, comm, sharded=[expert], shard_comm=row)
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(expert.grad, whole[1 + comm.rank % 2].grad, rtol=1e-12, atol=0)

    in_threads(4, body)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_one_rank_with_a_gradient_that_is_not_finite(bad: float, norm_type: float) -> None:
    def body(comm: sync.Communicator) -> None:
        own = _parameter(comm.rank)
        assert own.grad is not None
        if comm.rank == 1:
            own.grad[2] = bad
        before = own.grad.clone()
        options: dict[str, Any] = {"sharded": [own], "norm_type": norm_type}
        with pytest.raises(NonFiniteGradientError, match="cannot be clipped") as caught:
            clip_grad_norm_([], 1.0, comm, error_if_nonfinite=True, **options)
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, RudaError)
        torch.testing.assert_close(own.grad, before, equal_nan=True, rtol=0, atol=0)

        found = clip_grad_norm_([], 1.0, comm, **options)
        reference = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        reference.grad = before.clone()
        other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        other.grad = torch.tensor([bad], dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([reference, other], 1.0, norm_type)
        torch.testing.assert_close(own.grad, reference.grad, equal_nan=True)
        assert not math.isfinite(found.item())

    in_threads(2, body)


def test_halves_do_not_overflow() -> None:
    def body(comm: sync.Communicator) -> None:
        p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        p.grad = torch.full((4,), 60000.0, dtype=torch.float16)
        assert clip_grad_norm_([p], 1.0, comm).item() == pytest.approx(120000, rel=1e-3)
        torch.testing.assert_close(p.grad, torch.full((4,), 0.5, dtype=torch.float16))

    in_threads(2, body)


def test_a_wrong_argument_in_a_grid_fails_the_call_on_every_rank_of_it() -> None:
    """Of every row, also of those whose own first exchange was right; and the next call works."""

    def body(comm: sync.Communicator) -> float:
        row = comm.split(comm.rank // 2)
        assert row is not None
        bad = comm.rank == 1
        with pytest.raises(ConfigError if bad else CollectiveCancelledError, match="max_norm=-1") as caught:
            clip_grad_norm_([], -1.0 if bad else 1.0, comm, sharded=[_parameter(1)], shard_comm=row)
        assert bad or caught.value.rank == 1
        return clip_grad_norm_([], 1e6, comm, sharded=[_parameter(comm.rank % 2)], shard_comm=row).item()

    assert len(set(in_threads(4, body))) == 1


def test_no_gradients_and_wrong_arguments() -> None:
    def body(comm: sync.Communicator) -> None:
        alone = _parameter(1) if comm.rank == 0 else nn.Parameter(torch.zeros(1))
        mine: Tensor = clip_grad_norm_(nn.Parameter(torch.zeros(1)), 1.0, comm, sharded=[alone])
        assert mine.item() > 0
        assert clip_grad_norm_([], 1.0, comm).item() == 0
        for name, wrong in (("max_norm", -1.0), ("max_norm", math.nan), ("norm_type", 0.0)):
            options: dict[str, Any] = {"max_norm": 1.0} | ({name: wrong} if comm.rank else {})
            with pytest.raises(ConfigError if comm.rank else CollectiveCancelledError, match=name) as caught:
                clip_grad_norm_([], comm=comm, **options)
            assert comm.rank or caught.value.rank == 1
        comm.barrier()

    in_threads(2, body)
