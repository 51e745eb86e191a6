"""Entering the backend into Ray's registry."""

from __future__ import annotations

from ..errors import TransportUnavailableError
from ..installing import how_to_install

__all__ = ["register"]

NAME = "ruda"


def register() -> None:
    """See `ruda_async.ray.register_backend`."""
    try:
        import ray
    except ImportError:
        raise TransportUnavailableError(
            "the backend 'ruda' of ray.util.collective needs Ray, which is not installed; "
            + how_to_install("ray")
        ) from None
    try:
        # The package first: importing it enters Ray's own backends.
        import ray.util.collective
        from ray.util.collective import backend_registry
    except ImportError:
        raise TransportUnavailableError(
            f"Ray {ray.__version__} has no registry of collective backends "
            "(ray.util.collective.backend_registry); upgrade it, or use ruda_async.ray.connect_actors, which "
            "does without"
        ) from None
    from .backend import RudaGroup

    # Asked in this way, a name that is there is not entered a second time, which Ray refuses.
    if not ray.util.collective.is_backend_available(NAME):
        backend_registry.register_collective_backend(NAME, RudaGroup)
