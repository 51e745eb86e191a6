"""Transports that carry nothing, for tests of what lies before the first connection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ruda_async.errors import ConfigError
from ruda_async.transport.parameters import extract_parameters, merge_parameters, param


class Mode(Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True)
class Parameters:
    heartbeat: float = param(10.0, doc="silence that is still life", unit="s", minimum=0, maximum=3600)
    budget: int = param(65536, doc="room for early messages", unit="bytes", minimum=0)
    retries: int = param(3, doc="attempts", minimum=0, maximum=10)
    share: float = param(0.5, doc="a share", minimum=0, maximum=1)
    nodelay: bool = param(True, doc="send at once")
    bind: str = param("", doc="a local address")
    style: str = param("plain", doc="a choice", choices=("plain", "fancy"))
    mode: Mode = param(Mode.FAST, doc="an enum")  # noqa: RUF009
    certificate: Path | None = param(None, doc="a file")  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


@dataclass(frozen=True, slots=True)
class DelayParameters:
    delay_ms: float = param(0.0, doc="added to each message", unit="ms", minimum=0)


class FakePlugin:
    """A plugin whose facts are arguments."""

    summary = "a transport for tests"

    def __init__(self, scheme: str, **facts: Any) -> None:
        self.scheme = scheme
        self.parameters: type[Any] = facts.get("parameters", Parameters)
        self.rank_per: str = facts.get("rank_per", "process")
        self.example: str = facts.get("example", f"{scheme}://127.0.0.1:0")
        self.preference: int = facts.get("preference", -100)
        self._reason: str | None = facts.get("unavailable")

    def unavailable(self) -> str | None:
        return self._reason

    async def connect(self, job: Any) -> Any:
        raise ConfigError(f"{self.scheme} carries nothing")


class FakeWrapper:
    """A wrapper, as a plugin author would write it."""

    summary = "a wrapper for tests"
    parameters = DelayParameters
    wraps = True

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    def unavailable(self) -> str | None:
        return None

    def wrap(self, inner: Any) -> Any:
        return Wrapped(self, inner)


class Wrapped(FakePlugin):
    """The pair of a wrapper and an inner plugin."""

    def __init__(self, outer: FakeWrapper, inner: Any) -> None:
        super().__init__(
            f"{outer.scheme}+{inner.scheme}",
            parameters=merge_parameters("Wrapped", outer.parameters, inner.parameters),
            example=f"{outer.scheme}+{inner.example}",
            rank_per=inner.rank_per,
        )
        self.inner = inner

    async def connect(self, job: Any) -> Any:
        own = extract_parameters(self.inner.parameters, job.parameters)
        return await self.inner.connect(replace(job, parameters=own))
