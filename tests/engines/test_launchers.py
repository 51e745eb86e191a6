"""One unchanged program under each engine that places ranks: real launchers, or for Slurm its variables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ruda_async.bench.peers import find_mpiexec
from ruda_async.environment import from_environment

#: Two collectives in each of the two worlds, then a line that says who this is.
PROGRAM = """
import asyncio, os, sys
import numpy as np
import ruda_async

with ruda_async.sync.connect(timeout=60) as comm:
    total = comm.all_reduce_sum(np.arange(3) + comm.rank).tolist()

async def main():
    async with ruda_async.connect(timeout=60) as comm:
        return comm.rank, comm.world_size, (await comm.all_gather_int(np.array([comm.rank]))).tolist()

os.write(1, f"{total} {asyncio.run(main())}\\n".encode())  # at once, so that lines of ranks do not mix
"""
#: As above; rank 1 of the first worker group dies when all have joined.
ELASTIC = """
import os
import numpy as np
import ruda_async

restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with ruda_async.sync.connect(timeout=60) as comm:
    comm.barrier()
    if restart == 0 and comm.rank == 1:
        os._exit(7)
    total = comm.all_reduce_sum(np.arange(3) + comm.rank).tolist()
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.write(1, f"restart {restart} {comm.rank} {total} {comm.describe()['transport']['job']}\\n".encode())
"""
OWN = ("RUDA_", "SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def bare() -> dict[str, str]:
    """This environment without what any launcher has set."""
    return {key: value for key, value in os.environ.items() if not key.startswith(OWN)}


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def run(*command: str, code: int = 0, **variables: str) -> list[str]:
    """What the ranks printed, sorted."""
    done = subprocess.run(
        command, env=bare() | variables, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


def expected(size: int) -> list[str]:
    extra = size * (size - 1) // 2
    total = [n * size + extra for n in range(3)]
    return [f"{total} ({rank}, {size}, {list(range(size))})" for rank in range(size)]


def torchrun(*options: str) -> list[str]:
    pytest.importorskip("torch", reason="needs torchrun: pip install 'ruda-async[torch]'")
    return [sys.executable, "-m", "torch.distributed.run", *options]


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "rendezvous",
    [
        ["--standalone"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "lab"],
        ["--master-addr", "127.0.0.1", "--master-port", "0"],
    ],
    ids=["standalone", "c10d", "static"],
)
def test_torchrun(script: Callable[[str], str], rendezvous: list[str]) -> None:
    if rendezvous[-1] == "0":
        from support import free_port

        rendezvous = [*rendezvous[:-1], str(free_port())]
    lines = run(*torchrun(*rendezvous, "--nproc-per-node", "3", script(PROGRAM)), OMP_NUM_THREADS="1")
    assert lines == expected(3)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_restarted_worker_group_is_a_job_of_its_own(script: Callable[[str], str]) -> None:
    lines = run(
        *torchrun("--standalone", "--nproc-per-node", "3", "--max-restarts", "2", script(ELASTIC)),
        OMP_NUM_THREADS="1",
    )
    jobs = {line.split()[-1] for line in lines}
    assert [line.rsplit(" ", 1)[0] for line in lines] == [f"restart 1 {rank} [3, 6, 9]" for rank in range(3)]
    assert len(jobs) == 1
    assert jobs.pop().endswith("-1")  # the former group's stragglers, of job …-0, would be refused


@pytest.mark.timeout(120)
@pytest.mark.parametrize("url", [None, "shm://under-mpiexec"])
def test_mpiexec(script: Callable[[str], str], url: str | None) -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("needs an MPI launcher: pip install mpich")
    if url is not None and not hasattr(os, "memfd_create"):
        pytest.skip("shm:// needs Linux")
    variables = {} if url is None else {"RUDA_URL": url}
    assert run(mpiexec, "-n", "3", sys.executable, script(PROGRAM), **variables) == expected(3)


def slurm(rank: int, size: int, nodes: str, count: int) -> dict[str, str]:
    """What srun sets for one task of a step, as slurmstepd of Slurm 23 does."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOBID": str(os.getpid()),
        "SLURM_STEP_ID": "3",
        "SLURM_STEPID": "3",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_NPROCS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_NNODES": str(count),
        "SLURM_LOCALID": str(rank % -(-size // count)),
        "SLURM_NODEID": str(rank * count // size),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": f"unused[1-2],{nodes}",
    }


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("nodes", "count", "size"),
    [("127.0.0.[1-2]", 2, 4), ("localhost,127.0.0.[2,9]", 3, 3), ("whatever[07-09]", 1, 2)],
    ids=["range", "list", "one-node"],
)
def test_slurm_steps(script: Callable[[str], str], nodes: str, count: int, size: int) -> None:
    path = script(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, path],
            env=bare() | slurm(rank, size, nodes, count),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        deadline = time.monotonic() + 150
        outputs = [process.communicate(timeout=deadline - time.monotonic()) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * size, outputs
    assert sorted(line for out, _ in outputs for line in out.splitlines()) == expected(size)


def test_two_steps_of_one_allocation_do_not_meet() -> None:
    first = slurm(0, 4, "n[1-2]", 2)
    second = {**first, "SLURM_STEP_ID": "4", "SLURM_STEPID": "4"}
    jobs = [from_environment(variables) for variables in (first, second)]
    assert jobs[0].host == jobs[1].host == "n1"
    assert jobs[0].name != jobs[1].name
    assert jobs[0].ports != jobs[1].ports
