"""Calls given up in their midst, in real processes: all others stay right."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
from support import BETWEEN_PROCESSES, fresh_url

#: How calls that were given up, here or elsewhere, end.
WAYS = {"right", "TimeoutError", "CancelledError", "CollectiveCancelledError", "CollectiveTimeoutError"}
PROGRAM = str(Path(__file__).parents[1] / "cancel_ranks.py")


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_large_calls_that_are_given_up(scheme: str, seed: int) -> None:
    """Every way of giving up was seen, and the calls after and beside it were right."""
    url, world = fresh_url(scheme), 3
    tail = [str(world), "15", str(seed)]
    ranks = [
        subprocess.Popen([sys.executable, PROGRAM, url, str(rank), *tail], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world
    ends = [literal_eval(text) for text in said]
    for rank in ends:
        assert rank.pop("bystander") > 50, ends
        assert rank.keys() <= WAYS, ends
    # Of all ranks: a slow machine makes few calls, and one of them may miss a way.
    assert set().union(*ends) == WAYS, ends
