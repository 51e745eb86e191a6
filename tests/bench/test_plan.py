"""What a plan means, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async import ConfigError
from ruda_async.bench.plan import Plan, Subject, format_size, parse_size, parse_sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("64k", 65536), ("4M", 4 << 20), ("1GiB", 1 << 30), (" 2kb ", 2048), ("9b", 9)],
)
def test_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "k", "0", "-8", "4x", "1.5m", "4kk", "8:", "٣"])
def test_a_wrong_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_lists_and_ranges() -> None:
    assert parse_sizes("8,64k,4m") == (8, 65536, 4 << 20)
    assert parse_sizes("8:2k:4") == (8, 32, 128, 512, 2048)
    assert parse_sizes("8:40") == (8, 16, 32)
    for text in ("8:4:2", "8:64:1"):
        with pytest.raises(ConfigError, match="not a range of sizes"):
            parse_sizes(text)


@given(st.integers(1, 1 << 40))
def test_sizes_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes).replace(" ", "")) == nbytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ("all_reduce", "sum")}, "unknown operation 'sum'; there are all_reduce"),
        ({"peers": ("nccl",)}, "unknown peer 'nccl'"),
        ({"modes": ()}, "no mode is given"),
        ({"modes": ("sync", "sync")}, "name one twice"),
        ({"dtype": "complex64"}, "unknown dtype"),
        ({"worlds": (1,)}, "numbers from 2 on"),
        ({"sizes": ()}, "sizes=nothing"),
        ({"in_flight": (1, 1)}, "twice"),
        ({"rounds": 0}, "rounds=0"),
        ({"block": 0.0}, "block=0 s"),
        ({"urls": ()}, "no URL"),
    ],
)
def test_a_wrong_plan_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**options)


def test_groups_follow_the_transports() -> None:
    plan = Plan(
        urls=("tcp://127.0.0.1:0", "memory://bench?eager_bytes=9"),
        modes=("async", "sync"),
        in_flight=(1, 8),
        worlds=(2, 4),
        peers=("gloo", "numpy"),
    )
    groups = plan.groups()
    assert [(g.world, g.placement) for g in groups] == [
        (world, placement) for world in (2, 4) for placement in ("processes", "tasks", "threads")
    ]
    assert [s.label for s in groups[0].subjects] == [
        "tcp async", "tcp async x8", "tcp sync", "tcp sync x8", "gloo", "numpy"
    ]  # fmt: skip
    assert [s.label for s in groups[1].subjects] == [
        "memory?eager_bytes=9 async", "memory?eager_bytes=9 async x8", "numpy"
    ]  # fmt: skip
    assert {s.mode for s in groups[2].subjects} == {"sync", ""}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tcp://127.0.0.1:29500", "write port 0"),
        ("memory://x?rank=1", "names a rank"),
        ("x://y", "unknown scheme"),
    ],
)
def test_urls_that_cannot_be_measured(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(urls=(url,)).groups()


def test_a_barrier_has_no_size() -> None:
    plan = Plan(operations=("barrier", "send"), sizes=(8, 16))
    assert list(plan.cases) == [("barrier", 0), ("send", 8), ("send", 16)]


def test_peers_are_called_by_their_name() -> None:
    assert Subject("gloo").label == "gloo"
