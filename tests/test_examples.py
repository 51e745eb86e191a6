"""The demo trains what it says it trains."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import fresh_url

import ruda_async

torch = pytest.importorskip("torch")

DEMO = Path(__file__).parents[1] / "examples" / "train_digits.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_digits"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def batch_of(demo: ModuleType, tokens: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(tokens, demo.PIXELS, generator=generator, dtype=torch.float64)
    return images, torch.randint(demo.CLASSES, (tokens,), generator=generator)


def plain_gradients(
    demo: ModuleType, p: dict[str, Any], images: Any, labels: Any
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by autograd alone, every expert applied to every token."""
    p = {name: value.clone().requires_grad_() for name, value in p.items()}
    tokens = demo.input_layer(p, images)
    weights, chosen = demo.route(p, tokens)
    gates = torch.zeros(len(tokens), demo.EXPERTS, dtype=torch.float64).scatter(1, chosen, weights)
    answers = torch.stack([demo.expert(p, index, tokens) for index in range(demo.EXPERTS)])
    loss = demo.loss_of(p, tokens + torch.einsum("te,etw->tw", gates, answers), labels)
    loss.backward()
    return loss.item(), {name: value.grad for name, value in p.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
def test_a_sharded_step_has_the_gradients_of_plain_autograd(
    demo: ModuleType, ranks: int, crowded: bool
) -> None:
    whole = demo.initial_parameters()
    if crowded:  # every token chooses the first two experts: the other ranks get no rows at all
        whole["router"][:, 0] += 10
        whole["router"][:, 1] += 5
    images, labels = batch_of(demo, 24)
    loss, gradients = plain_gradients(demo, whole, images, labels)
    url, local = fresh_url("memory"), demo.EXPERTS // ranks

    def run(rank: int) -> tuple[float, dict[str, Any]]:
        mine = slice(rank * local, (rank + 1) * local)
        p = {n: (v[mine] if n in demo.SHARDED else v).clone().requires_grad_() for n, v in whole.items()}
        with ruda_async.sync.connect(url, rank=rank, world_size=ranks, timeout=20) as comm:
            step = demo.sharded_step(
                demo.Timed(comm), p, images.chunk(ranks)[rank], labels.chunk(ranks)[rank]
            )
        return step, {name: value.grad for name, value in p.items()}

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    for rank, (step, found) in enumerate(results):
        assert step == pytest.approx(loss, rel=1e-13)
        for name, expected in gradients.items():
            mine = expected[rank * local : (rank + 1) * local] if name in demo.SHARDED else expected
            torch.testing.assert_close(found[name], mine, rtol=1e-11, atol=1e-14, msg=f"{name}, rank {rank}")


@pytest.mark.timeout(120)  # three processes import torch
async def test_the_demo_agrees_with_one_process() -> None:
    pytest.importorskip("sklearn")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(str(DEMO), "--epochs", "1", "--ranks", "2", "--quick"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 110)
    text = output.decode()
    assert process.returncode == 0, text + errors.decode()
    match = re.search(r"against one process +(\S+) largest relative difference in loss \(bound (\S+)\)", text)
    assert match is not None, text
    assert 0 <= float(match[1]) <= float(match[2]) == pytest.approx(2**-23, rel=0.05)
    counts = re.search(r"tokens per expert +([\d ]+)\(", text)
    assert counts is not None, text
    assert sum(map(int, counts[1].split())) == 2 * 359  # no token is dropped
    assert "\x1b" not in text  # no terminal codes where there is no terminal


@pytest.mark.parametrize(
    ("losses", "correct", "arguments", "code"),
    [
        ([1.0, 1.0], 98, [], 0),
        ([1.0 + 2e-7, 1.0 + 2e-7], 98, [], 1),
        ([1.0, 1.0 + 1e-15], 98, [], 1),
        ([float("nan"), float("nan")], 98, [], 1),
        ([1.0, 1.0], 95, [], 1),
        ([1.0, 1.0], 10, ["--quick"], 0),
    ],
    ids=["good", "other losses", "other bits on a rank", "nan", "inaccurate", "quick"],
)
def test_the_demo_judges_itself(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    losses: list[float],
    correct: int,
    arguments: list[str],
    code: int,
) -> None:
    reports = [demo.Report([2.0, last], correct, [1, 2, 3, 4], 0.1, 0.2) for last in losses]
    monkeypatch.setattr(ruda_async, "spawn", lambda *args, **options: reports)
    monkeypatch.setattr(demo, "load_data", lambda: {"test_y": [0] * 100})
    monkeypatch.setattr(demo, "train_alone", lambda data, epochs: [2.0, 1.0])
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    assert demo.main() == code
