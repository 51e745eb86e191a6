"""The benchmarks run, in small: what nobody starts for weeks must not have broken meanwhile."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "autograd_overhead": ["--rounds", "2", "--calls", "2"],
    "ddp": ["--parameters", "20000", "--rounds", "2"],
    "gradient_sync": ["--width", "32", "--layers", "2", "--batch", "4", "--rounds", "2"],
    "growth": ["--ranks", "2", "--calls", "1", "--page", "-"],
    "moe_layer": ["--ranks", "2", "--tokens", "16", "--width", "32", "--rounds", "2", "--calls", "1"],
    "recorder": [],
}
WITH_TORCH = {"autograd_overhead", "ddp", "gradient_sync", "moe_layer"}


def test_every_benchmark_is_run_here() -> None:
    assert set(SMALL) == {path.stem for path in FOLDER.glob("*.py")} - {"alternating"}  # a part of others


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [name if name == "growth" else pytest.param(name, marks=pytest.mark.long) for name in SMALL]
)
def test_it_runs(name: str) -> None:
    if name in WITH_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert any(unit in done.stdout for unit in ("µs", " us", " ms", "%")), done.stdout
