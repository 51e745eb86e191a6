"""The training examples do what they say, in small; in full under the marker `long`."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rank_threads import in_threads

import ruda_async
from ruda_async import moe, sync

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = EXAMPLES / "train_digits_moe.py"
TRANSFORMER = EXAMPLES / "train_tiny_transformer_ep.py"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of the examples, which a later test imports afresh."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("digits_moe", DIGITS.stem, TRANSFORMER.stem):
            del sys.modules[name]


@pytest.fixture
def digits_moe(examples: Callable[[str], ModuleType]) -> ModuleType:
    return examples("digits_moe")


@pytest.fixture
def in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs a program's `main`, ranks as threads since processes are slow to import torch; its output."""
    spawn, threads = ruda_async.spawn, torch.get_num_threads()

    def start(function: Callable[..., Any], ranks: int, url: str, args: tuple[Any, ...]) -> list[Any]:
        return spawn(function, ranks, url, args=args, threads=True)

    def run_main(program: ModuleType, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(program.__file__), *map(str, arguments)])
        status = program.main()
        output = capsys.readouterr().out
        assert status == 0, output
        return output

    monkeypatch.setattr(ruda_async, "spawn", start)
    yield run_main
    torch.set_num_threads(threads)


async def run(limit: float, *arguments: object) -> str:
    """A program's output; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), limit)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode() + errors.decode()
    return output.decode()


def visits(text: str) -> list[int]:
    match = re.search(r"tokens per expert +([\d ]+)\(", text)
    assert match is not None, text
    return [int(word) for word in match[1].split()]


def test_digits_in_small_and_what_they_save(
    examples: Callable[[str], ModuleType],
    digits_moe: ModuleType,
    in_one_process: Callable[..., str],
    tmp_path: Path,
) -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    path = tmp_path / "digits.npz"
    arguments = ("--epochs", 2, "--ranks", 2, "--quick", "--save", path)
    text = in_one_process(examples(DIGITS.stem), *arguments)
    assert sum(visits(text)) == 2 * 359  # no token is dropped
    assert re.search(r"communication +\d+% of a step's [\d.]+ ms", text), text
    accuracy = re.search(r"held-out accuracy +([\d.]+)%", text)
    assert accuracy is not None

    model = digits_moe.load(path)
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(2024).permutation(len(images))[:359]

    def guess(comm: sync.Communicator) -> Any:
        with torch.no_grad():
            layout = moe.ExpertLayout.even(8, 1)
            return model(digits_moe.prepare(images[order], model.mean.numpy()), comm, layout).argmax(1)

    (guesses,) = in_threads(1, guess)
    right = float((guesses.numpy() == labels[order]).mean())
    assert 100 * right == pytest.approx(float(accuracy[1]), abs=0.3)  # a rounding may move one image


def test_a_saved_model_is_whole_and_loads_in_parts(digits_moe: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    sizes = digits_moe.Sizes(experts=6, chosen=2, width=5, hidden=3)
    images = torch.rand(7, digits_moe.PIXELS, generator=torch.Generator().manual_seed(1))

    def store(comm: sync.Communicator) -> Any:
        layout = moe.ExpertLayout.even(6, 3)
        model = digits_moe.DigitsMoE(sizes, layout.local(comm.rank))
        generator = torch.Generator().manual_seed(0)
        for p in [*model.input.parameters(), *model.router.parameters(), *model.output.parameters()]:
            p.data = torch.randn(p.shape, generator=generator)
        digits_moe.save(path, model, comm)
        with torch.no_grad():
            return model(images, comm, layout)

    expected = in_threads(3, store)[0]
    with np.load(path, allow_pickle=False) as file:
        assert str(file["format"]) == "digits_moe/1"
        assert file["sizes"].tolist() == [6, 2, 5, 3]
        assert file["experts.5.up.weight"].shape == (3, 5)
        assert len(file.files) == 2 + 1 + 2 + 1 + 2 + 12

    def serve(comm: sync.Communicator) -> None:
        layout = moe.ExpertLayout.even(6, 2)
        model = digits_moe.load(path, layout.local(comm.rank))
        assert list(model.experts) == [str(n) for n in layout.local(comm.rank)]
        with torch.no_grad():
            torch.testing.assert_close(model(images, comm, layout), expected)

    in_threads(2, serve)
    with pytest.raises(ValueError, match="experts 0 to 5"):
        digits_moe.load(path, range(4, 8))
    np.savez(tmp_path / "other.npz", format=np.array("other"))
    with pytest.raises(ValueError, match="not of the format"):
        digits_moe.load(tmp_path / "other.npz")


def test_the_transformer_in_small_equals_one_process(
    examples: Callable[[str], ModuleType],
    in_one_process: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = examples(TRANSFORMER.stem)
    init, lock = program.Decoder.__init__, threading.Lock()

    def alone(self: Any, *args: Any) -> None:
        with lock:  # the threads share torch's random numbers
            init(self, *args)

    monkeypatch.setattr(program.Decoder, "__init__", alone)
    text = in_one_process(program, "--steps", 3, "--check")
    match = re.search(r"against one process +(\S+) largest relative difference", text)
    assert match is not None, text
    assert float(match[1]) <= 1e-9


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [[sys.executable], [sys.executable, "-m", "ruda_async", "run", "-n", "4"]],
    ids=["python", "ruda-async run"],
)
async def test_digits_in_full(command: list[str]) -> None:
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    text = await run(800, *command, DIGITS)
    accuracy = re.search(r"held-out accuracy +([\d.]+)%", text)
    assert accuracy is not None, text
    assert float(accuracy[1]) > 95


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "command",
    [[sys.executable], [sys.executable, "-m", "ruda_async", "run", "-n", "4"]],
    ids=["python", "ruda-async run"],
)
async def test_the_transformer_in_full(command: list[str]) -> None:
    text = await run(1400, *command, TRANSFORMER, "--check")
    assert "against one process" in text
