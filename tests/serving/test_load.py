"""The load test, in short: every variant answers everything, and rightly."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from serving_support import EXAMPLES


@pytest.mark.parametrize(
    ("variant", "how"),
    [
        *((variant, "--clients=64") for variant in ("shm", "tcp", "gloo in threads", "one process")),
        ("shm", "--rate=40"),
    ],
)
@pytest.mark.timeout(600)  # each process imports torch
async def test_nothing_is_lost_and_nothing_wrong(model: Path, variant: str, how: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / "serve_moe" / "load.py"), "--model", str(model)),
        *(how, "--seconds", "2", "--ranks", "3", "--rows", "3", "--variants", variant),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 500)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    row = re.search(rf"^\| {variant} \| (\d+) \|.*\| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert row is not None, text
    rate, lost, wrong, refused = map(int, row.groups())
    assert rate > 0
    assert (lost, wrong, refused) == (0, 0, 0)
