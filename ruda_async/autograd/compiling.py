"""A clean graph break: calls that cannot stay in a graph of `torch.compile` run between its parts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["eager"]

F = TypeVar("F", bound=Callable[..., Any])

_REASON = "a collective runs outside the graph"
_frames: Any = torch._C._dynamo.eval_frame


def eager(function: F) -> F:
    """As `torch.compiler.disable`, but without importing the compiler, which takes seconds.

    The function is marked, so that a traced caller breaks off at the call and neither this frame nor those
    below it are looked at. Where nothing is compiled it costs nothing.
    """
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    try:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # an older torch
        return _disabled_once_imported(function)
    return function


def _disabled_once_imported(function: F) -> F:
    """Call `function` by way of torch's own switch from when somebody has imported the compiler."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            disable: Any = torch.compiler.disable
            disabled.append(disable(function, reason=_REASON))
        return disabled[0](*args, **options)

    return cast(F, call)
