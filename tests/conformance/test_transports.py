"""Every transport through one suite, with ranks in one loop, in threads and in processes."""

from __future__ import annotations

import pytest
from support import SCHEMES, fresh_url

from ruda_async.transport.conformance import SCENARIOS, run_scenario, run_scenarios

#: `auto` is made of the others, so the other tests do not run over it too.
ALL = (*SCHEMES, "auto")
RUNS = [(scheme, ranks) for scheme in ALL for ranks in ("loop", "threads")]
BETWEEN_PROCESSES = ["sizes", "flood_of_early_messages", "goodbye", "aborted_peer"]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize(("scheme", "ranks"), RUNS, ids=lambda value: value)
def test_conformance(scheme: str, ranks: str, name: str) -> None:
    run_scenario(name, fresh_url(scheme), ranks=ranks)


@pytest.mark.parametrize("scheme", [scheme for scheme in ALL if scheme != "memory"])
def test_conformance_between_processes(scheme: str) -> None:
    run_scenarios(BETWEEN_PROCESSES, fresh_url(scheme), ranks="processes")


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
