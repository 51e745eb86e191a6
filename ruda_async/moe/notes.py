"""What each rank tells the owners of experts, in the same exchange as their rows.

In front of each block of rows are as many more as it takes to hold, as bytes, which layout the sender has,
how many rows follow for each of the owner's experts, and whether the sender tracks gradients. So that costs
no exchange of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from struct import Struct, pack
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import TensorContractError
from .dispatching import Assignment
from .layout import ExpertLayout
from .selecting import Empty, select

__all__ = ["GRAD_MODE", "TOKENS", "notes_for", "read_notes", "with_notes"]

#: Flags: the sender's tokens need a gradient; it has grad mode on.
TOKENS, GRAD_MODE = 1, 2
_WIDTH = 8


def notes_for(layout: ExpertLayout, rank: int, row_bytes: int) -> int:
    """The rows in front of each block for `rank`."""
    return -(-_WIDTH * (layout.counts[rank] + 2) // row_bytes)


def _name(layout: ExpertLayout) -> int:
    return crc32(repr(layout.prefix).encode())


def with_notes(
    tokens: Tensor, assigned: Assignment, layout: ExpertLayout, flags: int, empty: Empty
) -> tuple[Tensor, tuple[int, ...]]:
    """The rows of all assignments, with notes in front of each rank's, and how many rows each rank gets."""
    row_bytes = tokens.element_size() * prod(tokens.shape[1:])
    numbers = [notes_for(layout, rank, row_bytes) for rank in range(layout.world_size)]
    counts = tuple(number + count for number, count in zip(numbers, assigned.send_counts, strict=True))
    index = np.zeros(sum(counts), np.int64)  # row 0 where notes go
    places: list[int] = []
    notes: list[bytes] = []
    at = start = 0
    for rank, (number, count) in enumerate(zip(numbers, assigned.send_counts, strict=True)):
        owned = layout.local(rank)
        told = (_name(layout), *assigned.expert_counts[owned.start : owned.stop], flags)
        notes.append(pack(f"<{len(told)}q", *told).ljust(number * row_bytes, b"\0"))
        places += range(at, at + number)
        at += number
        index[at : at + count] = assigned.source[start : start + count]
        at += count
        start += count
    if len(tokens):
        rows = select(tokens, torch.from_numpy(index).to(tokens.device), empty)
    else:  # there is no row 0 to stand where notes go
        rows = torch.cat([tokens, tokens.new_zeros((at, *tokens.shape[1:]))])
    told_rows = torch.frombuffer(bytearray().join(notes), dtype=torch.uint8).view(tokens.dtype)
    where = torch.from_numpy(np.array(places)).to(rows.device)
    # Not known to autograd: what is written there is no function of the tokens.
    rows.data.index_copy_(0, where, told_rows.view(-1, *tokens.shape[1:]).to(rows.device))
    return rows, counts


def read_notes(
    rows: Tensor, receive_counts: tuple[int, ...], layout: ExpertLayout, rank: int
) -> tuple[npt.NDArray[np.int64], int, int]:
    """What sources told: rows for each expert, ``[sources, experts]``; all flags; notes' rows in each block.

    Raises:
        TensorContractError: a source has another layout.
    """
    row_bytes = rows.element_size() * prod(rows.shape[1:])
    number = notes_for(layout, rank, row_bytes)
    if min(receive_counts) < number:
        raise _different(receive_counts.index(min(receive_counts)), rank, layout)
    starts: Sequence[int] = [0, *accumulate(receive_counts)][:-1]
    data = rows.data
    if not data.is_cpu:  # the notes alone come to the host
        data = torch.cat([data[start : start + number] for start in starts]).cpu()
        starts = range(0, len(data), number)
    raw = data.view(torch.uint8).numpy().reshape(-1).data
    record = Struct(f"<{layout.counts[rank] + 2}q")
    table: list[list[int]] = []
    flags, expected = 0, _name(layout)
    for source, start in enumerate(starts):
        name, *counts, flag = record.unpack_from(raw, start * row_bytes)
        if name != expected or min(counts, default=0) < 0 or sum(counts) + number != receive_counts[source]:
            raise _different(source, rank, layout)
        table.append(counts)
        flags |= flag
    return np.array(table, np.int64), flags, number


def _different(source: int, rank: int, layout: ExpertLayout) -> TensorContractError:
    return TensorContractError(
        f"rank {source} has another layout of experts than rank {rank}, which has {list(layout.counts)} on "
        "the ranks; give all ranks the same"
    )
