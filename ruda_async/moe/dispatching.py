"""From tokens to rows in expert order, and from the experts' rows back to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import TensorContractError
from .layout import ExpertLayout
from .routing import Routing
from .selecting import Empty, select

__all__ = ["Assignment", "Dispatch", "assign", "combine", "dispatch", "per_expert"]


class Dispatch(NamedTuple):
    """Rows that are ready to be sent to the experts' owners.

    Attributes:
        rows: ``[tokens*k, …]``, one row per assignment, sorted by expert, within one by token.
        expert_counts: rows of each expert, of all experts.
        send_counts: rows for each rank.
        positions: int64 ``[tokens, k]``: where in `rows` each token's assignments are, by ascending expert.
        weights: ``[tokens, k]`` in the same order.
    """

    rows: Tensor
    expert_counts: tuple[int, ...]
    send_counts: tuple[int, ...]
    positions: Tensor
    weights: Tensor


class Assignment(NamedTuple):
    """Which token goes where; as `Dispatch`, without the rows.

    Attributes:
        source: int64 ``[tokens*k]``, a numpy array: the token of each row.
        expert_counts, send_counts, positions, weights: as there.
    """

    source: npt.NDArray[np.int64]
    expert_counts: tuple[int, ...]
    send_counts: tuple[int, ...]
    positions: Tensor
    weights: Tensor


def dispatch(tokens: Tensor, routing: Routing, layout: ExpertLayout, empty: Empty | None = None) -> Dispatch:
    """Make one row per assignment, in the order of experts. No token is dropped.

    Args:
        tokens: ``[tokens, …]``; rows take its gradient.
        routing: from `route`, or any experts and weights of that form.
        empty: a communicator's ``empty``, for rows that lie where its exchange reads them.

    Raises:
        TensorContractError: `routing` does not fit `tokens` or `layout`.
    """
    assigned = assign(tokens, routing, layout)
    source = torch.from_numpy(assigned.source).to(tokens.device)
    return Dispatch(select(tokens, source, empty), *assigned[1:])


def assign(tokens: Tensor, routing: Routing, layout: ExpertLayout) -> Assignment:
    """The order of rows, and where each token's are; raises as `dispatch`."""
    experts, weights = routing
    fits = experts.dim() == 2 and tokens.dim() >= 1 and len(experts) == len(tokens)
    if not fits or weights.shape != experts.shape:
        raise TensorContractError(
            f"routing of experts {list(experts.shape)} and weights {list(weights.shape)} does not fit tokens "
            f"{list(tokens.shape)}; both are [tokens, k]"
        )
    if experts.is_floating_point() or experts.dtype == torch.bool:
        raise TensorContractError(f"experts are integers, not {experts.dtype}")
    count, k = experts.shape
    # numpy's calls cost a fraction of torch's, and the counts have to come to the host anyway.
    chosen = experts.detach().long().cpu().numpy()
    if int(chosen.view(np.uint64).max(initial=0)) >= layout.experts:  # negative ones are the largest so
        wrong = int(chosen.min()) if chosen.min() < 0 else int(chosen.max())
        raise TensorContractError(f"routing names expert {wrong}; {layout} has 0 to {layout.experts - 1}")
    ascending = chosen.argsort(axis=-1, kind="stable")
    flat = np.sort(chosen, axis=-1).reshape(-1)
    # Assignments, by expert and then by token. Of narrow integers this is a radix sort.
    order = flat.astype(np.min_scalar_type(layout.experts)).argsort(kind="stable")
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    counts = tuple(np.bincount(flat, minlength=layout.experts).tolist())
    sends = tuple(sum(counts[a:b]) for a, b in pairwise(layout.prefix))
    device = weights.device
    return Assignment(
        order // max(k, 1),
        counts,
        sends,
        torch.from_numpy(positions.reshape(count, k)).to(device),
        weights.gather(-1, torch.from_numpy(ascending).to(device)),
    )


def combine(rows: Tensor, dispatched: Dispatch | Assignment, empty: Empty | None = None) -> Tensor:
    """Each token's weighted sum of its rows, added by ascending expert in the weights' dtype (float32).

    Args:
        rows: ``[tokens*k, …]``, the experts' outputs in the order in which `dispatch` made rows.
        empty: a communicator's ``empty``, for memory that is used again from layer to layer.

    Returns:
        ``[tokens, …]`` of the dtype of `rows`, differentiable in rows and weights. Under
        ``no_grad`` a product may be added without having been rounded first, so that last bits differ.
    """
    positions, weights = dispatched.positions, dispatched.weights
    if rows.dim() < 1 or len(rows) != positions.numel():
        raise TensorContractError(
            f"combine takes one row for each of {positions.numel()} assignments, not {list(rows.shape)}"
        )
    count, k = positions.shape
    if _fusable(rows, weights):
        # One pass over the rows, where the operations below make three.
        flat = rows.reshape(len(rows), -1)
        bags = functional.embedding_bag(positions, flat, mode="sum", per_sample_weights=weights)
        return bags.view(count, *rows.shape[1:])
    trailing = (1,) * (rows.dim() - 1)
    total: Tensor | None = None
    for j in range(k):
        part = select(rows, positions[:, j], empty).to(weights.dtype)
        weight = weights[:, j].view(count, *trailing)
        part = part * weight if torch.is_grad_enabled() else part.mul_(weight)  # fresh pages are dear
        total = part if total is None else total.add_(part)
    if total is None:
        return rows.new_zeros((count, *rows.shape[1:]))
    return total.to(rows.dtype)


def _fusable(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch's fused sum will do: it has no second derivative, and no wider type to sum in."""
    wide = rows.dtype in (torch.float32, torch.float64) and rows.dtype == weights.dtype
    return wide and rows.is_cpu and rows.numel() > 0 and not torch.is_grad_enabled()


def per_expert(experts: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    """An `experts_fn` for `moe_layer` from one callable per local expert, such as a `torch.nn.ModuleList`.

    Each is called once a layer, with no rows too, so that all parameters get a gradient.
    """

    def apply(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        if len(counts) != len(experts):
            raise TensorContractError(
                f"per_expert has {len(experts)} experts and this rank owns {len(counts)}; give it those "
                "of layout.local(rank)"
            )
        parts = torch.split(rows, list(counts))
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

    return apply
