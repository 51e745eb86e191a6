"""How a channel, a sequence number and a lane become the transport's 64-bit tag.

====== ====================== ==========================================================
bits   field                  meaning
====== ====================== ==========================================================
28–63  channel (36 bits)      hash of the channel's path; 0 is the control channel
4–27   sequence (24 bits)     the operation's number on its channel, modulo 2**24
0–3    lane (4 bits)          concurrent message streams of one operation
====== ====================== ==========================================================

Channel numbers are hashes so that `channel(name)` needs no communication. Two live channels of one
communicator that hash alike (chance 1 in 10 million for a hundred of them) are found when the second is
made, on every rank alike, and refused by name.
"""

from __future__ import annotations

import hashlib

__all__ = ["CONTROL_TAG", "LANES", "SEQUENCES", "channel_id", "is_past", "split_tag", "tag_of"]

_SEQUENCE_BITS = 24
_LANE_BITS = 4
#: Sequence numbers wrap here.
SEQUENCES = 1 << _SEQUENCE_BITS
#: Message streams of one operation.
LANES = 1 << _LANE_BITS
_CHANNEL_SHIFT = _SEQUENCE_BITS + _LANE_BITS
#: The tag of the messages by which ranks tell each other of failure.
CONTROL_TAG = 0


def channel_id(parent: int, *path: str | int) -> int:
    """The number of the channel that `path` names below channel `parent`; never 0."""
    text = "\x1f".join((str(parent), *(f"{type(part).__name__}:{part}" for part in path)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> _CHANNEL_SHIFT) or 1


def tag_of(channel: int, sequence: int, lane: int = 0) -> int:
    """The tag of one message stream; `sequence` is taken modulo `SEQUENCES`."""
    return channel << _CHANNEL_SHIFT | (sequence % SEQUENCES) << _LANE_BITS | lane


def split_tag(tag: int) -> tuple[int, int]:
    """The channel and the sequence (modulo `SEQUENCES`) of a tag."""
    return tag >> _CHANNEL_SHIFT, (tag >> _LANE_BITS) % SEQUENCES


def is_past(sequence: int, next: int) -> bool:
    """Whether `sequence` (modulo `SEQUENCES`) lies before `next`, given that they are not far apart."""
    return (sequence - next) % SEQUENCES >= SEQUENCES // 2
