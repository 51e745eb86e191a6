"""Which experts a token goes to, and with which weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TensorContractError

__all__ = ["Routing", "route"]

_METHODS = ("softmax", "grouped_sigmoid")


class Routing(NamedTuple):
    """The router's choice.

    Attributes:
        experts: int64 ``[tokens, k]``, the chosen experts of each token, all different.
        weights: float32 ``[tokens, k]`` (float64 for float64 logits), differentiable in the logits.
    """

    experts: Tensor
    weights: Tensor


def route(
    logits: Tensor,
    k: int,
    *,
    method: str = "softmax",
    bias: Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose `k` experts for each token. Among equal scores the lower expert wins, on every machine.

    ``"softmax"``: the `k` largest probabilities (Shazeer et al. 2017; Fedus et al. 2021; normalised over the
    chosen as in Mixtral, Jiang et al. 2024). ``"grouped_sigmoid"``: sigmoid scores; a group scores the sum of
    its two best; the `k` best experts of the `top_groups` best groups (DeepSeek-V3, 2024, section 2.1.2).

    Args:
        logits: floating ``[tokens, experts]``; computed in float32 at least.
        k: experts per token, ``1 <= k <= experts``.
        bias: ``[experts]``, added to the scores for the choice alone, not for the weights, and without a
            gradient: balances the load without an auxiliary loss. ``"grouped_sigmoid"`` only.
        groups, top_groups: for ``"grouped_sigmoid"``: into how many equal groups the experts fall, in
            order, and how many of them may be chosen from; one group by default.
        normalize: divide the chosen weights by their sum.
        scale: multiplies the weights.

    Raises:
        TensorContractError: an argument is out of range; the text names it.
    """
    experts = _check(logits, k, method)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if method == "softmax":
        if bias is not None or groups is not None or top_groups is not None:
            raise TensorContractError(
                'bias, groups and top_groups belong to method="grouped_sigmoid"; leave them out for "softmax"'
            )
        scores = scores.softmax(-1)
        selection = scores.detach()
    else:
        scores = scores.sigmoid()
        selection = _biased(scores.detach(), bias, experts)
        selection = _within_groups(selection, k, groups, top_groups)
    chosen = selection.argsort(dim=-1, descending=True, stable=True)[:, :k]
    weights = scores.gather(-1, chosen)
    if normalize:
        # Sigmoids may all be 0 in float32; their weights are then 0, not NaN.
        tiny = torch.finfo(weights.dtype).tiny
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(tiny)
    return Routing(chosen, weights if scale == 1.0 else weights * scale)


def _check(logits: Tensor, k: int, method: str) -> int:
    if method not in _METHODS:
        raise TensorContractError(f"method={method!r} is not known; there are {', '.join(_METHODS)}")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise TensorContractError(
            f"logits are floating [tokens, experts], not {logits.dtype} of shape {list(logits.shape)}"
        )
    experts = logits.shape[1]
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= experts:
        raise TensorContractError(f"k={k!r} experts per token of {experts} experts; choose 1 to {experts}")
    return experts


def _biased(scores: Tensor, bias: Tensor | None, experts: int) -> Tensor:
    if bias is None:
        return scores
    if bias.shape != (experts,):
        raise TensorContractError(f"bias has shape {list(bias.shape)}, not one number an expert, [{experts}]")
    return scores + bias.detach().to(scores.dtype)


def _within_groups(selection: Tensor, k: int, groups: int | None, top_groups: int | None) -> Tensor:
    """`selection` with the experts outside the best groups at minus infinity."""
    if groups is None and top_groups is None:
        return selection
    tokens, experts = selection.shape
    groups = 1 if groups is None else groups
    top_groups = groups if top_groups is None else top_groups
    if groups < 1 or experts % groups:
        raise TensorContractError(f"groups={groups} does not divide {experts} experts; choose a divisor")
    size = experts // groups
    if not 1 <= top_groups <= groups or top_groups * size < k:
        raise TensorContractError(
            f"top_groups={top_groups} of {groups} groups of {size} experts cannot give k={k} experts; choose "
            f"from {-(-k // size)} to {groups}"
        )
    grouped = selection.view(tokens, groups, size)
    best = grouped.topk(min(2, size), -1).values.sum(-1)
    kept = best.argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).view(tokens, experts)
