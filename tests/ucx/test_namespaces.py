"""Which ranks UCX must not link through memory, and what of it is left to who gives `tls` himself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from ruda_ucx import UcxParameters
from ruda_ucx.namespaces import NAMESPACES_BYTES, divided, memory_unasked, namespaces, without_memory
from support import fresh_url


def place(ipc: str, pid: str, network: str) -> bytes:
    """What a rank there tells."""
    return "".join(name.ljust(8) for name in (ipc, pid, network)).encode()


HOST = place("i", "p", "n")
#: A rank that sums more than a small message carries.
RANK = """
import asyncio, sys, numpy, ruda_async
async def main():
    async with ruda_async.connect(sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=30) as comm:
        print((await comm.all_reduce_sum(numpy.ones(100_000)))[-1])
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param([HOST], False, id="one host"),
        pytest.param([place("I", "P", "N")], False, id="two containers with nothing in common"),
        pytest.param([place("i", "P", "N")], True, id="the memory of System V"),
        pytest.param([place("i", "P", "n")], True, id="the memory of System V, and one network"),
        pytest.param([place("I", "p", "N")], True, id="the memory of processes"),
        pytest.param([HOST, place("I", "P", "N"), place("I", "p", "N")], True, id="two of many"),
        pytest.param([place("I", "P", "n")], False, id="one network"),
        pytest.param([b""], False, id="unknown"),
        pytest.param([place("p", "i", "N")], False, id="an IPC namespace is no PID namespace"),
    ],
)
def test_ranks_are_divided_by_networks_and_processes_where_they_share_memory(
    others: list[bytes], expected: bool
) -> None:
    assert divided([HOST, *others]) is divided([*others, HOST]) is expected


def test_every_process_of_a_host_tells_the_same() -> None:
    assert len(namespaces()) == NAMESPACES_BYTES
    assert namespaces() == namespaces()


def test_what_the_user_says_of_transports_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert memory_unasked(UcxParameters())
    assert not memory_unasked(UcxParameters(tls="posix,tcp"))
    monkeypatch.setenv("UCX_TLS", "posix,tcp")
    assert not memory_unasked(UcxParameters())
    left = without_memory(UcxParameters(net_devices="lo", chunk_bytes=4096))
    assert (left.tls, left.net_devices, left.chunk_bytes) == ("^sm", "lo", 4096)


def test_containers_with_one_ipc_namespace_and_process_ids_of_their_own() -> None:
    pytest.importorskip("ucxx", reason="pip install 'ruda-async[ucx]'")
    isolated = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here; run as root, with util-linux")
    # Another number of processes before each: a peer's process ID is nobody's here.
    shell = 'for i in $(seq $1); do /bin/true; done; "$2" -c "$3" "$4" "$5"; exit $?'
    environment = os.environ | {"RUDA_SECRET": "a secret of the tests alone", "OMP_NUM_THREADS": "1"}
    url = fresh_url("ucx")
    ranks = [
        subprocess.Popen(
            [*isolated, "sh", "-c", shell, "sh", str(40 * rank), sys.executable, RANK, url, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in said] == [b"2.0\n"] * 2, said
