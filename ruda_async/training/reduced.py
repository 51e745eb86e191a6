"""Which gradients were reduced already."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

__all__ = ["Reduced"]


class Reduced:
    """Notes of the gradients of the latest reduction: which tensors they were, and in which version."""

    def __init__(self) -> None:
        self._notes: dict[Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, parameters: Iterable[Parameter]) -> None:
        """Forget the earlier ones: the gradients that these have now were reduced."""
        self._notes = {p: (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def has(self, parameter: Parameter) -> bool:
        """Whether its gradient is the noted one, and nobody has added to it or edited it since."""
        noted, version = self._notes.get(parameter, (None, 0))
        gradient = parameter.grad
        return (
            gradient is not None
            and noted is not None
            and noted() is gradient
            and gradient._version == version
        )
