"""Calls from one rank's thread into another's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["call"]


def call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Run `function` on `loop`, from whatever thread; nothing where that loop is gone."""
    if asyncio._get_running_loop() is loop:
        function(*args)
        return
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass
