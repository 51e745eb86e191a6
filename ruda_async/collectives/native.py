"""Calls that a transport's provider runs: their turn, the agreement before them, and their early end.

Native calls of one channel run one at a time, in the order of the calls, since libraries such as MPI match
by order as well. Before each, the ranks agree on the call and on an *epoch*. A call that was given up may
be half done on some rank, for all that others know; so it raises the epoch, and no later call can meet it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Protocol

from ..errors import ProtocolError
from ..transport.provider import NativeCall, NativeGroup, Provider
from .messages import pairwise, scratch
from .selector import choose_provider

if TYPE_CHECKING:
    from ..transport.provider import NativeReducer
    from .operation import Link, Settings

__all__ = ["Native", "Natives"]

_MAX_CHOICES = 1024
#: What ranks tell each other before an exchange of variable lengths: bytes to the receiver, and the epoch.
_NOTICE = Struct(">QQ")
_EPOCH = Struct(">Q")


class Entered(Protocol):
    """What a native call has to know of the operation that it is."""

    head: bytes
    sequence: int
    deadline: float
    settings: Settings

    @property
    def error(self) -> BaseException | None:
        """Why the operation has to end, once something decided that."""
        ...


class Natives:
    """The native side of one channel.

    Attributes:
        providers: the transport's; empty for most.
        members: the job's rank of each group rank.
        epoch: rises with every native call of this channel that ended early.
    """

    __slots__ = ("_channel", "_choices", "_last", "_rank", "epoch", "members", "providers", "used")

    def __init__(
        self, providers: Sequence[Provider], channel: int, rank: int, members: tuple[int, ...], sequence: int
    ) -> None:
        self.providers = tuple(providers) if len(members) > 1 else ()
        self.members = members
        # A channel that is opened again counts on, and so leaves its former life's epochs behind.
        self.epoch = sequence
        self.used: set[Provider] = set()
        self._channel = channel
        self._rank = rank
        self._choices: dict[tuple[NativeCall, bool, str | None, bool], Provider | None] = {}
        self._last: asyncio.Future[None] | None = None

    def take(self, operation: Entered, call: NativeCall, exact: bool) -> Native | None:
        """The turn of `operation`, where a provider runs it.

        To be asked for before the operation first waits, so that turns are in the order of the calls.
        """
        settings = operation.settings
        key = (call, exact, settings.algorithm, settings.max_bytes is None)
        try:
            provider = self._choices[key]
        except KeyError:
            provider = choose_provider(self.providers, call, self.members, settings, exact).provider
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            self._choices[key] = provider
        if provider is None:
            return None
        self.used.add(provider)
        native = Native(self, provider, operation, call, self._last)
        self._last = native.done
        return native

    def group(self, operation: Entered, epoch: int, in_place: bool, owned: bool) -> NativeGroup:
        """What a provider is told of `operation`."""
        return NativeGroup(
            self._rank,
            len(self.members),
            self.members,
            self._channel,
            operation.sequence,
            epoch,
            operation.deadline,
            operation.head,
            in_place,
            owned,
        )

    def close(self) -> None:
        """The channel is closed here."""
        for provider in self.used:
            provider.forget(self._channel)


class Native:
    """One call that a provider runs on this rank."""

    __slots__ = (
        "_agreed",
        "_before",
        "_epoch",
        "_group",
        "_natives",
        "_operation",
        "call",
        "done",
        "provider",
    )

    def __init__(
        self,
        natives: Natives,
        provider: Provider,
        operation: Entered,
        call: NativeCall,
        before: asyncio.Future[None] | None,
    ) -> None:
        self.provider = provider
        self.call = call
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._natives = natives
        self._operation = operation
        self._before = before
        self._group: NativeGroup | None = None
        self._epoch = 0
        self._agreed = False

    async def run(
        self,
        link: Link,
        source: memoryview,
        out: memoryview,
        reducer: NativeReducer | None = None,
        *,
        in_place: bool = False,
        owned: bool = True,
    ) -> None:
        """Wait for this call's turn, let the ranks agree on it, and run it; see `Provider.run`."""
        provider, natives = self.provider, self._natives
        if not self._agreed:
            await self._turn()
            if provider.agrees and self.call.operation != "scatter":
                self._epoch = natives.epoch
            else:
                await self._agree(link)
        if self._operation.error is not None:
            # It came when the agreement was there already, and this coroutine had not gone on yet.
            raise self._operation.error
        self._group = group = natives.group(self._operation, self._epoch, in_place, owned)
        await provider.run(group, self.call, source, out, reducer)

    async def exchange_lengths(self, link: Link, outgoing: Sequence[int], unit: int) -> list[int]:
        """Agree on the call, and tell every rank how many bytes go there; those that come from each.

        Raises:
            ProtocolError: a rank announces what is no whole number of rows of `unit` bytes.
        """
        await self._turn()
        epoch = self._natives.epoch
        notices = [memoryview(_NOTICE.pack(length, epoch)) for length in outgoing]
        answers = [scratch(_NOTICE.size) for _ in outgoing]
        answers[link.rank] = notices[link.rank]
        await pairwise(link, notices, answers)
        lengths = []
        for peer, answer in enumerate(answers):
            length, theirs = _NOTICE.unpack(answer)
            if length % unit:
                raise ProtocolError(
                    f"rank {peer} announced {length} bytes to rank {link.rank}, which is no whole number of "
                    f"rows of {unit} bytes; see that all ranks run the same version",
                    rank=peer,
                )
            lengths.append(length)
            epoch = max(epoch, theirs)
        self._settle(epoch)
        gathers = self.call.operation == "all_gather_v"
        self.call = self.call._replace(
            send_lengths=() if gathers else tuple(outgoing), receive_lengths=tuple(lengths)
        )
        return lengths

    async def _turn(self) -> None:
        before, self._before = self._before, None
        if before is not None and not before.done():
            await asyncio.wait((before,))

    async def _agree(self, link: Link, lane: int = 15) -> None:
        """A dissemination barrier (see `barrier.dissemination`) whose messages carry the largest epoch."""
        rank, size, epoch = link.rank, link.size, self._natives.epoch
        distance = 1
        while distance < size:
            theirs = memoryview(bytearray(_EPOCH.size))
            heard = link.recv_into((rank - distance) % size, theirs, lane=lane)
            told = link.send((rank + distance) % size, memoryview(_EPOCH.pack(epoch)), lane=lane)
            await heard
            await told
            epoch = max(epoch, *_EPOCH.unpack(theirs))
            distance *= 2
        self._settle(epoch)

    def _settle(self, epoch: int) -> None:
        self._epoch = self._natives.epoch = max(epoch, self._natives.epoch)
        self._agreed = True

    def fail(self, error: BaseException, here: bool) -> None:
        """The call ends early on this rank.

        Args:
            error: why.
            here: this rank decided that. Otherwise a peer did, which raises the epoch itself; so if
                nothing has begun here there is nothing to leave behind.
        """
        group = self._group
        if group is not None or here:
            natives = self._natives
            natives.epoch = max(natives.epoch, self._operation.sequence + 1)
        if group is not None:
            self.provider.fail(group, error)

    def end(self) -> None:
        """The call is over: the next one may run, once those before have ended too."""
        before = self._before
        if before is None or before.done():
            self.done.set_result(None)
        else:
            before.add_done_callback(lambda _: self.done.set_result(None))
