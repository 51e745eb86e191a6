"""What ranks tell each other when a call cannot go on, and the errors that come of it.

Notices are small msgpack arrays on the control tag; everything in them is checked, nothing is evaluated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from .collectives.request import Fingerprint, decode_fingerprint
from .errors import (
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    ProtocolError,
    RudaError,
    TensorContractError,
)
from .transport.base import UnexpectedMessage

__all__ = ["MAX_NOTICE", "OF_NODES", "Failure", "decode", "encode", "left_without_a_word", "mismatch"]

#: The longest notice in bytes; longer texts are cut before they are sent.
MAX_NOTICE = 16 * 1024
_MAX_TEXT = 2000
#: What the nodes of a job tell each other: the types of the fields, by kind.
OF_NODES: dict[str, tuple[type, ...]] = {
    "fail": (int, int, str, int, str, int, str, str, str),
    "report": (int, int, bytes),
    "lost": (int, str),
    "survivors": (int, int, list, bool),
    "costs": (int, float, float, float, float),
}


class Failure(NamedTuple):
    """Why a call failed.

    Attributes:
        code: ``contract``, ``mismatch``, ``cancelled``, ``timeout``, ``lost``, ``left`` or ``error``.
        culprit: the group rank it is about.
        text: the reason, in the words of the rank that noticed.
        noticed_by: for a mismatch, the group rank that compared.
        field, ours, theirs: for a mismatch, the differing field and its two values.
    """

    code: str
    culprit: int
    text: str
    noticed_by: int = -1
    field: str = ""
    ours: str = ""
    theirs: str = ""

    def as_error(self, context: str, me: int) -> RudaError:
        """The error to raise on group rank `me`; `context` says rank, channel, operation and sequence."""
        rank = self.culprit
        if self.code == "contract":
            return TensorContractError(f"{context}: rank {rank} refused its input: {self.text}", rank=rank)
        if self.code == "mismatch":
            # Every rank is told of the *other* one of the two that differ.
            other = self.noticed_by if rank == me else rank
            ours, theirs = (self.theirs, self.ours) if rank == me else (self.ours, self.theirs)
            return CollectiveMismatchError(
                f"{context}: {self.text}", rank=other, field=self.field, ours=ours, theirs=theirs
            )
        if self.code == "timeout":
            return CollectiveTimeoutError(
                f"{context}: rank {rank} gave up: {self.text}; see that every rank makes this call in time, "
                "or raise timeout=",
                rank=rank,
            )
        if self.code == "lost":
            return lost_in_call(context, self.text, rank)
        if self.code == "left":
            return left_in_call(context, self.text, rank)
        if self.code == "cancelled":
            return CollectiveCancelledError(f"{context}: rank {rank} cancelled it: {self.text}", rank=rank)
        return CollectiveCancelledError(f"{context}: rank {rank} failed in it: {self.text}", rank=rank)


def lost_in_call(context: object, reason: object, rank: int | None) -> PeerLostError:
    """What a call, collective or not, raises that cannot finish because a rank died."""
    return PeerLostError(f"{context}: {_numbered(reason, rank)}; shrink() goes on without it", rank=rank)


def left_in_call(context: object, reason: object, rank: int | None) -> PeerLostError:
    """What a call, collective or not, raises that cannot finish because a rank closed its communicator."""
    return PeerLostError(
        f"{context}: {_numbered(reason, rank)}; see why it made fewer calls, or go on without it by shrink()",
        rank=rank,
        orderly=True,
    )


def _numbered(reason: object, rank: int | None) -> str:
    """`reason`, which names a rank by its number in the job, as a group sees it in which it is `rank`."""
    first, _, rest = str(reason).partition(" ")
    number, _, rest = rest.partition(" ")
    if rank is None or first != "rank" or not number.isdigit() or int(number) == rank:
        return str(reason)
    return f"rank {rank} ({number} of the job) {rest}"


def left_without_a_word(rank: int) -> PeerLostError:
    """The job's rank `rank` gave up in a call and closed its communicator, and its reason was not heard."""
    text = f"rank {rank} gave up in it and has closed its communicator"
    return PeerLostError(text, rank=rank, orderly=True)


def mismatch(me: int, peer: int, error: UnexpectedMessage) -> Failure:
    """Compare what group rank `me` called with what `peer` called."""
    ours, theirs = decode_fingerprint(error.expected_head), decode_fingerprint(error.head)
    if ours is None or theirs is None or ours == theirs:
        text = (
            f"rank {peer} sent {error.nbytes} bytes where rank {me} expected {error.expected_nbytes}; "
            "the ranks do not run the same program"
        )
        return Failure("mismatch", peer, text, me, "bytes", str(error.expected_nbytes), str(error.nbytes))
    field, left, right = _first_difference(ours, theirs)
    text = (
        f"rank {me} called {_call(ours)} but rank {peer} called {_call(theirs)}: "
        f"{field} differs ({left} against {right}); make the same call on every rank"
    )
    return Failure("mismatch", peer, text, me, field, left, right)


def _first_difference(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, str, str]:
    for field in ("operation", "dtype", "shape"):
        left, right = getattr(ours, field), getattr(theirs, field)
        if left != right:
            return field, _value(left), _value(right)
    mine, others = dict(ours.detail), dict(theirs.detail)
    for name in [*mine, *others]:
        if mine.get(name) != others.get(name):
            return name, _value(mine.get(name)), _value(others.get(name))
    return "arguments", _value(ours.detail), _value(theirs.detail)


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)


def _call(print_: Fingerprint) -> str:
    arguments = []
    if print_.dtype:
        shape = "" if print_.shape is None else _value(print_.shape)
        arguments.append(f"{print_.dtype}{shape}")
    arguments += [f"{name}={_value(value)}" for name, value in print_.detail]
    return f"{print_.operation}({', '.join(arguments)})"


def encode(kind: str, *fields: Any) -> bytes:
    """One notice; long texts are cut."""
    packed: bytes = msgpack.packb([kind, *(f[:_MAX_TEXT] if isinstance(f, str) else f for f in fields)])
    return packed


def decode(data: bytes | bytearray, shapes: dict[str, tuple[type, ...]]) -> tuple[str, list[Any]]:
    """Read a notice and check it against the field types of its kind.

    Raises:
        ProtocolError: the bytes are not such a notice.
    """
    try:
        kind, *fields = msgpack.unpackb(
            data, max_str_len=MAX_NOTICE, max_bin_len=MAX_NOTICE, max_array_len=4096, max_map_len=16
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a control message of {len(data)} bytes is not a notice: {error}") from None
    types = shapes.get(kind) if isinstance(kind, str) else None
    if types is None or len(types) != len(fields):
        raise ProtocolError("a control message is of no known kind")
    for field, expected in zip(fields, types, strict=True):
        if type(field) is not expected:
            raise ProtocolError(
                f"a control message of kind {kind!r} has a field of type {type(field).__name__}"
            )
    return kind, fields
