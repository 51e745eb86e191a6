"""Clipping by the norm of all gradients, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, RudaError
from .lanes import await_here, inner_of, refused

__all__ = ["NonFiniteGradientError", "clip_grad_norm_"]


class NonFiniteGradientError(RudaError, RuntimeError):
    """The norm of all gradients is NaN or infinite; raised on every rank, and no gradient was changed."""


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    comm: Any,
    *,
    sharded: Iterable[Tensor] = (),
    shard_comm: Any = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their norm over all ranks is at most `max_norm`; collective.

    As `torch.nn.utils.clip_grad_norm_`, for a model of which only a part is on each rank.

    Args:
        parameters: replicated parameters, whose gradients are reduced already: counted once.
        max_norm: the greatest norm, at least 0.
        comm: the communicator of all ranks that call. All of them clip by the same number.
        sharded: parameters of which each rank of `shard_comm` has its own, such as experts or the shards of
            an optimizer: counted on every rank of it.
        shard_comm: the ranks among which `sharded` are spread, where that is not `comm`: in a grid of
            replicated experts, the group that holds each expert once.
        norm_type: the *p* of the p-norm, above 0; ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: raise where the norm is NaN or infinite. Otherwise gradients are scaled by what
            comes out, which makes them NaN or zero as torch's function does.

    Returns:
        The norm before clipping: a float64 scalar on the CPU, the same to the bit on all ranks.

    Raises:
        NonFiniteGradientError: the norm is NaN or infinite, and `error_if_nonfinite`.
        ConfigError: `max_norm` or `norm_type` is out of range; the other ranks' call fails too, and says so.
        RudaError: as collectives do.
    """
    inner = inner_of(comm)
    grid = shard_comm is not None and inner_of(shard_comm)._channel is not inner._channel
    try:
        _check(max_norm, norm_type)
        whole = _gradients([parameters] if isinstance(parameters, Tensor) else parameters)
        parts = _gradients(sharded)
        shares = torch.tensor([_power(whole, norm_type), _power(parts, norm_type)], dtype=torch.float64)
    except Exception as error:
        if grid:  # its ranks make this call first, and then find out with all others
            _everyones(shard_comm, torch.zeros(2, dtype=torch.float64))
        await_here(comm, refused(inner, "clip_grad_norm_", error))
    if grid:
        shares[1] = _joined(_everyones(shard_comm, shares)[:, 1], norm_type)
        # Other groups may hold replicas with other rounding: rank 0's numbers hold for all.
        everyone = _everyones(comm, shares)
        shares = everyone[0]
    else:
        everyone = _everyones(comm, shares)
        shares = torch.stack([everyone[0, 0], _joined(everyone[:, 1], norm_type)])
    total = _joined(shares, norm_type)
    if not math.isinf(norm_type):
        total = total.pow(1 / norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise NonFiniteGradientError(
            f"the total norm of order {norm_type:g} of the gradients is {total.item()}, so they cannot be "
            "clipped; skip this step, or pass error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0).item()
    if factor != 1.0 and (whole or parts):
        torch._foreach_mul_(whole + parts, factor)
    return total


def _check(max_norm: float, norm_type: float) -> None:
    if not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm!r} is out of range; it is 0 or more")
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type!r} is out of range; it is above 0, or float('inf')")


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _power(gradients: Sequence[Tensor], p: float) -> float:
    """The p-th power of the norm (for infinity the norm), summed in float64."""
    halves = (torch.float16, torch.bfloat16)
    norms = [
        torch.linalg.vector_norm(g.detach(), p, dtype=torch.float32 if g.dtype in halves else None).item()
        for g in gradients
    ]
    values = torch.tensor(norms, dtype=torch.float64)
    return _joined(values if math.isinf(p) else values.pow(p), p).item()


def _joined(powers: Tensor, p: float) -> Tensor:
    if not math.isinf(p):
        return powers.sum()
    return powers.max() if len(powers) else torch.zeros((), dtype=torch.float64)


def _everyones(comm: Any, shares: Tensor) -> Tensor:
    """The two numbers of each rank of `comm`."""
    gathered: Tensor = await_here(comm, inner_of(comm).all_gather(shares))
    return gathered.view(-1, 2)
