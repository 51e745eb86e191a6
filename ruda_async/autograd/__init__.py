"""Collectives in torch's autograd graph.

    from ruda_async import autograd, sync

    comm = sync.connect()
    weights = autograd.all_gather(comm, shard)
    loss = model(weights, batch)
    loss.backward()  # the gradient of `shard` is the reduce-scattered sum over ranks

The functions here block and take a `ruda_async.sync.Communicator`; their awaitable twins are in
`ruda_async.autograd.aio` and take an `AsyncCommunicator`, with ``await autograd.backward(loss)``.

* Every rank has to enter the backward of a collective that one rank enters. Where a loss may skip one, bind
  a `CollectiveScope`.
* Within one backward pass, calls that were in flight together forward may come in any order on each rank.
  Passes that are run at once, in threads or tasks, may do so in any order too; one after the other, they wait
  for each other like any blocking calls.
* The n-th backward of a node (``retain_graph=True``) meets the n-th backward of that node on other ranks.
* With `torch.utils.checkpoint`, recomputation repeats the forward collectives during backward: ranks have to
  recompute their checkpointed parts in the same order, and no other thread may use that communicator
  meanwhile. Use ``use_reentrant=False`` together with a scope.
* Under `torch.compile` the blocking functions (not the tensor-parallel regions, nor what a `CollectiveScope`
  records, nor ``coordinated=True``) stay in the graph, also with ``fullgraph=True``; the others break it.
  `torch.func` transforms are refused.
* With ``torch.autograd.grad(…, inputs)`` or ``backward(inputs=…)`` torch runs only nodes on a way to the
  inputs, so the inputs must be alike on all ranks.
"""

from __future__ import annotations

from . import aio
from .adapters import AsyncDifferentiableCommunicator, DifferentiableCommunicator, differentiable
from .functions import (
    all_gather,
    all_gather_dim,
    all_reduce_mean,
    all_reduce_sum,
    all_to_all_dim,
    all_to_all_v,
    broadcast,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_dim,
    reduce_scatter_mean,
    reduce_scatter_sum,
    scatter_to,
)
from .passes import abandon_on_error, backward
from .scope import CollectiveScope, complete_scopes, complete_scopes_async
from .waiting import BlockedLoopError

__all__ = [
    "AsyncDifferentiableCommunicator",
    "BlockedLoopError",
    "CollectiveScope",
    "DifferentiableCommunicator",
    "abandon_on_error",
    "aio",
    "all_gather",
    "all_gather_dim",
    "all_reduce_mean",
    "all_reduce_sum",
    "all_to_all_dim",
    "all_to_all_v",
    "backward",
    "broadcast",
    "complete_scopes",
    "complete_scopes_async",
    "copy_to",
    "differentiable",
    "gather_from",
    "reduce_from",
    "reduce_scatter_dim",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_to",
]
