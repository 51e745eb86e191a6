"""A clean graph break: code under `torch.compile` runs collectives eagerly between compiled parts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["eager"]

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """`torch.compiler.disable`, but without the seconds that importing torch's compiler takes.

    Where nobody has imported the compiler nothing can be compiled, and the function is called as it is.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            import torch

            disabled.append(torch.compiler.disable(function, reason="a collective runs outside the graph"))
        return disabled[0](*args, **options)

    return cast(F, call)
