"""The part of the model that one rank holds."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from digits_moe import DigitsMoE, load, prepare
from torch import Tensor

from ruda_async import moe

from .placement import Placement

__all__ = ["Saved", "Shard", "describe"]

#: Rows that experts compute on the event loop; that takes well under a millisecond. More go to a thread.
_INLINE_ROWS = 256


class Saved(NamedTuple):
    """The file that this job serves. All ranks have to see the same content, for as long as they serve.

    Attributes:
        experts: how many the model has.
        digest: SHA-256 of the file, in hex.
    """

    path: Path
    experts: int
    digest: str

    def unchanged(self) -> bool:
        """Whether the file is still there with the same content."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.digest
        except OSError:
            return False


def describe(path: Path) -> Saved:
    """Check the whole file: a rank may have to read any expert later.

    Raises:
        SystemExit: there is no such file, or it is no such model; the text says how to make one.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            return Saved(path, load(file).sizes.experts, digest)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"serve_moe: cannot use --model {path}: {error}; make one with: "
            f"ruda-async run -n 4 examples/train_digits_moe.py --save {path}"
        ) from None


class Shard:
    """The replicated layers, and the experts of one rank.

    Attributes:
        held: the experts' numbers.
        rows: how many rows they have computed.
    """

    def __init__(self, model: DigitsMoE, held: range, placement: Placement, rank: int) -> None:
        self.model = model.eval()
        self.held = held
        self.layout = placement.layout
        self.absent = placement.absent
        self.rows = 0
        self._owned = self.layout.local(rank)

    @classmethod
    async def load(cls, saved: Saved, placement: Placement, rank: int, former: Shard | None = None) -> Shard:
        """What the placement gives to `rank`: of `former` where that has it, else of the file.

        The file is read in a thread. Ranks have agreed that it is still the one they began with.
        """
        held = placement.held[rank]
        if former is not None and set(held) <= set(former.held):
            model = DigitsMoE(former.model.sizes, held)
            kept = former.model.state_dict()
            model.load_state_dict({name: kept[name] for name in model.state_dict()})
        else:
            model = await asyncio.to_thread(load, saved.path, held)
        return cls(model, held, placement, rank)

    def images(self, pixels: np.ndarray) -> Tensor:
        """Pixels from 0 to 16 ``[n, 64]`` to what the model takes."""
        return prepare(pixels, self.model.mean.numpy())

    def choices(self, tokens: Tensor) -> Tensor:
        """The experts that each row visits, int64 ``[n, chosen]``."""
        return moe.route(self.model.router(tokens), self.model.sizes.chosen).experts

    def apply(self, rows: Tensor, counts: tuple[int, ...]) -> Any:
        """The experts of this rank, as `moe_layer` calls them: ``[n, width]`` to the same shape.

        Raises:
            LookupError: rows came for an expert that this rank does not hold.
        """
        for number, count in zip(self._owned, counts, strict=True):
            if count and number not in self.held:
                raise LookupError(f"{count} rows came for expert {number}, which nobody holds")
        self.rows += len(rows)
        if len(rows) > _INLINE_ROWS:
            return asyncio.to_thread(self._compute, rows, counts)
        return self._compute(rows, counts)

    def _compute(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            parts = [
                self.model.experts[str(number)](part)
                for number, part in zip(self._owned, torch.split(rows, list(counts)), strict=True)
                if len(part)
            ]
        return torch.cat(parts) if parts else rows.new_zeros((0, self.model.sizes.width))
