"""Tensor collectives for asyncio over pluggable transports.

    async with ruda_async.connect("tcp://10.0.0.5:29500?rank=0&world_size=2") as comm:
        total = await comm.all_reduce_sum(gradient)

`ruda_async.sync.connect` is the same for blocking code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    AuthenticationError,
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    RudaError,
    TensorContractError,
    TransportUnavailableError,
)
from .traits import (
    AsyncBroadcastTensorCollective,
    AsyncIntegerTensorCollective,
    AsyncReplicatedTensorCollective,
    AsyncTensorCollective,
    AsyncVariableTensorCollective,
    BroadcastTensorCollective,
    IntegerTensorCollective,
    ReplicatedTensorCollective,
    TensorCollective,
    VariableTensorCollective,
    VariableTensorExchange,
)

if TYPE_CHECKING:
    from . import sync
    from .communicator import AsyncCommunicator
    from .connecting import connect
    from .launch import spawn
    from .sync import Communicator

__version__ = "0.1.0"

__all__ = [
    "AsyncBroadcastTensorCollective",
    "AsyncCommunicator",
    "AsyncIntegerTensorCollective",
    "AsyncReplicatedTensorCollective",
    "AsyncTensorCollective",
    "AsyncVariableTensorCollective",
    "AuthenticationError",
    "BroadcastTensorCollective",
    "CollectiveCancelledError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Communicator",
    "CommunicatorClosedError",
    "ConfigError",
    "IntegerTensorCollective",
    "PeerLostError",
    "ProtocolError",
    "ReplicatedTensorCollective",
    "RudaError",
    "TensorCollective",
    "TensorContractError",
    "TransportUnavailableError",
    "VariableTensorCollective",
    "VariableTensorExchange",
    "__version__",
    "connect",
    "spawn",
    "sync",
]

#: Loaded at first use, so that `import ruda_async` stays quick: name → module.
_LAZY = {
    "AsyncCommunicator": "communicator",
    "Communicator": "sync",
    "connect": "connecting",
    "spawn": "launch",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    elif name == "sync":
        value = import_module(".sync", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
