"""`connect`: from a URL to a communicator."""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import growth
from .collectives.selector import known_algorithms
from .communicator import AsyncCommunicator
from .config import Config, resolve
from .errors import ConfigError
from .observe import signals
from .opening import open_transport
from .tuning.store import find_numbers

__all__ = ["connect"]


class _Connecting:
    """What `connect` returns: awaitable, and an asynchronous context manager."""

    def __init__(self, url: str | None, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._communicator: AsyncCommunicator | None = None

    def __await__(self) -> Generator[Any, None, AsyncCommunicator]:
        return _connect(resolve(self._url, **self._options)).__await__()

    if not TYPE_CHECKING:  # type checkers find these mistakes by themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"connect() was not awaited, so there is no {name!r} yet: write `comm = await connect(…)` or "
                "`async with connect(…) as comm`; in code without async, ruda_async.sync.connect(…)"
            )

        def __enter__(self) -> NoReturn:
            raise TypeError(
                "ruda_async.connect() takes `async with`; for a plain `with` there is "
                "ruda_async.sync.connect()"
            )

        def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> AsyncCommunicator:
        self._communicator = await self
        return self._communicator

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._communicator is not None:
            await self._communicator.close()


def connect(
    url: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    join: bool = False,
    **options: Any,
) -> _Connecting:
    """Join a job; ``await connect(…)`` or ``async with connect(…) as comm``.

    Args:
        url: ``scheme://[host[:port]][/job]?parameter=value&…``; without one, ``RUDA_URL``, else ``env://``,
            which reads what torchrun, mpiexec or Slurm set.
        rank, world_size: this rank and the number of ranks, where the URL or environment do not say.
        timeout: seconds for joining, and the default for every call; 300 where nothing says otherwise.
        join: come to a running job, whose members call `AsyncCommunicator.grow`; rank and world size
            follow from that.
        options: `algorithm`, `order`, `tuning`, `secret`, and the transport's own parameters; they win over
            the URL.

    Raises:
        ConfigError: the URL, a parameter or the set of ranks is wrong.
        CollectiveTimeoutError: some ranks did not come in time; they are in ``.missing``.
        TransportUnavailableError: the transport's package is not installed.
        AuthenticationError: the ranks do not share one secret.
    """
    signals.from_environment()
    return _Connecting(
        url, {"rank": rank, "world_size": world_size, "timeout": timeout, "join": join or None, **options}
    )


async def _connect(config: Config) -> AsyncCommunicator:
    algorithm = config.settings.algorithm
    known = (*getattr(config.plugin, "provider_names", ()), *known_algorithms())
    if algorithm is not None and algorithm not in known:
        raise ConfigError(f"algorithm={algorithm!r} is not known; there are {', '.join(known)}")
    if config.join:
        return await growth.join(AsyncCommunicator, config)
    measured = find_numbers(config.tuning, config.scheme) if config.rank == 0 else None
    deadline = monotonic() + config.timeout
    transport = await open_transport(config)
    left = max(deadline - monotonic(), 0.0)
    return await AsyncCommunicator.over(
        transport, config, config, config.settings, config.timeout, measured=measured, within=left
    )
