"""The README's examples, and the whole programs of other pages, are scripts that run as they stand."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def scripts(page: str) -> list[str]:
    """The Python blocks of a page that import what they use; the others are fragments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if re.search("^import ", block, re.MULTILINE)]


#: What each script prints, in any order.
EXPECTED = {
    "README.md": [
        [f"rank {rank}: sum 10.0, mean 2.5, rows from 4 ranks" for rank in range(4)],
        [f"rank {rank} of 2: [0, 1]" for rank in range(2)],
    ],
    "docs/autograd.md": [["rank 0: [10.0, 10.0]", "rank 1: [20.0, 20.0]"]],
    "docs/training.md": [["rank 0: [2.5, 2.5]", "rank 1: [2.5, 2.5]"], ["loss 0.0000"]],
    "docs/recovery.md": [[f"rank {rank} of 3: 5 steps, total 15.0" for rank in range(3)]],
    "docs/torch_backend.md": [[f"rank {rank}: [2.5, 2.5]" for rank in range(2)]],
    "docs/moe.md": [["rank 0: 3 tokens, experts [0, 1]", "rank 1: 4 tokens, experts [2, 3]"]],
}

CASES = [
    pytest.param(block, expected, id=f"{Path(page).stem}-{number}")
    for page, outputs in EXPECTED.items()
    for number, (block, expected) in enumerate(zip(scripts(page), outputs, strict=True))
]


@pytest.mark.parametrize(("block", "expected"), CASES)
async def test_example_runs(block: str, expected: list[str], tmp_path: Path) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    script = tmp_path / "example.py"
    script.write_text(block, encoding="utf-8")
    # Ranks share the output: unbuffered, a line and its end would be written apart, and interleave.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 50)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    assert sorted(output.decode().splitlines()) == expected


def test_opens_with_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    demo, suite = "\npip install tox && tox run -e demo\n", "\npip install tox && tox run\n"
    assert 0 < text.index(demo) < text.index(suite) < text.index("```python")
