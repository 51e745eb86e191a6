"""What Prometheus is told."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from support import outcome, run_ranks

from ruda_async import AsyncCommunicator

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="pip install 'ruda-async[prometheus]' for these tests"
)


def samples(registry: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Name and labels (without the job's) to value."""
    found = {}
    for family in registry.collect():  # type: ignore[attr-defined]
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "job"))
            found[sample.name, labels] = sample.value
    return found


async def test_counters_and_histograms(url: str) -> None:
    from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

    from ruda_async.observe.prometheus import BOUNDS, export

    registry = prometheus_client.CollectorRegistry()

    async def body(comm: AsyncCommunicator) -> None:
        export(comm, registry)
        export(comm.channel("again"), registry)  # the same rank
        for _ in range(5):
            await comm.all_reduce_sum(np.ones(1000))
        await outcome(comm.all_gather_int(np.ones(3)))
        await comm.barrier()
        if comm.rank == 0:
            waiting = asyncio.ensure_future(comm.recv(1))
            await asyncio.sleep(0)
            found = samples(registry)
            await comm.channel("go").barrier()
            await waiting
            for rank in ("0", "1"):
                of = (("operation", "all_reduce_sum"), ("rank", rank))
                assert found["ruda_operation_seconds_count", of] == 5
                assert found["ruda_operation_seconds_sum", of] > 0
                assert found["ruda_operation_sent_bytes_total", of] == 5 * 8000
                assert found["ruda_operation_received_bytes_total", of] == 5 * 8000
                failed = (("operation", "all_gather_int"), ("rank", rank))
                assert found["ruda_operation_failures_total", failed] == 1
                peer = (("peer", str(1 - int(rank))), ("rank", rank))
                assert found["ruda_peer_sent_bytes_total", peer] >= 5 * 8000
                assert found["ruda_peer_received_messages_total", peer] > 5
                counts = [
                    value
                    for (name, labels), value in found.items()
                    if name == "ruda_operation_seconds_bucket" and set(of) <= set(labels)
                ]
                assert len(counts) == len(BOUNDS) + 1
                assert counts == sorted(counts)
                assert counts[-1] == 5
            assert found["ruda_in_flight", (("rank", "0"),)] >= 1
            assert found["ruda_oldest_in_flight_seconds", (("rank", "0"),)] >= 0
            assert found["ruda_lost_peers", (("rank", "0"),)] == 0
            text = prometheus_client.generate_latest(registry).decode()
            assert re.search(r'^ruda_operation_seconds_bucket\{.*le="4e-06".*\} ', text, re.MULTILINE)
            assert openmetrics(registry).endswith(b"# EOF\n")
        else:
            await comm.channel("go").barrier()
            await comm.send(np.ones(1), 0)
        await comm.barrier()

    await run_ranks(2, body, url=url)
    assert samples(registry) == {}  # closed


def test_every_bound_is_one_of_the_recorders() -> None:
    from ruda_async.observe.prometheus import BOUNDS
    from ruda_async.observe.recorder import _bound

    ours = [_bound(i) for i in range(104)]
    assert all(any(bound == pytest.approx(each, rel=1e-9) for each in ours) for bound in BOUNDS)
    assert BOUNDS[-1] > 60
