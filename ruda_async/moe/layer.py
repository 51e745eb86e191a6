"""A layer of sharded experts: route, dispatch, exchange, local experts, exchange back, combine.

The scheme is that of GShard (Lepikhin et al. 2020) without capacities: the exchanges are uneven, so no token
is dropped and none is padded, as in MegaBlocks (Gale et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..autograd.engine import keep
from ..autograd.rules import AllToAllV
from ..collectives.refusal import Refusal
from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from .dispatching import Assignment, assign
from .layout import ExpertLayout
from .notes import GRAD_MODE, TOKENS, read_notes, with_notes
from .routing import route
from .selecting import Empty, select

__all__ = ["Arrival", "Departure", "ExpertsFn", "arrive", "back", "refuse", "result_rows", "start"]

#: ``experts_fn(rows, counts)``: rows ``[n, …]`` of this rank's experts, sorted by expert, and how many rows
#: each of them has; returns ``[n, …]``. Under `aio.moe_layer` it may return an awaitable.
ExpertsFn = Callable[[Tensor, tuple[int, ...]], Any]


class Departure(NamedTuple):
    """What this rank sends to the owners of experts.

    Attributes:
        assigned: which token goes where.
        rows: all assignments' rows, with notes; see `notes`.
        rule: their exchange.
    """

    assigned: Assignment
    rows: Tensor
    rule: AllToAllV


class Arrival(NamedTuple):
    """What the owner of experts knows of the rows that came.

    Attributes:
        counts: rows of each local expert.
        send_counts: results for each rank.
        order: where in what came each row is, in the order of experts.
        inverse: from the order of experts to that of arrival: by source, then expert.
        tokens_track, any_tracks: whether on some rank the tokens need a gradient, and whether some rank
            has grad mode on; the same on all ranks.
    """

    counts: tuple[int, ...]
    send_counts: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    tokens_track: bool
    any_tracks: bool


def start(
    comm: AsyncCommunicator, tokens: Tensor, logits: Tensor, layout: ExpertLayout, k: int, options: Any
) -> Departure:
    """Check, route and make the rows."""
    size = comm.world_size
    if layout.world_size != size:
        raise TensorContractError(f"{layout} is for {layout.world_size} ranks; make one for {size}")
    if tokens.dim() < 2 or not tokens.is_floating_point():
        raise TensorContractError(
            f"tokens are floating [tokens, features], not {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if not prod(tokens.shape[1:]):
        raise TensorContractError(f"tokens of shape {list(tokens.shape)} have no features")
    if logits.dim() != 2 or logits.shape[1] != layout.experts or len(logits) != len(tokens):
        raise TensorContractError(
            f"logits of shape {list(logits.shape)} do not fit {len(tokens)} tokens and {layout.experts} "
            f"experts; they are [{len(tokens)}, {layout.experts}]"
        )
    assigned = assign(tokens, route(logits, k, **options), layout)
    tracking = torch.is_grad_enabled()
    flags = (TOKENS if tracking and tokens.requires_grad else 0) | (GRAD_MODE if tracking else 0)
    rows, counts = with_notes(tokens, assigned, layout, flags, comm.empty)
    return Departure(assigned, rows, AllToAllV(counts, "all_to_all_v_float", "dispatch"))


async def refuse(comm: AsyncCommunicator, error: BaseException) -> NoReturn:
    """Raise `error`, and have the other ranks' exchange fail at once rather than wait."""
    await comm._call(Refusal("moe_layer", error), None)
    raise error


def arrive(arrived: Tensor, rule: AllToAllV, rank: int, layout: ExpertLayout) -> Arrival:
    """Read the notes of all ranks.

    Raises:
        TensorContractError: a rank has another layout.
    """
    counts, flags, notes = read_notes(arrived, rule.receive_counts, layout, rank)
    order, inverse = _orders(counts, notes)
    return Arrival(
        tuple(counts.sum(0).tolist()),
        tuple(counts.sum(1).tolist()),
        torch.from_numpy(order).to(arrived.device),
        torch.from_numpy(inverse).to(arrived.device),
        bool(flags & TOKENS),
        bool(flags & GRAD_MODE),
    )


def _orders(counts: npt.NDArray[np.int64], notes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """From arrival to the order of experts and back, from ``[sources, experts]`` counts of rows.

    A source's rows for one expert stay together: each such piece moves as one.
    """
    by_source, by_expert = counts.reshape(-1), counts.T.reshape(-1)
    rows = np.arange(by_source.sum())
    arrives = (by_source.cumsum() - by_source).reshape(counts.shape)  # where each piece starts
    sorted_to = (by_expert.cumsum() - by_expert).reshape(counts.T.shape).T
    shift = arrives - sorted_to
    behind = notes * np.arange(1, len(counts) + 1)[:, None]  # notes in front of each source's rows
    return rows + (shift + behind).T.reshape(-1).repeat(by_expert), rows - shift.reshape(-1).repeat(by_source)


def result_rows(
    outcome: Any, rows: Tensor, arrival: Arrival, out_features: int | None, empty: Empty
) -> Tensor:
    """The experts' outputs in order of arrival, with the exchanged rows kept in their graph.

    Args:
        outcome: what `experts_fn` returned; None on a rank that owns no experts.
        empty: the communicator's.
    """
    if outcome is None:
        width = rows.shape[1:] if out_features is None else (out_features,)
        outcome = rows.new_zeros((0, *width))
    if not isinstance(outcome, Tensor) or outcome.dim() < 1 or len(outcome) != len(rows):
        shape = list(outcome.shape) if isinstance(outcome, Tensor) else type(outcome).__name__
        raise TensorContractError(
            f"experts_fn got {len(rows)} rows and returned {shape}; it returns one row for each"
        )
    result = select(outcome, arrival.inverse, empty)
    # Experts that ignore their rows, or have none, must enter the rows' backward exchange all the same.
    return keep(result, rows) if rows.requires_grad and torch.is_grad_enabled() else result


def back(arrival: Arrival) -> AllToAllV:
    """The inverse exchange."""
    return AllToAllV(arrival.send_counts, "all_to_all_v_float", "combine")
