"""Every call of torch.distributed on real processes, and what torch builds on them, beside Gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'ruda-async[torch]'")

import torch_checks
import torch_training_checks
from support import BETWEEN_PROCESSES, fresh_url

import ruda_async

#: One job for each transport: its processes run all checks, since starting them takes longest.
_results: dict[Any, list[dict[str, str]]] = {}


def _expect_none(scheme: str, name: str, checks: Any, world_size: int) -> None:
    key = scheme, world_size
    if key not in _results:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _results[key] = ruda_async.spawn(
            torch_checks.run_checks, world_size, fresh_url(scheme), args=(checks,), timeout=500
        )
    failed = [
        f"rank {rank}:\n{failures[name]}" for rank, failures in enumerate(_results[key]) if name in failures
    ]
    if failed:  # all of them: one rank's failure makes the others fail
        pytest.fail("\n".join(failed), pytrace=False)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(torch_checks.CHECKS))
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_calls(scheme: str, name: str) -> None:
    _expect_none(scheme, name, torch_checks.CHECKS, 3)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(torch_training_checks.CHECKS))
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_training(scheme: str, name: str) -> None:
    _expect_none(scheme, name, torch_training_checks.CHECKS, 4)
