"""Metrics for Prometheus: a collector over `stats()`, read at each scrape. Needs `prometheus_client`.

    from prometheus_client import start_http_server
    from ruda_async.observe.prometheus import export

    export(comm)
    start_http_server(9100)

Nothing is counted twice or kept: each scrape asks the communicators that are still open.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..installing import how_to_install

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:  # pragma: no cover
    raise ConfigError(
        f"ruda_async.observe.prometheus needs prometheus_client; {how_to_install('prometheus')}"
    ) from error

if TYPE_CHECKING:
    from ..communicator import AsyncCommunicator
    from ..node import Node
    from ..sync import Communicator
    from .recorder import OperationStats, Stats

__all__ = ["BOUNDS", "RudaCollector", "export"]

#: Upper bounds of the histogram's buckets in seconds: powers of four microseconds. Each is a bound of the
#: recorder's own, finer buckets, so none of those is split.
BOUNDS = tuple(4.0**k * 1e-6 for k in range(1, 14))

_PEER = (
    ("messages_sent", "Messages sent to a peer."),
    ("bytes_sent", "Payload bytes sent to a peer."),
    ("messages_received", "Messages received from a peer."),
    ("bytes_received", "Payload bytes received from a peer."),
)


class RudaCollector(Collector):  # type: ignore[misc, unused-ignore]  # where prometheus_client is not installed
    """A Prometheus collector over the communicators of this process.

    Every metric has the labels ``job`` and ``rank``; see the page on observing a job for their names.
    """

    def __init__(self) -> None:
        self._nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, communicator: AsyncCommunicator | Communicator) -> None:
        """Report the rank of this communicator, over all its channels, until it is closed."""
        with self._lock:
            self._nodes.add(communicator.node)

    def describe(self) -> Iterable[Any]:
        """No metric is there before the first communicator."""
        return ()

    def collect(self) -> Iterator[Any]:
        """What Prometheus scrapes."""
        with self._lock:
            nodes = [node for node in self._nodes if node.closed is None]
        found = [((node.config.name, str(node.transport.rank)), node.stats()) for node in nodes]
        yield from _operations(found)
        yield from _ranks(found)
        yield from _peers(found)


def _operations(found: list[tuple[tuple[str, str], Stats]]) -> Iterator[Any]:
    labels = ("job", "rank", "operation")
    seconds = HistogramMetricFamily(
        "ruda_operation_seconds", "Time of calls that succeeded, from call to result.", labels=labels
    )
    failures = CounterMetricFamily("ruda_operation_failures", "Calls that raised.", labels=labels)
    sent = CounterMetricFamily("ruda_operation_sent_bytes", "Payload bytes that calls sent.", labels=labels)
    received = CounterMetricFamily(
        "ruda_operation_received_bytes", "Payload bytes that calls received.", labels=labels
    )
    for where, stats in found:
        for name, operation in stats["operations"].items():
            row = (*where, name)
            seconds.add_metric(row, _buckets(operation), operation["seconds_total"])
            failures.add_metric(row, operation["failed"])
            sent.add_metric(row, operation["bytes_sent"])
            received.add_metric(row, operation["bytes_received"])
    return iter((seconds, failures, sent, received))


def _buckets(operation: OperationStats) -> list[tuple[str, float]]:
    """The recorder's histogram, cumulated at `BOUNDS`."""
    buckets: list[tuple[str, float]] = []
    for bound in BOUNDS:
        # A bound may differ from the recorder's in its last bit.
        below = sum(n for upper, n in operation["histogram"] if upper <= bound * 1.0001)
        buckets.append((f"{bound:g}", below))
    buckets.append(("+Inf", operation["count"]))
    return buckets


def _ranks(found: list[tuple[tuple[str, str], Stats]]) -> Iterator[Any]:
    labels = ("job", "rank")
    in_flight = GaugeMetricFamily("ruda_in_flight", "Calls that have begun and not ended.", labels=labels)
    oldest = GaugeMetricFamily(
        "ruda_oldest_in_flight_seconds", "For how long the oldest of them is under way.", labels=labels
    )
    lost = GaugeMetricFamily("ruda_lost_peers", "Ranks that died.", labels=labels)
    channels = GaugeMetricFamily("ruda_channels", "Open channels.", labels=labels)
    for where, stats in found:
        in_flight.add_metric(where, stats["in_flight"])
        oldest.add_metric(where, stats["oldest_seconds"])
        lost.add_metric(where, len(stats["lost"]))
        channels.add_metric(where, stats["channels"])
    return iter((in_flight, oldest, lost, channels))


def _peers(found: list[tuple[tuple[str, str], Stats]]) -> Iterator[Any]:
    labels = ("job", "rank", "peer")
    for key, text in _PEER:
        direction = key.split("_")
        family = CounterMetricFamily(f"ruda_peer_{direction[1]}_{direction[0]}", text, labels=labels)
        for where, stats in found:
            for peer, counters in stats["peers"].items():
                family.add_metric((*where, str(peer)), counters.get(key, 0))
        yield family
    early = GaugeMetricFamily(
        "ruda_peer_early_bytes", "Bytes from a peer that wait here for their receive.", labels=labels
    )
    for where, stats in found:
        for peer, counters in stats["peers"].items():
            early.add_metric((*where, str(peer)), counters.get("early_bytes", 0))
    yield early


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, RudaCollector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def export(
    communicator: AsyncCommunicator | Communicator, registry: CollectorRegistry | None = None
) -> RudaCollector:
    """Report a communicator's rank in a Prometheus registry; several may be added to one.

    Args:
        communicator: any of the job's on this rank.
        registry: by default Prometheus's own.

    Returns:
        The registry's collector, to be unregistered where that is wanted.
    """
    registry = REGISTRY if registry is None else registry
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = RudaCollector()
            registry.register(collector)
    collector.add(communicator)
    return collector
