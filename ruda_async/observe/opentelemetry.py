"""Spans for OpenTelemetry: one around every call. Needs `opentelemetry-api`.

    from ruda_async.observe.opentelemetry import instrument

    instrument(comm)

The parent of a call's span is the span that is current where the call is made. The spans of one collective on
its ranks are in the traces of their callers; ``ruda.job``, ``ruda.channel`` and ``ruda.sequence`` together
are equal on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..installing import how_to_install

try:
    from opentelemetry.trace import (
        Span,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        TracerProvider,
        get_tracer_provider,
    )
except ImportError as error:  # pragma: no cover
    raise ConfigError(
        f"ruda_async.observe.opentelemetry needs opentelemetry-api; {how_to_install('opentelemetry')}"
    ) from error

if TYPE_CHECKING:
    from ..communicator import AsyncCommunicator
    from ..node import Node
    from ..sync import Communicator
    from .spans import Call

__all__ = ["instrument", "uninstrument"]


class _Spans:
    """The open spans of one node; see `spans.Spans`."""

    def __init__(self, node: Node, tracer: Tracer) -> None:
        self._job = node.config.name
        self._tracer = tracer
        self._open: dict[Call, Span] = {}

    def begin(self, call: Call) -> None:
        """Start a span under the current one."""
        channel = call.channel
        attributes: dict[str, str | int] = {
            "ruda.job": self._job,
            "ruda.rank": channel.rank,
            "ruda.world_size": channel.size,
            "ruda.channel": channel.name,
        }
        if isinstance(call.sequence, tuple):
            attributes["ruda.peer"], attributes["ruda.tag"] = call.sequence
        else:
            attributes["ruda.sequence"] = call.sequence
        # Not made current: what a collective sends is no call of its own.
        self._open[call] = self._tracer.start_span(
            f"ruda {call.name}", kind=SpanKind.INTERNAL, attributes=attributes
        )

    def end(self, call: Call, error: BaseException | None) -> None:
        """End the call's span."""
        span = self._open.pop(call, None)
        if span is None:  # begun before `instrument`
            return
        span.set_attribute("ruda.bytes_sent", call.sent)
        span.set_attribute("ruda.bytes_received", call.received)
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.record_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()


def instrument(
    communicator: AsyncCommunicator | Communicator, tracer_provider: TracerProvider | None = None
) -> None:
    """Make spans of all calls of this rank's communicators of the job, from now on.

    Args:
        communicator: any of them.
        tracer_provider: by default OpenTelemetry's global one.
    """
    from .. import __version__

    provider = get_tracer_provider() if tracer_provider is None else tracer_provider
    node = communicator.node
    node.spans = _Spans(node, provider.get_tracer("ruda_async", __version__))


def uninstrument(communicator: AsyncCommunicator | Communicator) -> None:
    """Make no more spans; those that are open are not ended. Harmless twice."""
    communicator.node.spans = None
