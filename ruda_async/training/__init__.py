"""Data-parallel training: gradients summed while backward still runs, sharded optimizer state, clipping.

    gradients = training.GradientSync(model, comm)
    for batch in batches:
        gradients.backward(loss_of(model, batch))  # averaged over ranks when it returns
        training.clip_grad_norm_(model.parameters(), 1.0, comm)
        optimizer.step()
        optimizer.zero_grad()

or, with a shard of the optimizer's state on each rank and no `GradientSync`:

    optimizer = training.ShardedOptimizer(partial(torch.optim.AdamW, lr=1e-3), model.parameters(), comm)
    loss_of(model, batch).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

Everything here blocks, and takes a `ruda_async.sync.Communicator` or an `AsyncCommunicator`. In an
asynchronous program call it through ``await training.off_loop(function, *args)``, which runs it in a thread
of its own while the event loop stays free.
"""

from __future__ import annotations

from .clipping import NonFiniteGradientError, clip_grad_norm_
from .grad_scaler import ShardedGradScaler
from .gradient_sync import GradientSync
from .lanes import off_loop
from .sharded_optimizer import ShardedOptimizer
from .timeline import BucketTimes, SyncStats

__all__ = [
    "BucketTimes",
    "GradientSync",
    "NonFiniteGradientError",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "SyncStats",
    "clip_grad_norm_",
    "off_loop",
]
