"""Which parameters take part, and whether the model still consists of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..errors import ConfigError, TensorContractError
from .agreement import check_initialised

__all__ = ["Member", "Members", "check_options"]

_WIRE = (torch.bfloat16, torch.float16)
Groups = Sequence[tuple[Iterable[Parameter], Any]]


class Member(NamedTuple):
    """One parameter that takes part.

    Attributes:
        name: for error texts.
        parameter: the parameter.
        comm: the communicator over which its gradients are summed; None where this rank alone has it.
    """

    name: str
    parameter: Parameter
    comm: Any


class Members:
    """The parameters of a model that require a gradient, each once.

    Attributes:
        all: the members, in the model's order.
        frozen: parameters that require no gradient, with the communicators that replicate them.
        names: of the same, by parameter.
    """

    def __init__(self, model: Module | Iterable[Parameter], comm: Any, groups: Groups) -> None:
        self._model = model if isinstance(model, Module) else list(model)
        elsewhere: dict[Parameter, Any] = {}
        for parameters, group in groups:
            elsewhere.update((p, group) for p in parameters)
        found = {p: name for name, p in self._named()}
        for number, p in enumerate(elsewhere):
            found.setdefault(p, f"group parameter {number}")
        everyone = [Member(name, p, elsewhere.get(p, comm)) for p, name in found.items()]
        self.all = [m for m in everyone if m.parameter.requires_grad]
        self.frozen = [m for m in everyone if not m.parameter.requires_grad]
        self.names = {m.parameter: m.name for m in self.all}

    def _named(self) -> Iterable[tuple[str, Parameter]]:
        if isinstance(self._model, Module):
            return self._model.named_parameters()
        return ((f"parameter {i}", p) for i, p in enumerate(self._model))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The model's buffers by name, each once; none where only parameters were given."""
        return list(self._model.named_buffers()) if isinstance(self._model, Module) else []

    def check_initialised(self, untrained: bool) -> None:
        """See that all members are initialised, and with `untrained` frozen parameters and buffers too.

        Raises:
            TensorContractError: one is not.
        """
        for m in [*self.all, *(self.frozen if untrained else ())]:
            check_initialised(f"parameter {m.name!r}", m.parameter)
        for name, buffer in self.buffers() if untrained else ():
            check_initialised(f"buffer {name!r}", buffer)

    def check(self) -> None:
        """See that no parameter has come to the model, or been unfrozen, that would be left unsynchronised.

        Raises:
            TensorContractError: one has.
        """
        for name, p in self._named():
            if p.requires_grad and p not in self.names:
                raise TensorContractError(
                    f"parameter {name!r} requires a gradient and was not there, or was frozen, when this "
                    "GradientSync was made, so ranks would train it apart; remove() this one and make "
                    "another, or pass the parameters to synchronise instead of the module"
                )


def check_options(op: str, bucket_bytes: int, compress: torch.dtype | None) -> None:
    """Check the arguments of `GradientSync`.

    Raises:
        ConfigError: one is wrong.
    """
    if op not in ("mean", "sum"):
        raise ConfigError(f"op={op!r} is not known; gradients are combined by 'mean' or 'sum'")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes is a number of bytes from 1 on, not {bucket_bytes!r}")
    if compress not in (None, *_WIRE):
        raise ConfigError(f"compress={compress!r} is not known; use torch.bfloat16, torch.float16 or None")
