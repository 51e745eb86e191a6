"""Which ranks UCX must not link through memory, and what of it is left to who gives `tls` himself."""

from __future__ import annotations

import pytest
from ruda_ucx import UcxParameters
from ruda_ucx.namespaces import NAMESPACES_BYTES, divided, memory_unasked, namespaces, without_memory


def place(ipc: str, pid: str, network: str) -> bytes:
    """What a rank there tells."""
    return "".join(name.ljust(8) for name in (ipc, pid, network)).encode()


HOST = place("i", "p", "n")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param([HOST], False, id="one host"),
        pytest.param([place("I", "P", "N")], False, id="two containers with nothing in common"),
        pytest.param([place("i", "P", "N")], True, id="the memory of System V"),
        pytest.param([place("I", "p", "N")], True, id="the memory of processes"),
        pytest.param([HOST, place("I", "P", "N"), place("I", "p", "N")], True, id="two of many"),
        pytest.param([place("I", "P", "n")], False, id="one network"),
        pytest.param([b""], False, id="unknown"),
        pytest.param([place("p", "i", "N")], False, id="an IPC namespace is no PID namespace"),
    ],
)
def test_ranks_are_divided_by_networks_alone_where_they_share_memory(
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
