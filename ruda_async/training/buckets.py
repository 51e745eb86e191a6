"""Gradients in buckets: few long messages instead of many short ones.

The idea and the order (reversed, since backward reaches the last layers first) are those of PyTorch's DDP
(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import TensorContractError
from .members import Member

__all__ = ["Bucket", "make_buckets"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Bucket:
    """Some parameters of one dtype, device and communicator, whose gradients travel as one message.

    Attributes:
        number: its place in the order of buckets, the same on all ranks.
        members: the parameters.
        comm: their communicator, or None.
        message: one-dimensional: the gradients, then for each parameter a 1 where this rank has a gradient.
            So the sum tells which parameters some rank used, at no extra message.
    """

    def __init__(self, number: int, members: Sequence[Member], wire: torch.dtype | None) -> None:
        first = members[0].parameter
        self.number = number
        self.members = list(members)
        self.comm = members[0].comm
        self.elements = sum(m.parameter.numel() for m in members)
        dtype = first.dtype if wire is None or self.comm is None else wire
        self.message = torch.zeros(self.elements + len(members), dtype=dtype, device=first.device)
        self._dtype = first.dtype
        self._converts = dtype != first.dtype
        self._views = self._cut(self.message)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        sizes = [m.parameter.numel() for m in self.members]
        parts = torch.split(flat[: self.elements], sizes)
        return [part.view(m.parameter.shape) for part, m in zip(parts, self.members, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.message.numel() * self.message.element_size()

    @torch.no_grad()
    def load(self) -> None:
        """Copy this rank's gradients into the message; zeros where there is none.

        Raises:
            TensorContractError: a parameter has another dtype, shape or device than it had.
        """
        used = []
        for member, view in zip(self.members, self._views, strict=True):
            p, gradient = member.parameter, member.parameter.grad
            if p.dtype is not self._dtype or p.shape != view.shape or p.device != view.device:
                raise TensorContractError(
                    f"parameter {member.name!r} is {p.dtype} {list(p.shape)} on {p.device} now, and was "
                    f"{self._dtype} {list(view.shape)} on {view.device} when this GradientSync was made; "
                    "convert or move the model first and make it afterwards"
                )
            used.append(gradient is not None)
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                view.copy_(gradient)
        self.message[self.elements :] = torch.tensor(used, dtype=self.message.dtype)

    @torch.no_grad()
    def store(self, scale: float | None) -> None:
        """Make the reduced message the parameters' gradients; leave those that no rank has as they are.

        Args:
            scale: a factor for the reduced gradients.
        """
        used = self.message[self.elements :].cpu().ne(0).tolist()
        views = self._views
        if self._converts:  # a whole bucket at once, in memory of its own
            views = self._cut(self.message.to(self._dtype))
        for member, view, anywhere in zip(self.members, views, used, strict=True):
            if anywhere:
                member.parameter.grad = view if scale is None else view.mul_(scale)


def make_buckets(members: Iterable[Member], nbytes: int, wire: torch.dtype | None) -> list[Bucket]:
    """Fill buckets in reverse order of the parameters, one open bucket for each kind at a time.

    Args:
        members: the parameters in the model's order.
        nbytes: a bucket is closed before it grows beyond this; a larger parameter has one of its own.
        wire: the dtype in which gradients travel, or None for their own.

    Raises:
        TensorContractError: a parameter's gradients cannot be summed.
    """
    filled: list[list[Member]] = []
    current: dict[tuple[Any, ...], tuple[list[Member], int]] = {}
    for member in reversed(list(members)):
        p = member.parameter
        if p.dtype not in _FLOATS:
            raise TensorContractError(
                f"parameter {member.name!r} is {p.dtype}, whose gradients cannot be summed over ranks; leave "
                "it out, or make it float16, bfloat16, float32 or float64"
            )
        size = p.numel() * p.element_size()
        kind = (p.dtype, p.device, id(member.comm))
        content, length = current.get(kind, ([], 0))
        if not content or length + size > nbytes:
            content, length = [], 0
            filled.append(content)
        content.append(member)
        current[kind] = (content, length + size)
    return [Bucket(number, content, wire) for number, content in enumerate(filled)]
