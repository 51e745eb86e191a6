"""Ranks and addresses that do not fit: the error that each rank sees, and its remedy."""

from __future__ import annotations

import socket
import time

import pytest
from rendezvous_support import (
    HOST,
    assert_met,
    connected,
    make_job,
    nothing_left,
    results,
    start,
    until_joined,
)
from support import free_port

from ruda_async.errors import CollectiveTimeoutError, ConfigError
from ruda_async.rendezvous import meet
from ruda_async.transport.job import Secret


async def test_a_second_rank_of_one_number_is_refused_and_the_first_goes_on() -> None:
    port = free_port()
    first = [start(0, 4, (HOST, port)), start(1, 4, (HOST, port))]
    await until_joined(port, 1, 4, spare=2)
    (error,) = await results(start(1, 4, (HOST, port)))
    assert type(error) is ConfigError
    assert error.rank == 1
    assert "a second rank 1" in str(error)
    assert f"the first came from {HOST}:" in str(error)
    assert_met(await results(*first, start(2, 4, (HOST, port)), start(3, 4, (HOST, port))), 4)


async def test_a_refused_second_rank_is_mentioned_when_time_is_up() -> None:
    address = (HOST, free_port())
    errors = await results(*(start(rank, 4, address, timeout=0.5) for rank in (0, 2, 2)))
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["CollectiveTimeoutError", "CollectiveTimeoutError", "ConfigError"]
    assert type(errors[0]) is CollectiveTimeoutError
    assert errors[0].missing == (1, 3)
    assert "a second rank 2" in str(errors[0])


@pytest.mark.parametrize(("world_size", "rank"), [(3, 2), (5, 4), (5, 1)])
async def test_another_world_size_ends_it_for_all_at_once(world_size: int, rank: int) -> None:
    port = free_port()
    tasks = [start(0, 4, (HOST, port)), start(3, 4, (HOST, port))]
    await until_joined(port, 3, 4, spare=2)
    began = time.monotonic()
    errors = await results(*tasks, start(rank, world_size, (HOST, port)))
    assert time.monotonic() - began < 5
    for error in errors:
        assert type(error) is ConfigError
        assert error.rank == rank
        assert f"rank {rank} from {HOST}:" in str(error)
        assert f"world_size={world_size}" in str(error)
        assert "world_size=4" in str(error)


async def test_ranks_that_are_just_coming_in_are_told_too() -> None:
    address = (HOST, free_port())
    errors = await results(*(start(rank, 9 if rank == 5 else 8, address) for rank in range(8)))
    assert [(type(error), error.rank) for error in errors] == [(ConfigError, 5)] * 8


async def test_another_job_is_refused_by_name_and_the_one_that_meets_goes_on() -> None:
    port = free_port()
    ours = [start(0, 3, (HOST, port)), start(1, 3, (HOST, port))]
    (error,) = await results(start(2, 3, (HOST, port), name="other"))
    assert type(error) is ConfigError
    assert f"job 'lab' meets at {HOST}:{port}" in str(error)
    assert "'other'" in str(error)
    assert_met(await results(*ours, start(2, 3, (HOST, port))), 3)


async def test_a_port_in_use_is_named_with_the_remedy() -> None:
    port = free_port()
    first = start(0, 2, (HOST, port))
    with await connected(port):
        pass
    (error,) = await results(start(0, 2, (HOST, port)))
    assert type(error) is ConfigError
    assert f"{HOST}:{port}: Address already in use" in str(error)
    assert "another rank 0" in str(error)
    assert "another port" in str(error)
    assert_met(await results(first, start(1, 2, (HOST, port))), 2)
    with socket.create_server((HOST, port)), nothing_left():
        (error,) = await results(start(0, 2, (HOST, port)))
    assert type(error) is ConfigError


async def test_a_host_that_is_not_this_machine() -> None:
    (error,) = await results(start(0, 2, ("192.0.2.1", free_port()), secret=Secret(b"x")))
    assert type(error) is ConfigError
    assert "192.0.2.1" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
async def test_port_0_needs_a_launcher(rank: int) -> None:
    with pytest.raises(ConfigError, match="ruda-async run"):
        await meet(make_job(rank, 2), b"", (HOST, 0))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "2001:db8::1", "::ffff:10.0.0.5"])
async def test_a_network_address_without_a_secret_is_refused(host: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="RUDA_SECRET"):
        await meet(make_job(rank, 2), b"", (host, 29500))


async def test_an_inherited_network_socket_without_a_secret_is_refused() -> None:
    with socket.create_server(("0.0.0.0", 0)) as inherited, pytest.raises(ConfigError, match="RUDA_SECRET"):
        await meet(make_job(0, 2, listen_fd=inherited.fileno()), b"", (HOST, 0))


async def test_names_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="not a host name"):
        await meet(make_job(0, 2), b"", ("a" * 70 + ".example", 1))
    with pytest.raises(ConfigError, match="job name"):
        await meet(make_job(0, 2, name="\udcff"), b"", (HOST, 1))
    with pytest.raises(ConfigError, match="job name of 2000 bytes"):
        await meet(make_job(0, 2, name="é" * 1000), b"", (HOST, 1))
