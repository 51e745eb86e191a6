"""Every transport through one suite, with ranks in one loop, in threads and in processes."""

from __future__ import annotations

import pytest
from support import fresh_url

from ruda_async.transport.conformance import SCENARIOS, run_scenario

IN_LOOP = [("memory", "loop"), ("memory", "threads"), ("tcp", "loop"), ("tcp", "threads")]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize(("scheme", "ranks"), IN_LOOP, ids="-".join)
def test_conformance(scheme: str, ranks: str, name: str) -> None:
    run_scenario(name, fresh_url(scheme), ranks=ranks)


@pytest.mark.parametrize("name", ["sizes", "flood_of_early_messages", "goodbye", "aborted_peer"])
def test_conformance_between_processes(name: str) -> None:
    run_scenario(name, fresh_url("tcp"), ranks="processes")


def test_a_broken_transport_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: a transport that damages one byte does not pass."""
    from ruda_async.transport import matching

    honest = matching.scatter

    def damaging(data: memoryview, buffers: object) -> None:
        honest(data, buffers)  # type: ignore[arg-type]
        if len(data) > 1000:
            buffers[0][7] ^= 1  # type: ignore[index]

    monkeypatch.setattr("ruda_memory.link.scatter", damaging)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_scenario("sizes", fresh_url("memory"))
