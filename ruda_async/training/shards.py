"""Parameters laid end to end, so that each rank can own an equal part of them.

The layout is that of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020): parts are cut by elements, whatever parameter they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Flat", "Piece", "flatten"]


class Piece(NamedTuple):
    """This rank's part of one parameter.

    Attributes:
        number: the parameter's among all of the optimizer's.
        start, stop: the elements of the flattened parameter that are this rank's.
        offset: where they begin in this rank's shard.
        part: a one-dimensional parameter of its own, whose memory is the whole parameter's.
    """

    number: int
    start: int
    stop: int
    offset: int
    part: Parameter


class Flat:
    """The parameters of one group, dtype and device, end to end, padded to a multiple of the world size.

    Making one moves the parameters' data into its memory.

    Attributes:
        indices, parameters: the parameters and their numbers.
        length: elements of one rank's shard.
        whole: ``[world_size * length]``, the parameters' own memory.
        pieces: of this rank.
    """

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Parameter], rank: int, world_size: int
    ) -> None:
        first = parameters[0]
        self.indices = list(indices)
        self.parameters = list(parameters)
        total = sum(p.numel() for p in parameters)
        self.length = -(-total // world_size)
        size = self.length * world_size
        self.whole = torch.zeros(size, dtype=first.dtype, device=first.device)
        #: What this rank's gradients are collected in, and where its shard of their sum goes.
        self.message = torch.zeros_like(self.whole)
        self.gradient = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        self._mine = rank * self.length
        self.pieces: list[Piece] = []
        place = 0
        for index, p in zip(indices, parameters, strict=True):
            view = self.whole[place : place + p.numel()].view(p.shape)
            view.copy_(p.detach())
            p.data = view
            start, stop = self._cut(place, p.numel())
            if start < stop:
                part = Parameter(self.whole[place + start : place + stop])
                self.pieces.append(Piece(index, start, stop, place + start - self._mine, part))
            place += p.numel()

    def _cut(self, place: int, count: int) -> tuple[int, int]:
        """The elements of a parameter at `place` that are in this rank's shard."""
        return max(0, self._mine - place), min(count, self._mine + self.length - place)

    def moved(self) -> int | None:
        """The number of a parameter whose data is no longer in `whole`, if there is one."""
        origin, width = self.whole.data_ptr(), self.whole.element_size()
        for index, p in zip(self.indices, self.parameters, strict=True):
            if p.numel() and (p.data_ptr() != origin or p.dtype != self.whole.dtype):
                return index
            origin += p.numel() * width
        return None

    @property
    def shard(self) -> Tensor:
        """This rank's part of `whole`."""
        return self.whole[self._mine : self._mine + self.length]

    @torch.no_grad()
    def load(self) -> None:
        """Collect the parameters' gradients; zeros where there is none."""
        sizes = [p.numel() for p in self.parameters]
        parts = torch.split(self.message[: sum(sizes)], sizes)
        for p, part in zip(self.parameters, parts, strict=True):
            if p.grad is None:
                part.zero_()
            else:
                part.view(p.shape).copy_(p.grad)

    def hand_out(self, used: Sequence[bool]) -> None:
        """Give the reduced gradients to the pieces of parameters that some rank used."""
        for piece in self.pieces:
            count = piece.stop - piece.start
            gradient = self.gradient[piece.offset : piece.offset + count]
            piece.part.grad = gradient if used[piece.number] else None

    def joined(self, values: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """One value for each piece, or None, as a shard; zeros elsewhere."""
        shard = torch.zeros(self.length, dtype=dtype, device=self.whole.device)
        for piece, value in zip(self.pieces, values, strict=True):
            if value is not None:
                shard[piece.offset : piece.offset + piece.stop - piece.start] = value
        return shard

    def separated(self, whole: Tensor) -> dict[int, Tensor]:
        """`whole` cut into the parameters' shapes, by their numbers."""
        sizes = [p.numel() for p in self.parameters]
        parts = torch.split(whole[: sum(sizes)], sizes)
        return {
            index: part.reshape(p.shape).clone()
            for index, p, part in zip(self.indices, self.parameters, parts, strict=True)
        }


def flatten(groups: Sequence[dict[str, Any]], rank: int, world_size: int) -> list[list[Flat]]:
    """The flats of each parameter group; frozen parameters have a number and no place."""
    result = []
    index = 0
    for group in groups:
        kinds: dict[tuple[torch.dtype, torch.device], tuple[list[int], list[Parameter]]] = {}
        for p in group["params"]:
            if p.requires_grad:
                indices, parameters = kinds.setdefault((p.dtype, p.device), ([], []))
                indices.append(index)
                parameters.append(p)
            index += 1
        result.append([Flat(*kind, rank, world_size) for kind in kinds.values()])
    return result
