"""The asynchronous communicator: identity, life, subgroups and point-to-point over one channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from . import growth
from .channel import Channel
from .collectives.explaining import explanation
from .collectives.operation import Settings
from .collectives.request import Request
from .collectives.split import Split
from .config import Config
from .errors import CommunicatorClosedError, ConfigError
from .node import Node
from .observe.recorder import Stats
from .operations import AsyncOperations
from .recovery import Recovery
from .tags import channel_id
from .tensors import blank
from .transport.base import Transport
from .tuning.numbers import Numbers

__all__ = ["AsyncCommunicator"]

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
        self._p2p = channel.point_to_point
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

    @property
    def node(self) -> Node:
        """This rank's end of the job; for the parts of this library that look inside."""
        return self._node

    def stats(self) -> Stats:
        """Counters of this rank since it connected, over all channels; cheap, and from any thread.

        By operation: calls, failures, bytes, and times with percentiles; by peer: messages and bytes; what is
        in flight, and for how long. See `ruda_async.observe.Stats`.
        """
        return self._node.stats()

    def flight_record(self) -> dict[str, Any]:
        """This rank's last calls and those in flight, as JSON types; see the page on observing a job."""
        return self._node.flight.take("flight_record() was called").render()

    def last_failure(self) -> dict[str, Any] | None:
        """The flight record that the latest timeout or lost rank left in memory, or None."""
        last = self._node.flight.latest()
        return None if last is None else last.render()

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
        """Which algorithm a call of `operation` with `nbytes` bytes per rank would run, and why.

        With it come the estimated times of all algorithms that could, and the costs they are made of.
        """
        return explanation(
            operation,
            nbytes,
            self.world_size,
            self._channel.capabilities,
            self._settings,
            self._channel.natives,
        )

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """A tensor of unknown content that collectives of this communicator read and write fastest.

        Where the ranks share memory it lies there, from 256 KiB on, so that peers read it in place; elsewhere
        it is an ordinary one. It may outlive the communicator. A child process that is forked while it
        lives sees, and changes, the same memory.

        Args:
            shape: the lengths of the axes, or that of the only one.
            dtype: numpy's, or torch's for a torch tensor on the host.

        Raises:
            TensorContractError: the dtype does not travel, or the shape is none.
        """
        adapter, like, lengths, name = blank(shape, dtype)
        heap = self._node.heap
        target = (
            adapter.allocate(like, lengths, name)
            if heap is None
            else heap.allocate(adapter, like, lengths, name)
        )
        return target.finish()

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
        which must have the sent dtype and shape. A receive that raises leaves the message for the next.

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

        It takes its turn behind the receives of the same tag that were called before. A rank that has closed
        its communicator does not end it while others may still send; a rank that is lost ends it, as it ends
        every call that waits.

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

    async def grow(
        self, n: int = 1, *, url: str | None = None, timeout: float | None = None
    ) -> AsyncCommunicator:
        """A communicator of these ranks and `n` new ones, which call ``connect(url, join=True)``.

        Every rank of this communicator has to call it. The ranks of this communicator keep their numbers;
        the new ones follow, in the order in which they came. All ranks make new links, and channels
        start afresh. This communicator stays as it is; both are to be closed.

        Args:
            n: the number of new ranks.
            url: where they come; by default the job's own URL. Rank 0 of this communicator listens there,
                so where its machine is not the one that the job's URL names, it has to be given. What
                other ranks give is not used.
            timeout: seconds for the new ranks to come; to link up may take 15 more.

        Raises:
            TensorContractError: `n` is no number of ranks.
            CollectiveTimeoutError: too few came in time, or did not link up.
            PeerLostError: a new rank died while it joined, or a member did. In each case this
                communicator works as before, where no member died.
            ConfigError: rank 0 cannot listen at the URL.
        """
        return await growth.grow(self, n, url, self._timeout if timeout is None else timeout)

    @classmethod
    async def over(
        cls,
        transport: Transport,
        config: Config,
        home: Config,
        settings: Settings,
        timeout: float,
        *,
        measured: Numbers | None = None,
        within: float,
    ) -> AsyncCommunicator:
        """The communicator of all ranks of a transport, which it owns; for the parts of this library.

        Args:
            config: what the transport was opened with.
            home: what the user gave; it differs where the job has grown.
            settings, timeout: the communicator's.
            measured: on rank 0, the costs to go by instead of the transport's declaration.
            within: seconds for all ranks to agree on them.
        """
        node = Node(transport, config, home)
        try:
            node.start(measured)
            await node.agree(within)
        except BaseException as error:
            node.abort(f"rank {config.rank} could not join: {error}")
            raise
        channel = node.open_channel(channel_id(0, "main"), "main", tuple(range(config.world_size)))
        settings = replace(settings, device_memory=node.device_memory)
        return cls(channel, settings, timeout, Recovery(node), owner=True)

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
