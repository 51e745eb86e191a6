"""The README's examples are scripts, and run as they stand."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)

#: What each block prints, in any order.
EXPECTED = [
    [f"rank {rank}: sum 10.0, mean 2.5, rows from 4 ranks" for rank in range(4)],
    [f"rank {rank} of 2: [0, 1]" for rank in range(2)],
]


@pytest.mark.parametrize(
    ("block", "expected"), list(zip(BLOCKS, EXPECTED, strict=True)), ids=["async", "sync"]
)
async def test_example_runs(block: str, expected: list[str], tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 0, errors.decode()
    assert sorted(output.decode().splitlines()) == expected


def test_opens_with_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    demo, suite = "\npip install tox && tox run -e demo\n", "\npip install tox && tox run\n"
    assert 0 < text.index(demo) < text.index(suite) < text.index("```python")
