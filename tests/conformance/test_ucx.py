"""``ucx://`` through the suite of all transports, in each of its ways to make progress."""

from __future__ import annotations

import pytest
from support import fresh_url

from ruda_async.transport.conformance import SCENARIOS, run_scenario, run_scenarios

pytest.importorskip("ucxx", reason="pip install 'ruda-async[ucx]'")

WAYS = ["blocking", "polling", "thread"]
BETWEEN_PROCESSES = ["sizes", "flood_of_early_messages", "goodbye", "aborted_peer", "both_ways_at_once"]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("progress", WAYS)
def test_in_one_loop(progress: str, name: str) -> None:
    run_scenario(name, f"{fresh_url('ucx')}?progress={progress}")


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_in_threads(name: str) -> None:
    run_scenario(name, fresh_url("ucx"), ranks="threads")


@pytest.mark.parametrize("query", ["", "?progress=thread", "?tls=tcp"])
def test_between_processes(query: str) -> None:
    run_scenarios(BETWEEN_PROCESSES, fresh_url("ucx") + query, ranks="processes")
