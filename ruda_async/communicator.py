"""The asynchronous communicator: identity, life, subgroups and point-to-point over one channel."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from .channel import Channel
from .collectives.operation import Settings
from .collectives.request import Request
from .collectives.selector import choose, known_algorithms
from .collectives.split import Split
from .config import Config, resolve
from .errors import CommunicatorClosedError, ConfigError
from .node import Node
from .operations import AsyncOperations
from .point_to_point import PointToPoint
from .recovery import Recovery
from .rendezvous import meet
from .tags import channel_id
from .transport.base import Transport
from .transport.job import Job

__all__ = ["AsyncCommunicator", "connect", "open_transport"]

T = TypeVar("T")
R = TypeVar("R")


class AsyncCommunicator(AsyncOperations):
    """A group of ranks that make collective calls together.

    Made by `connect`, and from another communicator by `channel`, `split`, `bounded` and `shrink`. Satisfies
    every ``Async…`` protocol of `ruda_async.traits`. Calls of one communicator match by call order;
    any number may be in flight.
    """

    def __init__(
        self, channel: Channel, settings: Settings, timeout: float, recovery: Recovery, owner: bool
    ) -> None:
        self._channel = channel
        self._node = channel.node
        self._settings = settings
        self._timeout = timeout
        self._recovery = recovery
        self._owner = owner
        self._shrinks = 0
        self._p2p = PointToPoint(channel)
        #: This rank, ``0 <= rank < world_size``.
        self.rank = channel.rank
        #: The number of ranks of this communicator.
        self.world_size = channel.size

    async def _call(self, request: Request[R], timeout: float | None) -> R:
        return await self._channel.run(request, self._timeout if timeout is None else timeout, self._settings)

    # ------------------------------------------------------------------ facts

    @property
    def autodiff_context(self) -> object | None:
        """None: this communicator's results carry no gradient."""
        return None

    @property
    def name(self) -> str:
        """The channel's name, for people."""
        return self._channel.name

    @property
    def timeout(self) -> float:
        """Seconds that a call may take where it is not told otherwise."""
        return self._timeout

    @property
    def closed(self) -> bool:
        """Whether calls are refused since `close` or `abort` was called here."""
        return self._channel.closed or self._node.closed is not None

    def stats(self) -> dict[str, Any]:
        """Counters of this rank: calls completed, failed and in flight, and per peer messages and bytes."""
        return self._node.stats()

    def describe(self) -> dict[str, Any]:
        """Facts about this communicator for people and logs; no secrets."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "channel": self.name,
            "members": list(self._channel.members),
            "timeout": self._timeout,
            "order": self._settings.order,
            "algorithm": self._settings.algorithm or "by size",
            "max_bytes": self._settings.max_bytes,
            "transport": self._node.transport.describe(),
        }

    def explain(self, operation: str, nbytes: int) -> str:
        """Which algorithm a call of `operation` with `nbytes` bytes per rank would run, and why."""
        choice = choose(
            operation,
            nbytes,
            self.world_size,
            self._node.capabilities,
            self._settings,
            exact=self._settings.order == "exact",
        )
        return (
            f"{operation} of {nbytes} bytes over {self.world_size} ranks: {choice.algorithm}, {choice.reason}"
        )

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.world_size}{state}>"

    # ------------------------------------------------------------------ point to point

    async def send(self, value: Any, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send a tensor to rank `dest`; returns when the tensor may be changed again.

        Small tensors leave at once, large ones when the receiver asks for them.

        Raises:
            TensorContractError, PeerLostError, CollectiveTimeoutError
        """
        await self._p2p.send(value, dest, tag, self._timeout if timeout is None else timeout)

    async def recv(
        self,
        source: int,
        *,
        tag: int = 0,
        like: T | None = None,
        out: T | None = None,
        timeout: float | None = None,
    ) -> T:
        """The next tensor that rank `source` sent with `tag`, of the dtype and shape that were sent.

        Its kind and device are those of `like` (a numpy array by default), or it is written to `out`,
        which must have the sent dtype and shape.

        Raises:
            TensorContractError, PeerLostError, CollectiveTimeoutError
        """
        seconds = self._timeout if timeout is None else timeout
        result: T = await self._p2p.recv(source, tag, like, out, seconds)
        return result

    async def recv_any(
        self, *, tag: int = 0, like: T | None = None, out: T | None = None, timeout: float | None = None
    ) -> tuple[T, int]:
        """The next tensor that any rank sent with `tag`, and that rank; otherwise as `recv`.

        It takes its turn behind the receives of the same tag that were called before. A lost rank does not
        end it while others may still send.

        Raises:
            TensorContractError, PeerLostError, CollectiveTimeoutError
        """
        seconds = self._timeout if timeout is None else timeout
        return await self._p2p.recv_any(tag, like, out, seconds)

    # ------------------------------------------------------------------ other communicators

    def channel(self, name: str) -> AsyncCommunicator:
        """A communicator of the same ranks with its own tag space, made without any communication.

        Ranks that open a channel of the same name share it, whatever the order in which they open
        several; a channel that is open here already is returned with its numbering going on.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a channel's name is a string that is not empty, not {name!r}")
        parent = self._channel
        path = name if parent.name == "main" else f"{parent.name}/{name}"
        return self._derive(
            self._node.open_channel(channel_id(parent.id, "channel", name), path, parent.members)
        )

    async def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> AsyncCommunicator | None:
        """A communicator of the ranks that gave the same `color`, ordered by `key`, then by rank.

        Every rank has to call it. None as color leaves the rank out, and returns None.
        """
        sequence = self._channel.next
        pairs = await self._call(Split(color, key), timeout)
        if color is None:
            return None
        group = sorted((k, r) for r, (c, k) in enumerate(pairs) if c == color)
        members = tuple(self._channel.members[r] for _, r in group)
        id = channel_id(self._channel.id, "split", sequence, color)
        return self._derive(self._node.open_channel(id, f"{self.name}/split{sequence}:{color}", members))

    def subgroup(self, ranks: Sequence[int], name: str) -> AsyncCommunicator:
        """A communicator of the given ranks, in that order, made without any communication.

        Only its members call it, each with the same `ranks` and `name`. As with `channel`, the same name
        and ranks give the same channel again, and different ones never meet.

        Raises:
            ConfigError: `ranks` names a rank twice, one that does not exist, or lacks this one.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a subgroup's name is a string that is not empty, not {name!r}")
        order = tuple(ranks)
        if any(isinstance(r, bool) or not isinstance(r, int) for r in order) or not all(
            0 <= r < self.world_size for r in order
        ):
            raise ConfigError(f"subgroup({list(order)}): there are ranks 0 to {self.world_size - 1}")
        if len(set(order)) != len(order):
            raise ConfigError(f"subgroup({list(order)}) names a rank twice; name each once")
        if self.rank not in order:
            raise ConfigError(
                f"rank {self.rank} is not in subgroup({list(order)}); only its members call subgroup()"
            )
        members = tuple(self._channel.members[r] for r in order)
        id = channel_id(self._channel.id, "subgroup", name, *order)
        return self._derive(self._node.open_channel(id, f"{self.name}/{name}", members))

    def bounded(self, max_bytes: int) -> AsyncCommunicator:
        """This communicator with every message cut to at most `max_bytes` of payload; the same channel.

        Results equal the unbounded ones to the bit. All ranks have to give the same budget.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ConfigError(f"max_bytes is a number of bytes from 1 on, not {max_bytes!r}")
        return self._derive(self._channel, replace(self._settings, max_bytes=max_bytes))

    async def shrink(self, *, timeout: float | None = None) -> AsyncCommunicator:
        """A working communicator of the ranks that are left after some were lost, in the same order.

        Every survivor has to call it, as often as the others. With nobody lost it is a fresh communicator
        of all ranks.

        Raises:
            CollectiveTimeoutError: some survivor did not call it in time.
        """
        if self._node.closed is not None:
            raise self._node.closed
        self._node.check_loop()
        parent = self._channel
        self._shrinks += 1
        id = channel_id(parent.id, "shrink", self._shrinks)
        seconds = self._timeout if timeout is None else timeout
        lost = await self._recovery.agree(parent, id, seconds)
        if self._node.transport.rank in lost:
            raise CommunicatorClosedError(
                f"rank {self.rank} of {self.world_size}: the others hold it for lost; connect again"
            )
        members = tuple(m for m in parent.members if m not in lost)
        return self._derive(
            self._node.open_channel(
                channel_id(id, *sorted(lost)), f"{self.name}/shrunk{self._shrinks}", members
            )
        )

    def _derive(self, channel: Channel, settings: Settings | None = None) -> AsyncCommunicator:
        return AsyncCommunicator(
            channel, settings or self._settings, self._timeout, self._recovery, owner=False
        )

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """End this communicator. Calls in flight fail; twice is harmless; bounded in time.

        On the communicator that `connect` made it says goodbye to the peers and releases everything, for
        all its channels and subgroups too. On a derived one it closes that channel on this rank alone.
        """
        if self._owner:
            await self._node.close()
        else:
            self._channel.close(
                CommunicatorClosedError(f"channel {self.name!r} was closed on rank {self.rank}")
            )

    def abort(self, reason: str = "abort() was called") -> None:
        """Drop every link of this rank at once, without waiting; the peers see a lost peer."""
        self._node.abort(reason)

    async def __aenter__(self) -> AsyncCommunicator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Connecting:
    """What `connect` returns: awaitable, and an asynchronous context manager."""

    def __init__(self, url: str | None, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._communicator: AsyncCommunicator | None = None

    def __await__(self) -> Generator[Any, None, AsyncCommunicator]:
        return _connect(resolve(self._url, **self._options)).__await__()

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
    **options: Any,
) -> _Connecting:
    """Join a job; ``await connect(…)`` or ``async with connect(…) as comm``.

    Args:
        url: ``scheme://[host[:port]][/job]?parameter=value&…``; without one, ``RUDA_URL``, else ``env://``,
            which reads what torchrun, mpiexec or Slurm set.
        rank, world_size: this rank and the number of ranks, where the URL or environment do not say.
        timeout: seconds for joining, and the default for every call; 300 where nothing says otherwise.
        options: `algorithm`, `order`, `secret`, and the transport's own parameters; they win over the URL.

    Raises:
        ConfigError: the URL, a parameter or the set of ranks is wrong.
        CollectiveTimeoutError: some ranks did not come in time; they are in ``.missing``.
        TransportUnavailableError: the transport's package is not installed.
        AuthenticationError: the ranks do not share one secret.
    """
    return _Connecting(url, {"rank": rank, "world_size": world_size, "timeout": timeout, **options})


async def open_transport(config: Config) -> Transport:
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
        rendezvous=meet,
    )
    return await config.plugin.connect(job)


async def _connect(config: Config) -> AsyncCommunicator:
    algorithm = config.settings.algorithm
    if algorithm is not None and algorithm not in known_algorithms():
        raise ConfigError(f"algorithm={algorithm!r} is not known; there are {', '.join(known_algorithms())}")
    node = Node(await open_transport(config), config)
    node.start()
    members = tuple(range(config.world_size))
    channel = node.open_channel(channel_id(0, "main"), "main", members)
    return AsyncCommunicator(channel, config.settings, config.timeout, Recovery(node), owner=True)
