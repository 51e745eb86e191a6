"""Run by ``pytest --pyargs ruda_async.transport.conformance --ruda-url URL``."""

from __future__ import annotations

from typing import Any

import pytest

from . import SCENARIOS, run_scenario


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_conformance(name: str, pytestconfig: Any) -> None:
    """One promise of the transport that ``--ruda-url`` names."""
    url = pytestconfig.getoption("--ruda-url")
    if url is None:
        pytest.skip("name the transport with --ruda-url")
    run_scenario(name, url, ranks=pytestconfig.getoption("--ruda-ranks"))
