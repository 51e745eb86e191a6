"""The pattern of docs/autograd.md for errors of a user's own between two collectives of forward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from rank_threads import in_threads
from torch import Tensor, nn

from ruda_async import autograd, sync
from ruda_async.training import GradientSync

PAGE = Path(__file__).parents[2] / "docs" / "autograd.md"


def _agreed() -> Any:
    """The function as the page has it."""
    found = re.search(r"```python\n(def agreed\(.*?)\n\n\nx = ", PAGE.read_text(), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names["agreed"]


def test_an_error_between_two_collectives_is_one_on_all_ranks(url: str) -> None:
    agreed = _agreed()

    def body(comm: sync.Communicator) -> list[str]:
        net = nn.Linear(2, 2).double()
        gradients = GradientSync(net, comm)
        seen = []

        def layer(x: Tensor, step: int) -> Tensor:
            if step == 1 and comm.rank == 1:
                raise ValueError("no such word")
            return x * 2

        for step in range(3):
            net.zero_grad()
            try:
                x = autograd.all_gather(comm, net(torch.ones(1, 2, dtype=torch.float64)))
                x = agreed(comm, layer, x, step)
                gradients.backward(autograd.reduce_scatter_sum(comm, x).sum())
                seen.append("done")
            except (ValueError, RuntimeError) as error:
                gradients.abandon(error)
                seen.append(str(error))
        assert comm.stats()["in_flight"] == 0
        return seen

    results = in_threads(3, body, url, timeout=20)
    assert results[1] == ["done", "no such word", "done"]
    told = "rank 1 gave this step up: ValueError: no such word"
    assert results[0] == results[2] == ["done", told, "done"]
