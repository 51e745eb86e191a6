"""How long a step waits for its exchanges, forward and backward, by what anyone can see of a layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the time of a layer of sharded experts without that of the experts themselves.

    What is left is dispatch, exchanges and combine. Backward is timed by hooks: a tensor's hook runs when its
    gradient has been computed.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def layer(self, tokens: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        """``call(tokens)``, timed in both directions."""
        tokens = tokens.view_as(tokens)  # whose gradient comes from the layer alone
        self.seconds -= time.perf_counter()
        result = call(tokens)
        self.seconds += time.perf_counter()
        self._hook(result, -1)
        self._hook(tokens, 1)
        return result

    def experts(self, function: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
        """`function`, whose time does not count."""

        def timed(rows: Tensor, counts: Any) -> Tensor:
            self.seconds += time.perf_counter()
            result = function(rows.view_as(rows), counts)
            self.seconds -= time.perf_counter()
            self._hook(result, 1)
            self._hook(rows, -1)
            return result

        return timed

    def _hook(self, value: Tensor, sign: int) -> None:
        if value.requires_grad:

            def note(gradient: Tensor) -> None:
                self.seconds += sign * time.perf_counter()

            value.register_hook(note)
