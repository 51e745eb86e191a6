"""Every call of torch.distributed on real processes, beside Gloo in the same processes."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'ruda-async[torch]'")

import ruda_async
import torch_checks
from support import SCHEMES, fresh_url

PROCESS_SCHEMES = [scheme for scheme in SCHEMES if scheme != "memory"]
#: One job for each transport: its processes run all checks, since starting them takes longest.
_results: dict[str, list[dict[str, str]]] = {}


def _failures(scheme: str) -> list[dict[str, str]]:
    if scheme not in _results:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _results[scheme] = ruda_async.spawn(torch_checks.run_checks, 3, fresh_url(scheme), timeout=240)
    return _results[scheme]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(torch_checks.CHECKS))
@pytest.mark.parametrize("scheme", PROCESS_SCHEMES)
def test_check(scheme: str, name: str) -> None:
    for rank, failures in enumerate(_failures(scheme)):
        if name in failures:
            pytest.fail(f"rank {rank}:\n{failures[name]}", pytrace=False)
