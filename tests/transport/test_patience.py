"""How long a blocking call looks before it sleeps."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from ruda_tcp.looking import Lookout, spin_of

from ruda_async.transport import Spin


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
    with dialled, accepted:
        yield dialled, accepted


@pytest.fixture
def cores(monkeypatch):
    """Sets how many cores this process may use."""

    def set_to(number):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)), raising=False)

    return set_to


def test_ranks_with_a_core_each_look_and_others_do_not(cores):
    cores(4)
    assert [Spin.of(-1, ranks).blocking > 0 for ranks in (1, 4, 5)] == [True, True, False]
    assert Spin.of(0.5, 5) == (0.5, 0.5)


def test_without_affinity_all_cores_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [Spin.of(-1, ranks).blocking > 0 for ranks in (2, 3)] == [True, False]


def test_peers_of_this_host_count_and_others_do_not(pair, cores):
    cores(2)
    local = pair[0]

    class Remote:
        def getsockname(self):
            return ("192.0.2.1", 1)

        def getpeername(self):
            return ("192.0.2.2", 1)

    assert spin_of(-1, {1: local, 2: Remote(), 3: Remote()}) > 0
    assert spin_of(-1, {1: local, 2: local}) == 0
    assert spin_of(0.0007, {1: local, 2: local}) == 0.0007


@pytest.mark.parametrize("spin", [0.0, 0.0005])
def test_waiting_ends_with_bytes_with_the_end_or_with_the_time(pair, spin):
    ours, theirs = pair
    lookout = Lookout(ours, spin)
    assert not lookout.wait(0.002)
    sender = threading.Timer(0.05, theirs.sendall, (b"x",))
    sender.start()
    assert lookout.wait(30)
    sender.join()
    assert ours.recv(10) == b"x"
    assert not lookout.wait(0)
    theirs.close()
    assert lookout.wait(30)
