"""The two ways in which torch calls a process group: with an options object, or with plain arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

from torch import Tensor

__all__ = ["Arguments", "lists_of", "pairs", "tensors_of"]

#: Our names of what the options objects call otherwise.
_FIELDS = {"root": "rootRank", "op": "reduceOp"}


class Arguments:
    """What follows the tensors of a call.

    Either one options object (by position, or as ``opts``), or plain arguments in the order of `defaults`,
    and then ``timeout``, each by position or by name.

    Attributes:
        root, op: those that `defaults` names.
        timeout: how long the call may take; None, zero or negative for the group's default.
    """

    root: int
    op: Any
    timeout: timedelta | None

    def __init__(self, call: str, args: Sequence[Any], kwargs: Mapping[str, Any], **defaults: Any) -> None:
        names = [*defaults, "timeout"]
        if len(args) + len(kwargs) > len(names) or not {"opts", *names}.issuperset(kwargs):
            raise TypeError(f"{call} takes its tensors, and opts or {', '.join(names)}; not {args} {kwargs}")
        opts = kwargs.get("opts", args[0] if args else None)
        if hasattr(opts, "asyncOp"):
            given = {name: getattr(opts, _FIELDS.get(name, name)) for name in names}
        else:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.timeout = None
        for name in names:
            value = given.get(name)
            setattr(self, name, defaults.get(name) if value is None else value)


def tensors_of(value: Any) -> list[Tensor]:
    """A call's tensors, of which it takes one or a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def lists_of(value: Any, *, single: bool) -> list[Any]:
    """A call's lists of tensors, of which it takes one (`single`) or several."""
    if value is None:
        return []
    return ([value] if value else []) if single else list(value)


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Outputs with inputs; None where one is missing, which the call then refuses."""
    return list(zip_longest(first, second))
