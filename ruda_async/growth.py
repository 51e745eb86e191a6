"""Taking new ranks into a running job: what `grow` and ``connect(join=True)`` do.

A transport has a fixed set of ranks, so a job grows by making a new one. Newcomers are let in one by one
(`admission`); then members and newcomers meet as any job does, under a fresh name (and, on a network, at a
fresh port of the lowest member, which holds it open already), and link up, all with all. The members' old
links stay as they were, and carry the agreement on whether it went well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import admission, errors
from .admission import Invitation
from .collectives.movement import agreed
from .collectives.objects import AllGatherObject
from .config import Config, resolve
from .errors import CollectiveTimeoutError, ConfigError, RudaError, TensorContractError
from .notices import Failure
from .opening import open_transport
from .tags import channel_id
from .transport.registry import default_plugin

if TYPE_CHECKING:
    from .collectives.operation import Settings
    from .communicator import AsyncCommunicator
    from .transport.base import Transport

__all__ = ["Grow", "grow", "join"]


class Grow(AllGatherObject):
    """The call by which members agree to take in `count` ranks."""

    __slots__ = ("_count",)

    operation = "grow"

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self._count = count

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the number; see `collectives.request.Request`.

        Raises:
            TensorContractError: it is none from 1 on.
        """
        count = self._count
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise TensorContractError(f"grow: n={count!r} is not a number of ranks from 1 on")
        super().prepare(rank, size, settings)
        return agreed("grow", "", None, settings.algorithm, settings.max_bytes, (("n", count),))


async def grow(comm: AsyncCommunicator, n: int, url: str | None, seconds: float) -> AsyncCommunicator:
    """See `AsyncCommunicator.grow`."""
    _see_that_it_can(comm.node.home, comm.node.capabilities.grows)
    if comm.closed:
        await comm._call(Grow(n), seconds)  # refuses
    # Numbered like the call, so that every member opens the same, and no other growth meets it.
    parent, sequence = comm._channel, comm._channel.next
    id = channel_id(parent.id, "grow", sequence)
    side = comm._derive(comm.node.open_channel(id, f"{comm.name}/grow{sequence}", parent.members))
    # Open on rank 0 from the start, so that it notices when a member cannot go on.
    hold = side.channel("hold")
    try:
        await comm._call(Grow(n), seconds)
        if comm.rank == 0:
            return await _lead(comm, n, url, seconds, side, hold)
        try:
            told = await side.broadcast_object(None, 0, timeout=seconds + admission.LINK_SECONDS)
        except CollectiveTimeoutError as error:
            if error.rank != comm.rank:
                raise  # another rank gave up
            raise CollectiveTimeoutError(
                f"grow: rank 0, which lets new ranks in, did not say within {seconds:g} s, and "
                f"{admission.LINK_SECONDS:g} s more, whether they came; see whether its event loop stands "
                "still",
                rank=comm.rank,
                missing=(0,),
            ) from None
        if "error" in told:
            raise _from_outcome(told)
        with _last_steps():
            await hold.barrier(timeout=admission.LINK_SECONDS)
        invitation = Invitation(**told)._replace(rank=comm.rank)
        return await _meet_all(comm, invitation.apply(comm.node.home), side)
    except BaseException as error:
        # A call that this rank gave up may have ended well elsewhere, just before. Whoever goes on waits for
        # this rank in what follows. (What other ranks gave up, they tell of themselves.)
        if not isinstance(error, RudaError) or error.rank == comm.rank:
            for channel in (side, hold):
                _give_up(channel, error)
        raise
    finally:
        await hold.close()
        await side.close()


async def _lead(
    comm: AsyncCommunicator,
    n: int,
    url: str | None,
    seconds: float,
    side: AsyncCommunicator,
    hold: AsyncCommunicator,
) -> AsyncCommunicator:
    """Rank 0: let newcomers in, tell everyone where to meet, and meet."""
    home = comm.node.home
    links: list[Transport] = []
    listener = None
    holding = asyncio.ensure_future(hold.barrier(timeout=seconds + 2 * admission.LINK_SECONDS))
    try:
        try:
            home = home if url is None else _elsewhere(home, url)
            links = await admission.admit(home, n, seconds, holding)
            name, listener = await admission.listen(home)
        except RudaError as error:
            if not holding.done():  # else the members know
                await side.broadcast_object(_as_outcome(error), 0)
            raise
        port = None if listener is None else listener.getsockname()[1]
        invitation = Invitation(name, 0, comm.world_size + n, home.host, port)
        await side.broadcast_object(invitation._asdict(), 0)
        with _last_steps():
            await holding
        await admission.invite(links, comm.world_size, invitation)
        links = []
        descriptor = None if listener is None else listener.fileno()
        return await _meet_all(comm, invitation.apply(home, descriptor), side)
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        for link in links:
            link.abort("grow() failed")
        if listener is not None:
            listener.close()


def _see_that_it_can(home: Config, grows: bool) -> None:
    """Refuse where another engine places the ranks: alike on all of them, so nobody waits.

    Raises:
        ConfigError
    """
    if not grows:
        other = default_plugin(network=True).example
        raise ConfigError(
            f"{home.scheme}:// takes in no new ranks, since another engine places and numbers them; for "
            f"grow() and connect(join=True) take another transport, such as {other}"
        )


def _elsewhere(home: Config, url: str) -> Config:
    """`home` with the place that `url` names."""
    place = resolve(url, rank=0, world_size=2, secret=home.secret)
    return replace(home, host=place.host, port=place.port, ports=(), name=place.name, listen_fd=None)


def _give_up(channel: AsyncCommunicator, error: BaseException) -> None:
    """Fail the next call of a channel on all ranks, in place of making it."""
    code = "timeout" if isinstance(error, CollectiveTimeoutError) else "cancelled"
    why = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"failed: {error}"
    failure = Failure(code, channel.rank, f"its grow() {why}")
    channel.node.announce(channel._channel, channel._channel.next, failure)


async def _meet_all(comm: AsyncCommunicator, grown: Config, side: AsyncCommunicator) -> AsyncCommunicator:
    """Meet the new ranks; the members agree on whether all of them succeeded."""
    found: AsyncCommunicator | None = None
    failure: RudaError | None = None
    settings = replace(comm._settings, max_bytes=None)
    try:
        try:
            found = await _meet(type(comm), grown, comm.node.home, settings, comm.timeout)
        except RudaError as error:
            failure = error
        told = None if failure is None else _as_outcome(failure)
        with _last_steps(3):
            outcomes = await side.all_gather_object(told, timeout=3 * admission.LINK_SECONDS)
        bad = next((rank for rank, outcome in enumerate(outcomes) if outcome is not None), None)
        if failure is None and bad is not None:
            failure = _from_outcome(outcomes[bad])
        if failure is not None:
            raise failure
    except BaseException:
        if found is not None:
            await found.close()
        raise
    assert found is not None
    return found


async def join(kind: type[AsyncCommunicator], config: Config) -> AsyncCommunicator:
    """Come to a running job; the errors are those of `admission.knock` and `open_transport`."""
    _see_that_it_can(config, config.plugin.rank_per != "engine")
    grown = await admission.knock(config)
    return await _meet(kind, grown, config, config.settings, config.timeout)


async def _meet(
    kind: type[AsyncCommunicator], grown: Config, home: Config, settings: Settings, timeout: float
) -> AsyncCommunicator:
    """Meet the others of a grown job, and see that all are linked."""
    with _last_steps():
        transport = await open_transport(grown)
        within = admission.LINK_SECONDS
        communicator = await kind.over(transport, grown, home, settings, timeout, within=within)
    try:
        linked = communicator.channel("grown")
        with _last_steps():
            await linked.barrier(timeout=admission.LINK_SECONDS)
        await linked.close()
    except BaseException:
        communicator.abort("the grown job did not come about")
        await communicator.close()
        raise
    return communicator


@contextmanager
def _last_steps(times: int = 1) -> Iterator[None]:
    """Around steps that have `times` `LINK_SECONDS`, whatever the caller's timeout: what to do then.

    Raises:
        CollectiveTimeoutError
    """
    try:
        yield
    except CollectiveTimeoutError as error:
        ranks = ", ".join(map(str, error.missing))
        who = f"rank{'s' if error.missing[1:] else ''} {ranks} of the grown job" if ranks else "some rank"
        raise CollectiveTimeoutError(
            f"grow: all new ranks had come, and then {who} did not link up within "
            f"{times * admission.LINK_SECONDS:g} s; see whether it died or stands still, and call grow() and "
            f"connect(join=True) again{f' ({error.seen})' if error.seen else ''}",
            rank=error.rank,
            missing=error.missing,
            seen=error.seen,
        ) from None


def _as_outcome(error: RudaError) -> dict[str, Any]:
    """What a member tells the others of its failure."""
    return {"error": type(error).__name__, "text": str(error), "rank": error.rank}


def _from_outcome(outcome: dict[str, Any]) -> RudaError:
    """The error that another member told of."""
    kind = getattr(errors, str(outcome.get("error")), RudaError)
    if not (isinstance(kind, type) and issubclass(kind, RudaError)):
        kind = RudaError
    rank = outcome.get("rank")
    return kind(str(outcome.get("text")), rank=rank if type(rank) is int else None)
