"""Experts sharded over ranks, with gradients.

    layout = moe.ExpertLayout.even(experts=8, world_size=comm.world_size)
    experts = torch.nn.ModuleList(make_expert() for _ in layout.local(comm.rank))
    output = moe.moe_layer(comm, tokens, router(tokens), moe.per_expert(experts), layout, k=2)

``await moe.aio.moe_layer(…)`` is the same over an asynchronous communicator. The parts, `route`, `dispatch`
and `combine`, are there for layers of another make.
"""

from __future__ import annotations

from . import aio
from .blocking import moe_layer
from .dispatching import Dispatch, combine, dispatch, per_expert
from .layer import ExpertsFn
from .layout import ExpertLayout
from .routing import Routing, route
from .single import reference

__all__ = [
    "Dispatch",
    "ExpertLayout",
    "ExpertsFn",
    "Routing",
    "aio",
    "combine",
    "dispatch",
    "moe_layer",
    "per_expert",
    "reference",
    "route",
]
