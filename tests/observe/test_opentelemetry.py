"""Spans around calls."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support import outcome, run_ranks

from ruda_async import AsyncCommunicator, TensorContractError

pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk for these tests")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ruda_async.observe.opentelemetry import instrument, uninstrument


async def test_spans_have_parents_and_attributes(url: str) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()  # before: no span
        instrument(comm, provider)
        side = comm.channel("side")

        async def request(name: str, channel: AsyncCommunicator) -> None:
            with tracer.start_as_current_span(f"{name} {comm.rank}"):
                await channel.all_reduce_sum(np.ones(10))

        await asyncio.gather(request("one", comm), request("two", side))
        error = await outcome(comm.all_reduce_sum("bad" if comm.rank else np.ones(1)))
        assert isinstance(error, TensorContractError)
        if comm.rank == 0:
            await comm.send(np.ones(3), 1, tag=4)
        else:
            await comm.recv(0, tag=4)
        uninstrument(comm)
        await comm.barrier()

    await run_ranks(2, body, url=url)
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert "ruda barrier" not in names
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    sums = [
        span
        for span in spans
        if span.name == "ruda all_reduce_sum" and span.status.status_code is StatusCode.UNSET
    ]
    assert len(sums) == 4
    for span in sums:
        attributes = dict(span.attributes or {})
        assert span.parent is not None
        parent = by_id[span.parent.span_id]
        channel = "main" if parent.name.startswith("one") else "side"
        assert attributes["ruda.channel"] == channel
        assert parent.name.endswith(str(attributes["ruda.rank"]))
        assert attributes["ruda.world_size"] == 2
        assert attributes["ruda.sequence"] == (1 if channel == "main" else 0)
        assert attributes["ruda.bytes_sent"] == attributes["ruda.bytes_received"] == 80
        assert parent.start_time is not None
        assert span.start_time is not None
        assert parent.start_time <= span.start_time
    failed = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert len(failed) == 2
    for span in failed:
        assert (span.attributes or {})["error.type"] == "TensorContractError"
        assert span.parent is None
        assert span.events[0].name == "exception"
    (sent,) = [span for span in spans if span.name == "ruda send"]
    assert dict(sent.attributes or {})["ruda.peer"] == 1
    assert dict(sent.attributes or {})["ruda.tag"] == 4
    assert dict(sent.attributes or {})["ruda.bytes_sent"] == 24
