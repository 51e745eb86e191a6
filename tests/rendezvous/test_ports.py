"""Several ports to try in turn, where no single one is known."""

from __future__ import annotations

import socket

import pytest
from rendezvous_support import HOST, assert_met, connected, make_job, results, start
from support import free_port

from ruda_async.errors import CollectiveTimeoutError, ConfigError
from ruda_async.rendezvous import limits, meet
from ruda_async.transport.job import Secret


async def test_candidate_ports_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PATIENCE", 0.3)
    with socket.create_server((HOST, 0)) as taken:
        ports = (taken.getsockname()[1], free_port(), free_port())
        tasks = [start(rank, 2, (HOST, 1), ports=ports) for rank in range(2)]
        # Rank 1 finds a silent service first, and goes on when that has had its time.
        assert_met(await results(*tasks), 2)


@pytest.mark.parametrize("secret", [b"", b"another"])
async def test_another_job_or_service_on_a_candidate_port_is_passed_over(secret: bytes) -> None:
    ports = (free_port(), free_port())
    theirs = start(0, 2, (HOST, ports[0]), name="theirs", secret=Secret(secret))
    with await connected(ports[0]):
        ours = [start(rank, 2, (HOST, 1), ports=ports) for rank in range(2)]
        assert_met(await results(*ours), 2)
    assert_met(await results(theirs, start(1, 2, (HOST, ports[0]), name="theirs", secret=Secret(secret))), 2)


async def test_no_candidate_port_is_free() -> None:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as two:
        ports = (one.getsockname()[1], two.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            await meet(make_job(0, 2, ports=ports), b"", (HOST, 1))
    assert all(f"{HOST}:{port}: Address already in use" in str(caught.value) for port in ports)


async def test_candidate_ports_that_others_use_are_listed_when_time_is_up() -> None:
    ports = (free_port(), free_port())
    theirs = start(0, 2, (HOST, ports[0]), name="theirs")
    with await connected(ports[0]):
        (error,) = await results(start(1, 2, (HOST, 1), ports=ports, timeout=0.5))
    assert type(error) is CollectiveTimeoutError
    assert f"{HOST}:{ports[0]}: job 'theirs' meets at" in str(error)
    assert f"{HOST}:{ports[1]}: Connection refused" in str(error)
    theirs.cancel()
    await results(theirs)
