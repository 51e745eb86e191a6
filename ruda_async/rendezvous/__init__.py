"""How ranks find each other: rank 0 listens, the others dial it, and all learn what each had to say.

Ranks start in any order. A rank proves the job secret (`transport.handshake`), then sends a JOIN record.
Once all are in, rank 0 sends every rank a WELCOME with all payloads, each confirms it, and GO ends the
meeting: until GO nobody has left, so a rank that dies before it frees its place and may be started again.
What comes after the proof, as records (`transport.wire`)::

    JOIN     rank → 0   {protocol, job, rank, world_size, payload}
    WELCOME  0 → rank   {kind: "welcome", session, payloads}
    GO       0 → rank   {kind: "go"}
    REFUSED  0 → rank   {kind: "refused", code, text, ranks}

and two single bytes from rank to 0: ``+`` confirms a WELCOME; ``?`` says that this rank's own time is up and
asks who is missing. Strangers hold nothing up: what has not joined is bounded in number and in time.
"""

from __future__ import annotations

import os

from ..errors import ConfigError
from ..transport.job import Job, Meeting
from .guest import Guest
from .host import Host
from .records import MAX_PAYLOAD, OtherJobError
from .sockets import Address

__all__ = ["MAX_PAYLOAD", "Meeting", "OtherJobError", "exchange", "meet", "visit"]

_MAX_NAME = 1024


async def exchange(job: Job, payload: bytes, address: Address) -> list[bytes]:
    """Give every rank this rank's payload; all payloads, in rank order. See `meet`."""
    return (await meet(job, payload, address)).payloads


async def meet(job: Job, payload: bytes, address: Address) -> Meeting:
    """Meet all ranks of the job at `address` by ``job.deadline``; collective, once on every rank.

    Args:
        payload: up to `MAX_PAYLOAD` bytes for the other ranks.
        address: ``(host, port)``, or the path of a Unix socket (``"\\0name"`` for an abstract one). Rank 0
            listens there, at the first free one of ``job.ports`` where there are any, or at
            ``job.listen_fd``, which is borrowed and stays open, so that the next meeting finds it again.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; ``missing`` names them. A rank that asks rank 0
            who is missing waits up to a second beyond the deadline for the answer.
        ConfigError: ranks disagree on the world size, two have one number, another job meets at this
            address, the address cannot be used, or a network address is used without a secret.
        AuthenticationError: rank 0 has another secret.
        ProtocolError: what answers at the address is not a rank 0 of this version.
        ValueError: the payload is too large.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"rank {job.rank}: a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}"
        )
    _check_name(job)
    if job.world_size == 1:
        return Meeting([payload], os.urandom(16))
    if job.rank:
        try:
            return await visit(job, payload, address)
        except OtherJobError as error:
            raise ConfigError(str(error)) from None
    return await Host(job, payload).meet(address)


async def visit(job: Job, payload: bytes, address: Address) -> Meeting:
    """`meet` for a rank other than 0, which tells `OtherJobError` from other errors."""
    return await Guest(job, payload, address).meet()


def _check_name(job: Job) -> None:
    try:
        size = len(job.name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"the job name {job.name!a} has characters outside Unicode; rename it") from None
    if size > _MAX_NAME:
        raise ConfigError(f"a job name of {size} bytes is over the limit of {_MAX_NAME}; shorten it")
