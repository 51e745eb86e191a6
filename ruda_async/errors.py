"""The one exception tree.

Every error of the library is a `RudaError`; most are also the builtin a caller would guess
(`ValueError`, `ConnectionError`, `TimeoutError`, `ImportError`), so plain ``except`` clauses work.
Facts a program may want to act on are attributes, not only text.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "CollectiveCancelledError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicatorClosedError",
    "ConfigError",
    "PeerLostError",
    "ProtocolError",
    "RudaError",
    "TensorContractError",
    "TransportUnavailableError",
]


class RudaError(Exception):
    """The base of all errors of this library.

    Attributes:
        rank: the rank the error is about (the one that was lost, differed, cancelled or passed bad
            input), or None where no single rank is to blame.
    """

    rank: int | None = None

    def __init__(self, message: str = "", *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class ConfigError(RudaError, ValueError):
    """A URL, keyword or environment variable that cannot be used; the text names it and the remedy."""


class TensorContractError(RudaError, ValueError):
    """A tensor or argument outside an operation's contract, on this rank or on the one in `rank`.

    Attributes:
        reason: the text without the rank, channel and operation in front of it.
    """

    def __init__(self, message: str = "", *, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.reason = message

    def at(self, context: object, rank: int) -> TensorContractError:
        """This error with `context` in front of its text, unless it has a rank already."""
        if self.rank is None:
            self.args = (f"{context}: {self.reason}",)
            self.rank = rank
        return self


class CollectiveMismatchError(RudaError):
    """Ranks entered different operations, or the same one with different dtype, shape or arguments.

    Attributes:
        rank: the rank that differs.
        field: the first field that differs, such as ``"dtype"`` or ``"shape"``.
        ours, theirs: that field on the rank that noticed and on `rank`.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        field: str | None = None,
        ours: object = None,
        theirs: object = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.field = field
        self.ours = ours
        self.theirs = theirs


class PeerLostError(RudaError, ConnectionError):
    """The rank in `rank` died, left, or can no longer be reached.

    Attributes:
        orderly: the peer said goodbye: it closed its communicator rather than died.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, orderly: bool = False) -> None:
        super().__init__(message, rank=rank)
        self.orderly = orderly


class CollectiveTimeoutError(RudaError, TimeoutError):
    """An operation, or the set-up of a communicator, was not over before its deadline.

    Attributes:
        rank: the rank whose deadline passed; None for set-up.
        missing: the ranks that had not been heard from.
        seen: what went wrong meanwhile, such as connections that were refused or dropped; for people.
    """

    def __init__(
        self, message: str = "", *, rank: int | None = None, missing: tuple[int, ...] = (), seen: str = ""
    ) -> None:
        super().__init__(message, rank=rank)
        self.missing = missing
        self.seen = seen


class CollectiveCancelledError(RudaError):
    """The rank in `rank` cancelled this operation, so it cannot finish here either."""


class CommunicatorClosedError(RudaError, RuntimeError):
    """The communicator was closed here, is used in another process than its own, or on another loop."""


class TransportUnavailableError(RudaError, ImportError):
    """The transport a URL names needs something that is not there; the text says what to install."""


class AuthenticationError(RudaError, ConnectionError):
    """A connection did not prove the job's secret."""


class ProtocolError(RudaError, ConnectionError):
    """Bytes that are not this library's wire format, or not at a time when they are allowed."""
