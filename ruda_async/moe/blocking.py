"""The layer over a blocking communicator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..autograd.compiling import eager
from ..autograd.engine import begin, numbered_call, run_on, tracks
from ..autograd.functions import plain
from ..autograd.recomputing import made_again
from ..sync import Communicator
from . import layer
from .dispatching import combine
from .layer import ExpertsFn
from .layout import ExpertLayout
from .selecting import select

__all__ = ["moe_layer"]


@eager
def moe_layer(
    comm: Any,
    tokens: Tensor,
    logits: Tensor,
    experts_fn: ExpertsFn,
    layout: ExpertLayout,
    k: int,
    *,
    out_features: int | None = None,
    timeout: float | None = None,
    **routing: Any,
) -> Tensor:
    """Run each token through its `k` experts, wherever they are, and sum their outputs by weight.

    Every rank calls it, with no tokens too. Two exchanges: rows, and outputs. Gradients reach
    tokens, logits and the experts' parameters; with grad mode on in any rank, the output requires a gradient
    on all, and all must enter its backward.

    Args:
        comm: a `ruda_async.sync.Communicator` or its differentiable wrapper.
        tokens: floating ``[tokens, features]``; any number on each rank, equal features and dtype.
        logits: floating ``[tokens, experts]``, of all experts.
        experts_fn: ``experts_fn(rows, counts)`` computes this rank's experts: rows ``[n, features]`` sorted
            by expert, within one by source rank and token, and the number of rows of each local expert.
            Returns ``[n, out]``. Called with no rows too, but not on a rank that owns no experts. See
            `per_expert`.
        layout: who owns which experts; the same on all ranks.
        k: experts per token.
        out_features: the outputs' width where it is not that of the tokens, for ranks without experts.
        timeout: seconds for each exchange, forward and backward.
        routing: `method`, `bias`, `groups`, `top_groups`, `normalize` and `scale` of `route`.

    Returns:
        ``[tokens, out]`` of the dtype of the experts' outputs; sums in float32 by ascending expert.

    Raises:
        TensorContractError: an argument is wrong, here or on the rank in ``.rank``.
        RudaError: `experts_fn` failed on another rank; or as collectives do.
    """
    base = plain(comm)
    with made_again(base) as here:
        return _layer(base, here, tokens, logits, experts_fn, layout, k, out_features, timeout, routing)


def _layer(
    comm: Communicator,
    here: Communicator,
    tokens: Tensor,
    logits: Tensor,
    experts_fn: ExpertsFn,
    layout: ExpertLayout,
    k: int,
    out_features: int | None,
    timeout: float | None,
    routing: dict[str, Any],
) -> Tensor:
    """As `moe_layer`, with its exchanges on the channel `here` of `comm`."""
    inner = here._inner
    try:
        assigned, rows, rule = layer.start(inner, tokens, logits, layout, k, routing)
    except Exception as error:
        here._wait(layer.refuse(inner, error))
    needed = tracks(comm._inner, rows)
    call = begin(here, rule, rows, timeout)
    path, arrived = here._wait(numbered_call(inner, rule, rows, timeout))
    try:
        arrival = layer.arrive(arrived, rule, inner.rank, layout)
        if needed or arrival.tokens_track:
            arrived = call.finish(path, arrived)
        # What nobody needs any more is let go of at once: the next rows are written to memory still in cache.
        del call, rows
        rows = select(arrived, arrival.order, inner.empty)
        del arrived
        outcome = experts_fn(rows, arrival.counts) if layout.counts[inner.rank] else None
        result = layer.result_rows(outcome, rows, arrival, out_features, inner.empty)
        del outcome, rows
    except Exception as error:
        here._wait(layer.refuse(inner, error))
    tracked = tracks(comm._inner, result, arrival.any_tracks)
    returned = run_on(here, layer.back(arrival), result, timeout, tracked)
    del result
    return combine(returned, assigned, inner.empty)
