"""Calls that block or take long, on threads that do not keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_thread", "start_in_thread"]

R = TypeVar("R")


async def in_thread(function: Callable[[], R]) -> R:
    """Call what may block for as long as other ranks take, on a thread of its own.

    Not on one of the loop's executor: all of those may be waiting for the very communicator that asks.
    The call goes on when the awaiting task is cancelled; the thread ends with the process, if not before.
    """
    return await start_in_thread(function)


def start_in_thread(function: Callable[[], R]) -> asyncio.Future[R]:
    """`in_thread`, started; whoever waits may end the future in another way."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # that loop is closed

    threading.Thread(target=run, name="ruda-async call", daemon=True).start()
    return future
