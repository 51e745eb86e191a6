"""What ``faults+…://`` takes, and what it refuses."""

from __future__ import annotations

import pytest
from support import fresh_url, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator, ConfigError
from ruda_async.config import resolve
from ruda_async.transport.registry import get_plugin


async def nothing(comm: AsyncCommunicator) -> None:
    await comm.barrier()


def test_both_sets_of_parameters_are_taken() -> None:
    config = resolve(
        "faults+tcp://127.0.0.1:5/lab?delay_ms=5&drop_after=100&heartbeat=2&only_rank=1", rank=0, world_size=2
    )
    assert config.scheme == "faults+tcp"
    assert (config.parameters.delay_ms, config.parameters.drop_after) == (5, 100)
    assert (config.parameters.heartbeat, config.parameters.only_rank) == (2, 1)
    assert "faults+tcp://127.0.0.1:5/lab" in config.redacted_url
    assert "drop_after=100" in config.redacted_url


def test_an_unknown_parameter_is_refused_and_both_sets_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"faults\+tcp:// has no parameter 'delay'") as caught:
        resolve("faults+tcp://127.0.0.1:5/lab?delay=5", rank=0, world_size=2)
    for name in ("delay_ms", "corrupt_rate", "heartbeat", "socket_bytes", "timeout"):
        assert name in str(caught.value)


@pytest.mark.parametrize("inner", ["memory", "tcp", "shm", "tcps"])
def test_the_pair_takes_after_the_transport_inside(inner: str) -> None:
    pair, plain = get_plugin(f"faults+{inner}"), get_plugin(inner)
    assert pair.scheme == f"faults+{inner}"
    assert pair.example == f"faults+{plain.example}"
    assert (pair.rank_per, pair.unavailable()) == (plain.rank_per, plain.unavailable())


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("kill_after=3", r"kill_after=3 would kill every rank; say which one by only_rank="),
        ("reorder=true", r"reorder=true does nothing without jitter; give jitter_ms="),
        ("only_rank=2", r"only_rank=2 is outside a job of world_size=2; ranks count from 0 to 1"),
        ("corrupt_rate=2", r"corrupt_rate='2' is out of range; it must be from 0 to 1"),
        ("delay_ms=-1", r"delay_ms='-1' is out of range"),
        ("corrupt_rate=0.1&drop_after=9", r"rank \d: drop_after, corrupt_rate acts on streams of bytes, and "
         r"memory:// has none"),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_refused_on_every_rank(query: str, text: str) -> None:
    url = f"faults+{fresh_url('memory')}?{query}"
    for rank in range(2):
        if "drop_after" not in query:
            with pytest.raises(ConfigError, match=text):
                await ruda_async.connect(url, rank=rank, world_size=2, timeout=5)
    with pytest.raises(ConfigError, match=text):
        await run_ranks(2, nothing, url=url)


def test_the_wrapper_alone_and_twice() -> None:
    with pytest.raises(ConfigError, match=r"faults:// goes around another transport"):
        get_plugin("faults")
    with pytest.raises(ConfigError, match=r"two layers declare the parameter 'seed'"):
        get_plugin("faults+faults+memory")


async def test_facts_tell_of_the_faults() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        facts = str(comm.describe())
        assert "faults+memory" in facts
        assert ("delay_ms=1.0" in facts) == (comm.rank == 1)

    await run_ranks(2, body, url=f"faults+{fresh_url('memory')}?delay_ms=1&only_rank=1")
