"""The front's metrics: Prometheus's, and the snapshot that the page shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ruda_async import AsyncCommunicator
from ruda_async.observe import prometheus

from .measures import percentiles

if TYPE_CHECKING:
    from .front import Front

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of requests and batches, beside those of the library and of the other ranks."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._latencies: deque[float] = deque(maxlen=2048)
        self._codes: dict[str, int] = {}
        registry = self._registry = CollectorRegistry()
        self._requests = Counter("serve_requests", "Requests by outcome.", ["code"], registry=registry)
        self._seconds = Histogram(
            "serve_request_seconds", "Time to the last row of an answer.", buckets=_SECONDS, registry=registry
        )
        self._batch_rows = Histogram("serve_batch_rows", "Rows of a batch.", buckets=_ROWS, registry=registry)
        self._batch_seconds = Histogram(
            "serve_batch_seconds", "Time of a batch.", buckets=_SECONDS, registry=registry
        )
        for name, text, value in (
            ("serve_ready", "Whether requests are answered.", lambda: front.ready),
            ("serve_queue_rows", "Rows that wait.", lambda: front.batcher.rows),
            ("serve_in_flight", "Batches under way.", lambda: front.in_flight),
            ("serve_ranks_wanted", "Ranks of a whole server.", lambda: front.target),
            ("serve_losses", "How often ranks were lost.", lambda: front.losses),
            ("serve_joins", "How often a rank came.", lambda: front.joins),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        registry.register(_Ranks(front))

    def watch(self, comm: AsyncCommunicator) -> None:
        """Report the library's counters of this rank too."""
        prometheus.export(comm, self._registry)

    def batch(self, rows: int, seconds: float) -> None:
        """A batch is over, well or not."""
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)

    def request(self, code: str, seconds: float) -> None:
        """A request is over. `code` is ``ok``, ``disconnected`` or that of a `RefusedError`."""
        self._requests.labels(code).inc()
        self._codes[code] = self._codes.get(code, 0) + 1
        if code == "ok":
            self._seconds.observe(seconds)
            self._latencies.append(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def snapshot(self) -> dict[str, Any]:
        """The same in short, as JSON types; times in milliseconds."""
        front = self._front
        generation = front.generation
        return {
            "ready": front.ready,
            "draining": front.draining,
            "wanted": front.target,
            "live": 0 if generation is None else generation.comm.world_size,
            "absent": [] if generation is None else sorted(generation.placement.absent),
            "losses": front.losses,
            "joins": front.joins,
            "queue_rows": front.batcher.rows,
            "in_flight": front.in_flight,
            "requests": dict(self._codes),
            "latency_ms": {name: 1000 * value for name, value in percentiles(self._latencies).items()},
            "expert_rows": front.expert_rows.tolist(),
            "ranks": front.ranks,
        }


class _Ranks(Collector):
    """The numbers that ranks send to the front twice a second."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        front = self._front
        experts = CounterMetricFamily("serve_expert_rows", "Rows that an expert got.", labels=["expert"])
        for number, rows in enumerate(front.expert_rows):
            experts.add_metric([str(number)], int(rows))
        yield experts
        families: dict[str, Any] = {
            key: GaugeMetricFamily(f"serve_rank_{name}", text, labels=["rank"])
            for key, name, text in (
                ("rows", "rows", "Rows that the rank's experts computed."),
                ("memory", "memory_bytes", "Resident memory."),
                ("descriptors", "descriptors", "Open file descriptors."),
                ("tasks", "tasks", "Tasks on the event loop."),
            )
        }
        stall = GaugeMetricFamily(
            "serve_rank_loop_late_seconds", "Lateness of the event loop, 99 of 100 times.", labels=["rank"]
        )
        sent = CounterMetricFamily("serve_link_sent_bytes", "Payload between ranks.", labels=["rank", "peer"])
        for numbers in front.ranks:
            rank = str(numbers["rank"])
            for key, family in families.items():
                family.add_metric([rank], numbers[key])
            stall.add_metric([rank], numbers["stall"]["p99_ms"] / 1000)
            for peer, traffic in numbers["peers"].items():
                sent.add_metric([rank, peer], traffic["bytes_sent"])
        yield from (*families.values(), stall, sent)
