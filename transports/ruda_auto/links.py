"""Joining with several transports by one meeting.

Each transport is told to join as if it were alone, and comes as far as its own meeting. What all of them
want to tell their peers then goes into one meeting of the job, and each hears the answer to its own part,
with the ranks that it is to link up with. One that fails before is done without; one without peers is ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ruda_async.transport import (
    ConfigError,
    Job,
    Meeting,
    Plugin,
    RudaError,
    Transport,
    composable_plugins,
    host_identity,
)

from .plan import Bid, Offer, Plan, decide
from .plugins import part_for, why_not

__all__ = ["open_links"]


class _Party:
    """One transport on its way into the job.

    Attributes:
        said: what it has to tell its peers, once it came that far.
        joining: ends with the linked transport.
    """

    def __init__(self, plugin: Plugin, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self.plugin = plugin
        self.said: asyncio.Future[bytes] = loop.create_future()
        self._heard: asyncio.Future[Meeting] = loop.create_future()
        own = replace(
            job,
            parameters=part_for(plugin.parameters, job.parameters),
            rendezvous=self._meet,
            listen_fd=None,
            alike=None,  # the one meeting sees to it
        )
        self.joining = loop.create_task(_join(plugin, own), name=f"{plugin.scheme} joins {job.name}")

    @property
    def scheme(self) -> str:
        return self.plugin.scheme

    async def _meet(self, job: Job, payload: bytes, address: object) -> Meeting:
        if self.said.done():
            raise RuntimeError(f"{self.scheme}:// meets twice, which one of several transports cannot")
        self.said.set_result(payload)
        return await self._heard

    def tell(self, meeting: Meeting) -> None:
        """Let it link up."""
        self._heard.set_result(meeting)

    async def ready(self) -> Bid:
        """Wait until it has said what its peers need, or failed."""
        await asyncio.wait((self.said, self.joining), return_when=asyncio.FIRST_COMPLETED)
        reach, preference = getattr(self.plugin, "reach", ""), self.plugin.preference
        if self.said.done():
            return Bid(reach, preference, self.said.result())
        try:
            reason = str(self.joining.exception() or "it joins without meeting its peers")
        except asyncio.CancelledError:
            reason = "its set-up was cancelled"
        return Bid(reach, preference, None, reason)

    def failure(self) -> BaseException | None:
        """Why it failed, if it did."""
        return self.joining.exception() if self.joining.done() and not self.joining.cancelled() else None


async def _join(plugin: Plugin, job: Job) -> Transport:
    return await plugin.connect(job)


async def open_links(job: Job) -> tuple[dict[str, Transport], Plan]:
    """The transports that link this rank to others, by scheme, and the plan that they follow.

    Raises:
        ConfigError: some ranks have no transport in common, or ``without=`` names one that there is not.
        RudaError: what `Job.meet` and the transports raise.
    """
    identity = f"{host_identity()} {job.parameters.island}"
    if job.world_size == 1:
        await job.meet(Offer(identity, {}).pack())
        return {}, Plan({}, None, {}, False)
    parties: list[_Party] = []
    try:
        bids = _refusals(job)
        parties += [_Party(plugin, job) for plugin in composable_plugins() if plugin.scheme not in bids]
        for party in parties:
            bids[party.scheme] = await party.ready()
        _see_to_a_network(job, parties, bids)
        meeting = await job.meet(Offer(identity, bids).pack())
        offers = [Offer.unpack(data, rank) for rank, data in enumerate(meeting.payloads)]
        plan = decide(job.rank, offers)
        links = await _link(parties, plan, meeting, offers)
    except BaseException:
        await _end(parties)
        raise
    return links, plan


def _refusals(job: Job) -> dict[str, Bid]:
    """The transports that this rank does without from the start."""
    named = {scheme.strip() for scheme in job.parameters.without.split(",")} - {""}
    known = composable_plugins()
    unknown = named - {plugin.scheme for plugin in known}
    if unknown:
        raise ConfigError(
            f"rank {job.rank}: without={job.parameters.without!r:.80} names no transport in "
            f"{', '.join(map(repr, sorted(unknown))):.80}; there are "
            + ", ".join(plugin.scheme for plugin in known)
        )
    reasons = {p.scheme: "without= names it" if p.scheme in named else why_not(p) for p in known}
    return {
        plugin.scheme: Bid(getattr(plugin, "reach", ""), plugin.preference, None, reason)
        for plugin in known
        if (reason := reasons[plugin.scheme]) is not None
    }


def _see_to_a_network(job: Job, parties: Iterable[_Party], bids: Mapping[str, Bid]) -> None:
    """Where every transport over a network failed here, say so now: to wait for others would not help.

    Raises:
        RudaError: the failure of one of them.
    """
    network = [party for party in parties if bids[party.scheme].reach == "network"]
    if network and all(bids[party.scheme].payload is None for party in network):
        failure = max(network, key=lambda party: party.plugin.preference).failure()
        if isinstance(failure, RudaError):
            raise failure
        reasons = "; ".join(f"{party.scheme}: {bids[party.scheme].reason}" for party in network)
        raise ConfigError(f"rank {job.rank} can set up no transport over a network ({reasons})")


async def _link(
    parties: Iterable[_Party], plan: Plan, meeting: Meeting, offers: list[Offer]
) -> dict[str, Transport]:
    """Let each transport link up with its peers, and wait for all; the first failure ends the others."""
    linking: dict[str, asyncio.Task[Transport]] = {}
    idle: list[_Party] = []
    for party in parties:
        scheme = party.scheme
        linked = frozenset(peer for peer, route in plan.routes.items() if route == scheme)
        if not linked:
            idle.append(party)
            continue
        payloads = [(bid.payload or b"") if (bid := o.bids.get(scheme)) else b"" for o in offers]
        # Proofs of the secret for one transport are worth nothing to another.
        session = hashlib.blake2b(meeting.session + scheme.encode(), digest_size=16).digest()
        party.tell(Meeting(payloads, session, linked))
        linking[scheme] = party.joining
    await _end(idle)
    await asyncio.wait(linking.values(), return_when=asyncio.FIRST_EXCEPTION)
    for task in linking.values():
        if task.done():
            task.result()  # raises the failure of the first that has one
    return {scheme: task.result() for scheme, task in linking.items()}


async def _end(parties: Iterable[_Party]) -> None:
    """End what is still joining, and drop what has joined."""
    tasks = [party.joining for party in parties]
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            outcome.abort("another transport of this rank could not join")
