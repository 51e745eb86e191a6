"""The handle of a started call, as torch wants it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..errors import CollectiveTimeoutError, CommunicatorClosedError, RudaError

__all__ = ["COMPLETIONS", "BackendError", "Work"]

Part = concurrent.futures.Future[Any]

#: Where callbacks of torch futures run. Not on the loop, which they may wait for: torch's own communication
#: hooks start a collective in a callback and wait for it there. Threads are made as callbacks block.
COMPLETIONS = concurrent.futures.ThreadPoolExecutor(max_workers=256, thread_name_prefix="ruda-async torch")

_NO_TIMEOUT = timedelta(0)


class BackendError(dist.DistBackendError):
    """A call of the backend failed: a `RuntimeError`, as torch's users expect, around the library's error.

    Attributes:
        error: the library's error, also the ``__cause__``.
        rank: the rank it is about, as numbered in the group, or None where no single rank is to blame.
    """

    def __init__(self, error: BaseException) -> None:
        late = "the call's timeout has passed: " if isinstance(error, CollectiveTimeoutError) else ""
        super().__init__(f"{type(error).__name__}: {late}{error}")
        self.error = error
        self.rank: int | None = getattr(error, "rank", None)

    def __reduce__(self) -> tuple[type[BackendError], tuple[BaseException]]:
        return type(self), (self.error,)


class Work(dist.Work):
    """Calls that were started together; done when all are, failed when one is."""

    def __init__(self, parts: Sequence[Part], label: str, outputs: list[Tensor]) -> None:
        super().__init__()
        self._parts = parts
        self._label = label
        self._outputs = outputs
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ waiting

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the outputs may be used; True.

        Args:
            timeout: how long to wait here; the call goes on when it passes. Zero for its own deadline.

        Raises:
            BackendError: the call failed, or the timeout passed.
        """
        seconds = timeout.total_seconds()
        until = monotonic() + seconds if seconds > 0 else None
        failed: BaseException | None = None
        for part in self._parts:
            try:
                error = _error_of(part, None if until is None else max(until - monotonic(), 0))
            except TimeoutError:
                late = CollectiveTimeoutError(
                    f"{self._label} is not done after waiting {seconds:g} s; it goes on, wait again"
                )
                raise BackendError(late) from late
            failed = failed or error
        if failed is not None:
            raise BackendError(failed) from failed
        return True

    def synchronize(self) -> None:
        """`wait`, for tensors of the CPU."""
        self.wait()

    # ------------------------------------------------------------------ the outcome

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return all(part.done() for part in self._parts)

    def is_success(self) -> bool:
        """Whether the call is done and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BackendError | None:
        """Why the call failed; None while it runs, and where it did not."""
        errors = (_error_of(part, 0) for part in self._parts if part.done())
        failed = next((error for error in errors if error is not None), None)
        return None if failed is None else BackendError(failed)

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """The rank that a receive from any rank heard from.

        Raises:
            BackendError: the call is not a receive from any rank, or failed.
        """
        self.wait()
        source = self._parts[0].result()
        if not isinstance(source, int):
            raise BackendError(RudaError(f"{self._label} has no source rank; recv from any rank has"))
        return source

    _source_rank = source_rank

    # ------------------------------------------------------------------ futures

    def get_future(self) -> Future[Any]:
        """A torch future of the list of output tensors; its callbacks run in a thread of their own.

        A failed call's future raises a RuntimeError with the text of `BackendError`.
        """
        with self._lock:
            if self._future is None:
                done: Future[Any] = Future()
                # An error raised in a callback is one for torch's C++ too, which `set_exception` is not.
                self._future = done.then(self._value)
                self._watch(done)
            return self._future

    def _value(self, _: Future[Any]) -> list[Tensor]:
        self.wait()
        return self._outputs

    def _watch(self, done: Future[Any]) -> None:
        """Complete `done` when the last part is over."""
        if self.is_completed():
            done.set_result(None)
            return
        lock = threading.Lock()
        left = len(self._parts)

        def over(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                COMPLETIONS.submit(done.set_result, None)

        for part in self._parts:
            part.add_done_callback(over)


def _error_of(part: Part, timeout: float | None) -> BaseException | None:
    """Why a part failed, or None.

    Raises:
        TimeoutError: it was not over in time.
    """
    try:
        return part.exception(timeout)
    except concurrent.futures.CancelledError:
        return CommunicatorClosedError("the process group was destroyed during the call")
