"""Parameters that have to be the same on all ranks.

Every rank tells the others its values when they meet. So all of them see who differs, and none finds out by
itself, later, that it cannot talk to the others.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ..errors import ConfigError, ProtocolError

__all__ = ["NotAlikeError", "check_alike", "with_alike", "without_alike"]

_LENGTH = struct.Struct("<H")


class NotAlikeError(ConfigError):
    """A rank has another value of such a parameter."""


def check_alike(said: Mapping[int, str]) -> None:
    """Compare what ranks have told, as `Job.alike` has it.

    Raises:
        NotAlikeError: the first rank that differs from the lowest one, which is the same on every rank.
    """
    first = min(said)
    ours = _pairs(said[first])
    for rank in sorted(said):
        theirs = _pairs(said[rank])
        for name in sorted(ours.keys() & theirs.keys()):  # not every rank need have the same plugins
            if ours[name] != theirs[name]:
                raise NotAlikeError(
                    f"rank {rank} has {name}={theirs[name]} and rank {first} has {name}={ours[name]}; give "
                    "all ranks the same",
                    rank=rank,
                )


def with_alike(text: str, payload: bytes) -> bytes:
    """A payload for a meeting, with `Job.alike` before it."""
    said = text.encode()
    return _LENGTH.pack(len(said)) + said + payload


def without_alike(payload: bytes, rank: int) -> tuple[str, bytes]:
    """What `with_alike` has joined, from the network.

    Raises:
        ProtocolError: it is no such thing.
    """
    try:
        (size,) = _LENGTH.unpack_from(payload)
        end = _LENGTH.size + size
        if end > len(payload):
            raise ValueError
        return payload[_LENGTH.size : end].decode(), payload[end:]
    except (struct.error, ValueError):
        raise ProtocolError(
            f"rank {rank} did not tell its parameters when ranks met; install the same ruda-async on all "
            "ranks",
            rank=rank,
        ) from None


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (pair.partition("=") for pair in text.split("&") if pair)}
