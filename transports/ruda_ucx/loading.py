"""Loading ucxx and turning URL parameters into UCX's configuration."""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, Any

from ruda_async.transport import MAX_HEAD, ConfigError, TransportUnavailableError, wire

if TYPE_CHECKING:
    from . import UcxParameters

__all__ = ["configuration", "load", "open_context"]

_lock = threading.Lock()


def load() -> Any:
    """ucxx's low-level module. Takes most of a second the first time, so not to be called on a loop.

    Importing ucxx sets variables in the process environment, which would change how every other user of
    UCX in this process and its children behaves: they are put back as they were.

    Raises:
        TransportUnavailableError: it is installed, but does not load.
    """
    with _lock:
        before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        try:
            return importlib.import_module("ucxx._lib.libucxx")
        except (ImportError, OSError) as error:
            raise TransportUnavailableError(
                f"ucx:// cannot load ucxx: {error}; reinstall it: pip install --force-reinstall ucxx-cu12"
            ) from error
        finally:
            for name in [name for name in os.environ if name.startswith("UCX_")]:
                if name not in before:
                    del os.environ[name]
            os.environ.update(before)


def configuration(parameters: UcxParameters) -> dict[str, str]:
    """UCX's settings by name; what the URL leaves open is left to UCX and its own environment variables."""
    # Small messages with their envelope are to leave at once, as UCX's eager messages.
    small = parameters.eager_bytes + wire.PREFIX_BYTES + MAX_HEAD
    settings = {
        "TLS": parameters.tls,
        "NET_DEVICES": parameters.net_devices,
        "RNDV_SCHEME": parameters.rndv_scheme,
        "RNDV_THRESH": parameters.rndv_thresh or str(small + 1),
    }
    if parameters.error_handling:
        # Shared memory has to say that it can, else UCX takes TCP on one host too.
        settings |= {"POSIX_ERROR_HANDLING": "y", "SYSV_ERROR_HANDLING": "y"}
    return {name: value for name, value in settings.items() if value}


def open_context(api: Any, parameters: UcxParameters) -> Any:
    """A UCX context with the URL's settings.

    Raises:
        ConfigError: UCX takes one of them not.
    """
    settings = configuration(parameters)
    try:
        return api.UCXContext(settings, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))
    except api_error(api) as error:
        names = ("tls", "net_devices", "rndv_scheme", "rndv_thresh")
        given = ", ".join(f"{name}={value}" for name in names if (value := getattr(parameters, name)))
        raise ConfigError(
            f"UCX cannot be set up with {given or 'its defaults'}: {error}; "
            "see `ucx_info -d` for what this machine has"
        ) from None


def api_error(api: Any) -> tuple[type[Exception], ...]:
    """What ucxx raises."""
    return (api.UCXError, RuntimeError, ValueError)
