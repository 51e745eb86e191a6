"""From a checked configuration to a linked transport."""

from __future__ import annotations

import errno
from time import monotonic
from typing import TYPE_CHECKING

from .errors import ConfigError, RudaError
from .rendezvous import meet
from .transport.job import Job, Rendezvous
from .transport.parameters import alike_text

if TYPE_CHECKING:
    from .config import Config
    from .transport.base import Transport

__all__ = ["open_transport"]


async def open_transport(config: Config, rendezvous: Rendezvous = meet) -> Transport:
    """Join the job with the configured plugin; its transport, linked to all ranks."""
    job = Job(
        name=config.name,
        rank=config.rank,
        world_size=config.world_size,
        host=config.host,
        port=config.port,
        parameters=config.parameters,
        secret=config.secret,
        deadline=monotonic() + config.timeout,
        timeout=config.timeout,
        ports=config.ports,
        listen_fd=config.listen_fd,
        rendezvous=rendezvous,
        alike=alike_text(config.parameters),
    )
    try:
        transport = await config.plugin.connect(job)
    except OSError as error:
        if isinstance(error, RudaError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(
            f"rank {config.rank} of {config.world_size} has no file descriptor left ({error.strerror}); a "
            "job takes about one for each rank: raise the limit (ulimit -n), or close files"
        ) from None
    if not hasattr(transport, "capabilities"):
        raise TypeError(
            f"connect() of the plugin {config.plugin.scheme!r:.80} returned {type(transport).__name__}, "
            "which is no ruda_async.transport.Transport: it has no capabilities"
        )
    return transport
