"""What each rank tells the owners of experts, in the same exchange as their rows.

In front of each block of rows are as many more as it takes to hold, as bytes, which layout the sender has,
how many rows follow for each of the owner's experts, and whether the sender tracks gradients. So that costs
no exchange of its own.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from struct import pack
from zlib import crc32

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
    index: list[Tensor] = []
    places: list[int] = []
    notes: list[bytes] = []
    counts: list[int] = []
    at = start = 0
    for rank, count in enumerate(assigned.send_counts):
        number = notes_for(layout, rank, row_bytes)
        owned = layout.local(rank)
        told = (_name(layout), *assigned.expert_counts[owned.start : owned.stop], flags)
        notes.append(pack(f"<{len(told)}q", *told).ljust(number * row_bytes, b"\0"))
        index += [assigned.source.new_zeros(number), assigned.source[start : start + count]]
        places += range(at, at + number)
        start += count
        at += number + count
        counts.append(number + count)
    if len(tokens):
        rows = select(tokens, torch.cat(index), empty)
    else:  # there is no row 0 to stand where notes go
        rows = torch.cat([tokens, tokens.new_zeros((at, *tokens.shape[1:]))])
    told_rows = torch.frombuffer(bytearray().join(notes), dtype=torch.uint8).view(tokens.dtype)
    where = torch.tensor(places, device=rows.device)
    # Not known to autograd: what is written there is no function of the tokens.
    rows.data.index_copy_(0, where, told_rows.view(-1, *tokens.shape[1:]).to(rows.device))
    return rows, tuple(counts)


def read_notes(
    rows: Tensor, receive_counts: tuple[int, ...], layout: ExpertLayout, rank: int
) -> tuple[Tensor, Tensor, int]:
    """What sources told: rows for each expert, int64 ``[sources, experts]``; flags; and notes' rows in each.

    Raises:
        TensorContractError: a source has another layout.
    """
    row_bytes = rows.element_size() * prod(rows.shape[1:])
    number = notes_for(layout, rank, row_bytes)
    starts = [0, *accumulate(receive_counts)][:-1]
    if min(receive_counts) < number:
        raise _different(receive_counts.index(min(receive_counts)), rank, layout)
    places = torch.tensor([start + i for start in starts for i in range(number)], device=rows.device)
    raw = rows.data.index_select(0, places).cpu().reshape(len(starts), -1).view(torch.uint8)
    table = raw[:, : _WIDTH * (layout.counts[rank] + 2)].contiguous().view(torch.int64)
    counts = table[:, 1:-1]
    fits = (table[:, 0] == _name(layout)) & (counts >= 0).all(1)
    fits &= counts.sum(1) + number == torch.tensor(receive_counts)
    if not fits.all():
        raise _different(fits.tolist().index(False), rank, layout)
    return counts, table[:, -1], number


def _different(source: int, rank: int, layout: ExpertLayout) -> TensorContractError:
    return TensorContractError(
        f"rank {source} has another layout of experts than rank {rank}, which has {list(layout.counts)} on "
        "the ranks; give all ranks the same"
    )
