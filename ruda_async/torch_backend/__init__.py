"""torch.distributed on this library: the backend ``"ruda"``.

    import torch.distributed as dist
    import ruda_async.torch_backend  # registers it

    dist.init_process_group("ruda")  # RUDA_URL, or torch's own store, says where ranks meet

Importing this package registers the backend; with the distribution installed, its entry point of the group
``torch.backends`` does so when torch is imported. What takes time is imported with the first process group.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connecting import Options
    from .process_group import ProcessGroup, monitored_barrier
    from .work import BackendError

__all__ = ["BackendError", "Options", "ProcessGroup", "monitored_barrier", "register"]

#: The backend's name in torch.
NAME = "ruda"

_LAZY = {
    "BackendError": "work",
    "Options": "connecting",
    "ProcessGroup": "process_group",
    "monitored_barrier": "process_group",
}


def register() -> None:
    """Make ``init_process_group("ruda")`` work, and transport URLs as ``init_method``. Harmless twice."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    from torch.distributed.rendezvous import register_rendezvous_handler

    from ..transport.registry import plugins

    for scheme in [NAME, *plugins()]:
        with suppress(RuntimeError):  # torch has a handler for that scheme, which gives us a store
            register_rendezvous_handler(scheme, _meet)  # type: ignore[no-untyped-call]


def _create(group: Any, options: Any) -> Any:
    from .making import create

    return create(group, options)


def _meet(url: str, **arguments: Any) -> Any:
    from .connecting import meet

    return meet(url, **arguments)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


register()
