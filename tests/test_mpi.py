"""``mpi://`` with ranks that mpiexec starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Not here: MPI is started by being loaded, and this process starts others.
LOADS = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True).returncode == 0
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
MPIEXEC = shutil.which("mpiexec", path=PATH)

pytestmark = [
    pytest.mark.skipif(not LOADS, reason="needs MPI: pip install mpi4py mpich"),
    pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec: pip install mpich"),
    pytest.mark.timeout(170),
]

BODIES = str(Path(__file__).with_name("mpi_bodies.py"))
TOGETHER = [
    "natively",
    "by_our_own_algorithms",
    "many_channels_at_once",
    "failures",
    "connecting_again",
    "parameters_that_differ",
    "who_does_not_come",
    "waiting_is_cheap",
    "blocking_calls",
    "no_newcomers",
    "a_rank_ends_without_closing",  # the last: rank 2 makes no more calls
]
QUICK = ["sizes", "flood_of_early_messages", "receive_cancelled_in_the_middle", "goodbye", "aborted_peer"]


def mpiexec(ranks: int, *arguments: str, limit: float = 150, options: Sequence[str] = ()) -> str:
    """Run Python on so many ranks; what they print. A rank that fails fails the test."""
    status, printed, errors = run(ranks, *arguments, limit=limit, options=options)
    assert status == 0, printed[-5000:] + errors[-10000:]
    return printed


def run(
    ranks: int, *arguments: str, limit: float, options: Sequence[str] = ()
) -> tuple[int | None, str, str]:
    """Run Python on so many ranks: the exit status (None after `limit` seconds), and what they print."""
    assert MPIEXEC is not None
    command = [MPIEXEC, *options, "-n", str(ranks), sys.executable, *arguments]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI", "RUDA_"))}
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    )
    try:
        printed, errors = started.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        started.terminate()  # which mpiexec passes on to the ranks
        printed, errors = started.communicate()
        return None, printed, errors
    return started.returncode, printed, errors


@pytest.fixture(scope="module")
def together() -> tuple[int | None, str, str]:
    """One run of all of `TOGETHER`, since starting four ranks takes longer than most of them."""
    return run(4, BODIES, *TOGETHER, limit=150)


@pytest.mark.parametrize("body", TOGETHER)
def test_four_ranks(body: str, together: tuple[int | None, str, str]) -> None:
    status, printed, errors = together
    if printed.count(f"{body}: passed") < 4:
        first = next(name for name in TOGETHER if printed.count(f"{name}: passed") < 4)
        if body != first:
            pytest.fail(f"not reached: {first} failed", pytrace=False)
        late = " (time was up)" if status is None else ""
        pytest.fail(f"exit status {status}{late}\n{printed[-5000:]}{errors[-10000:]}", pytrace=False)
    if body == TOGETHER[-1]:
        assert status == 0, errors[-10000:]


def test_a_rank_that_dies() -> None:
    assert MPIEXEC is not None
    told = subprocess.run([MPIEXEC, "-help"], capture_output=True, text=True).stdout
    if "-disable-auto-cleanup" not in told:
        pytest.skip("needs an mpiexec that lets ranks outlive others: pip install mpich")
    mpiexec(4, BODIES, "a_rank_dies", options=["-disable-auto-cleanup"])


def test_conformance() -> None:
    printed = mpiexec(3, "-m", "ruda_async.transport.conformance", "mpi://lab", *QUICK)
    assert printed.count(": passed") == 2 * len(QUICK) + 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_conformance_suite() -> None:
    printed = mpiexec(5, "-m", "ruda_async.transport.conformance", "mpi://lab", limit=800)
    assert printed.count("everyone_to_everyone: passed") == 5


def test_a_rank_of_its_own_needs_no_mpiexec() -> None:
    """A single process is a world of one."""
    code = "import ruda_async\nwith ruda_async.sync.connect('mpi://') as comm: print(comm.world_size)"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI", "RUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=clean, check=True
    )
    assert done.stdout.strip() == "1"


def test_the_doctor_tests_it() -> None:
    code = (
        "import json\n"
        "from ruda_async.cli import doctor\n"
        "from ruda_async.transport import registry\n"
        "known = {'mpi': registry.plugins()['mpi']}\n"
        "doctor.plugins = lambda: known\n"
        "print(json.dumps(doctor.examine()['transports'][0]))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI", "RUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | {"PATH": PATH},
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["status"] == "works", found
    assert 0 < found["latency"] < 1
