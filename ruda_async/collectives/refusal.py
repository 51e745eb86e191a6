"""A call that fails on this rank, and thereby on all, where the others make another one."""

from __future__ import annotations

from typing import Any, NoReturn

from .operation import Link

__all__ = ["Refusal"]


class Refusal:
    """The request of such a call.

    Args:
        operation: what it is called on this rank.
        error: why; it is raised here, and the other ranks are told.
        yields: a call that has failed elsewhere already, or has lost a rank, fails for that reason.
    """

    def __init__(self, operation: str, error: BaseException, *, yields: bool = False) -> None:
        self.operation = operation
        self._error = error
        self._yields = yields

    def prepare(self, rank: int, size: int, settings: Any) -> bytes:
        if self._yields:
            return b""
        raise self._error

    async def run(self, link: Link) -> NoReturn:
        raise self._error
