"""The layer over an asynchronous communicator."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import torch
from torch import Tensor

from ..autograd.aio import plain
from ..autograd.engine import begin, numbered_call, run_async, tracks
from . import layer
from .dispatching import combine
from .layer import ExpertsFn
from .layout import ExpertLayout
from .selecting import select

__all__ = ["moe_layer"]


async def moe_layer(
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
    """As `ruda_async.moe.moe_layer`, awaited, over an `AsyncCommunicator` or its differentiable wrapper.

    `experts_fn` runs on the event loop; it may return an awaitable, and should where it computes for
    long. Requests served at once need a channel each: ``comm.channel(request_id)``. Grad mode is that of
    the call's start throughout, though other tasks may switch it meanwhile (see `autograd.aio`).
    """
    base = plain(comm)
    tracking = torch.is_grad_enabled()
    try:
        assigned, rows, rule = layer.start(base, tokens, logits, layout, k, routing)
    except Exception as error:
        await layer.refuse(base, error)
    needed = tracks(base, rows)
    call = begin(base, rule, rows, timeout)
    path, arrived = await numbered_call(base, rule, rows, timeout)
    try:
        arrival = layer.arrive(arrived, rule, base.rank, layout)
        if needed or arrival.tokens_track:
            arrived = call.finish(path, arrived)
        # What nobody needs any more is let go of at once: the next rows are written to memory still in cache.
        del call, rows
        with torch.set_grad_enabled(tracking):
            rows = select(arrived, arrival.order, base.empty)
            del arrived
            outcome = experts_fn(rows, arrival.counts) if layout.counts[base.rank] else None
        if inspect.isawaitable(outcome):
            outcome = await outcome
        with torch.set_grad_enabled(tracking):
            result = layer.result_rows(outcome, rows, arrival, out_features, base.empty)
        del outcome, rows
    except (Exception, asyncio.CancelledError) as error:  # the others may wait for the way back already
        await layer.refuse(base, error)
    returned = await run_async(base, layer.back(arrival), result, timeout, arrival.any_tracks)
    del result
    with torch.set_grad_enabled(tracking):
        return combine(returned, assigned, base.empty)
