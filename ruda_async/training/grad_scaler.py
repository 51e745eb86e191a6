"""Loss scaling where each rank has only a part of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .lanes import await_here, inner_of, refused
from .passes import known_to_all

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """`torch.amp.GradScaler` that agrees over ranks whether a gradient is infinite or NaN.

    So all ranks skip the same steps and have the same scale, where each sees its shard of a
    `ShardedOptimizer`, or experts of its own. With it `unscale_`, and `step` without one, are collective;
    they reduce a `ShardedOptimizer`'s gradients first. All else is torch's.

        scaler = training.ShardedGradScaler(comm)
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        comm: a `ruda_async.sync.Communicator` or an `AsyncCommunicator` (see `off_loop`): all ranks that step
            together, also where an optimizer's own communicator has fewer.
        device, options: torch's; the same on all ranks.

    Raises:
        TypeError: `comm` is no communicator of this library.
        RudaError: out of `unscale_` and `step`, as collectives do; also where it raised on another rank.
    """

    def __init__(self, comm: Any, device: str = "cuda", **options: Any) -> None:
        self._inner = inner_of(comm)
        self._comm = comm
        super().__init__(device, **options)

    # Torch's `unscale_` and `step` both come here.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with known_to_all(optimizer):
            reduce: Any = getattr(optimizer, "reduce_gradients", None)
            if reduce is not None:
                reduce()
            try:
                found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            except Exception as error:
                await_here(self._comm, refused(self._inner, "ShardedGradScaler", error))
            found = found or {found_inf.device: found_inf}  # no gradient is here
            vote = torch.tensor([any(flag.item() for flag in found.values())], dtype=torch.uint8)
            await_here(self._comm, self._inner.all_reduce(vote, "max", out=vote))
            for flag in found.values():
                flag.fill_(vote.item())
            return found
