"""How process groups begin and end: torch's ways to meet and this library's, lost ranks, torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'ruda-async[torch]'")

from support import free_port

RANKS = str(Path(__file__).with_name("torch_ranks.py"))
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def _environ(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RUDA_") and k not in LAUNCHER}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def _run(world_size: int, *arguments: str, **variables: str) -> None:
    """Start ranks as torchrun would, and see that each ends well."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, RANKS, *arguments],
            env=_environ(**place, RANK=str(rank), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    told = "\n".join(f"rank {number}:\n{output}" for number, output in enumerate(outputs))
    assert [rank.returncode for rank in ranks] == [0] * world_size, told


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_way_to_meet(tmp_path: Path) -> None:
    _run(2, "meet", str(tmp_path), str(free_port()), str(free_port()))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("url", ["", "shm://"])
def test_a_lost_rank_fails_the_others_at_once(url: str) -> None:
    _run(3, "die", RUDA_URL=url)


@pytest.mark.timeout(300)
def test_a_script_that_forgets_to_destroy_its_group_ends() -> None:
    _run(2, "leave")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_torchrun() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(RANKS, "leave"),
        ],
        env=_environ(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"rank 0 done", "rank 1 done"} <= set(done.stdout.splitlines())
