"""One backward pass: which buckets are ready, and how its end, good or bad, is noticed.

Torch calls back when a pass has ended well (`queue_callback`) and says nothing when it has failed. It then
drops the callback, though, and that is noticed here; so a rank whose backward raised can tell the others
at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn import Parameter

from .buckets import Bucket
from .timeline import BucketTimes

__all__ = ["Pass", "Weakly", "is_known", "known_to_all", "mark_known"]


class _Callback:
    """What torch is given to call at a pass's end."""

    __slots__ = ("__weakref__", "_act", "_key", "_open")

    def __init__(self, key: tuple[str, int], open: set[tuple[str, int]], act: Callable[[], None]) -> None:
        self._key = key
        self._open = open
        self._act = act

    def __call__(self) -> None:
        self._open.discard(self._key)
        self._act()


class Pass:
    """The state of one synchronised backward pass.

    A pass inside another (reentrant checkpointing) belongs to it: its own end ends nothing.

    Attributes:
        calls: reductions that were started, by the bucket's number.
        times: of the same.
        over: whether it was ended, failed or given up.
    """

    def __init__(
        self,
        on_walked: Callable[[Pass], None],
        on_end: Callable[[Pass], None],
        on_failure: Callable[[Pass], None],
    ) -> None:
        """Make a pass.

        Args:
            on_walked: the graph has been walked; to start what is left, without waiting.
            on_end: after that; to wait.
            on_failure: the pass was dropped in the middle.
        """
        self.calls: dict[int, Future[Any]] = {}
        self.times: list[BucketTimes] = []
        self.over = False
        self._missing: dict[int, set[Parameter]] = {}
        self._open: set[tuple[str, int]] = set()
        self._on_walked = on_walked
        self._on_end = on_end
        self._on_failure = on_failure

    def started(self, bucket: Bucket) -> bool:
        """Whether its reduction was started."""
        return bucket.number in self.calls

    def arrived(self, bucket: Bucket, parameter: Parameter) -> bool:
        """Note a gradient; whether the bucket now has all of them."""
        missing = self._missing.get(bucket.number)
        if missing is None:
            missing = self._missing[bucket.number] = {m.parameter for m in bucket.members}
        missing.discard(parameter)
        return not missing

    def watch(self) -> None:
        """Ask torch to say when the backward pass that runs now is over."""
        key = ("walk", torch._C._current_graph_task_id())
        if key not in self._open:
            self._queue(key, self._walked)

    def _queue(self, key: tuple[str, int], act: Callable[[], None]) -> None:
        self._open.add(key)
        callback = _Callback(key, self._open, act)
        weakref.finalize(callback, self._dropped, key).atexit = False
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(callback)

    def _walked(self) -> None:
        if self.over or torch._C._current_autograd_node() is not None:
            return  # a pass inside another one, which goes on
        # All starts come before any wait, also where several objects have hooks in one backward pass.
        self._queue(("end", torch._C._current_graph_task_id()), lambda: self._on_end(self))
        self._on_walked(self)

    def _dropped(self, key: tuple[str, int]) -> None:
        if key in self._open and not self.over:
            self._on_failure(self)


class Weakly:
    """A bound method that does not keep its object alive, and does nothing without it."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[[Parameter], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, parameter: Parameter) -> None:
        method = self._method()
        if method is not None:
            method(parameter)


_MARK = "_ruda_known_to"


def mark_known(error: BaseException, owner: object) -> None:
    """Note that the ranks of `owner` all know of `error`: built-in exceptions take no weak references."""
    vars(error).setdefault(_MARK, set()).add(id(owner))


@contextlib.contextmanager
def known_to_all(owner: object) -> Iterator[None]:
    """What is raised inside has failed on all ranks of `owner`, so its `abandon` need not tell of it."""
    try:
        yield
    except Exception as error:
        mark_known(error, owner)
        raise


def is_known(error: BaseException, owner: object) -> bool:
    """Whether `error`, or what it was raised from, was marked for `owner`."""
    ahead: list[BaseException | None] = [error]
    seen: set[int] = set()
    while ahead:
        each = ahead.pop()
        if each is None or id(each) in seen:
            continue
        if id(owner) in vars(each).get(_MARK, ()):
            return True
        seen.add(id(each))
        ahead += [each.__cause__, each.__context__]
    return False
