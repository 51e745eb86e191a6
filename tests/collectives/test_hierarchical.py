"""Algorithms for ranks that share hosts: the same bits as the others, and no more traffic between hosts."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_model import Link, group_of, run, values

from ruda_async import ProtocolError
from ruda_async.collectives import hierarchical
from ruda_async.collectives.all_gather import AllGather
from ruda_async.collectives.all_reduce import AllReduce
from ruda_async.collectives.all_to_all_v import AllToAllV
from ruda_async.collectives.layout import layout_of, narrowed, subtrees
from ruda_async.collectives.operation import Settings
from ruda_async.collectives.selector import choose
from ruda_async.tensors.arithmetic import order
from ruda_async.transport.base import Capabilities
from ruda_async.transport.locality import host_numbers

from .reduction_model import PAIRS, distinct, documented, run_requests, same_bits

NAME = "hierarchical"


def table(identities: list[int]) -> tuple[int, ...] | None:
    """What `Capabilities.hosts` says for ranks on these hosts."""
    return host_numbers(identities)


#: Hosts of any size in any order, one of them with several ranks, and several of them.
layouts = st.lists(st.integers(0, 3), min_size=3, max_size=9).map(table).filter(bool)
ALIGNED = [(0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)]
LAYOUTS = [*ALIGNED, (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 1, 1, 1), (0, 1, 1, 2, 2, 2), (0, 0, 1, 2, 3, 0)]


def between(traffic: Counter[tuple[int, int]], hosts: tuple[int, ...]) -> int:
    """The part of `traffic` that leaves a host."""
    return sum(n for (source, to), n in traffic.items() if hosts[source] != hosts[to])


# ---------------------------------------------------------------------- who is where


@given(layouts)
def test_proxies(hosts: tuple[int, ...]) -> None:
    layout, size = layout_of(hosts), len(hosts)
    assert sorted(rank for members in layout.members for rank in members) == list(range(size))
    for host, members in enumerate(layout.members):
        for rank in range(size):
            assert layout.proxy(host, rank) in members
        loads = Counter({member: len(layout.served(member)) for member in members})
        assert sum(loads.values()) == size - len(members)
    for rank in range(size):
        assert set(layout.mates(rank)) == {r for r in range(size) if hosts[r] == hosts[rank]} - {rank}
        assert sorted([hosts[rank], *layout.others(rank)]) == list(range(len(layout.members)))


def test_proxies_share_the_work() -> None:
    layout = layout_of((0, 0, 0, *range(1, 13)))
    assert [len(layout.served(rank)) for rank in range(3)] == [4, 4, 4]


def leaves(tree: Any) -> list[int]:
    return [tree] if isinstance(tree, int) else leaves(tree[0]) + leaves(tree[1])


@given(layouts, st.booleans())
def test_branches_cover_the_tree_and_are_the_largest(hosts: tuple[int, ...], exact: bool) -> None:
    tree, branches = subtrees(hosts, exact)
    assert (tree == order(len(hosts))) or not exact
    assert sorted(leaves(tree)) == list(range(len(hosts)))
    found = {branch for ours in branches for branch in ours}
    for host, ours in enumerate(branches):
        assert all(hosts[rank] == host for branch in ours for rank in leaves(branch))
        assert exact or len(ours) == 1

    def count(node: Any) -> int:
        if node in found:
            return len(leaves(node))
        assert len({hosts[rank] for rank in leaves(node)}) > 1, "a branch could be larger"
        return count(node[0]) + count(node[1])

    assert count(tree) == len(hosts)


def test_hosts_of_a_subgroup() -> None:
    capabilities = Capabilities(hosts=(0, 0, 1, 1, 2))
    assert narrowed(capabilities, (0, 1, 2, 3, 4)) is capabilities
    assert narrowed(capabilities, (4, 1, 0)).hosts == (0, 1, 1)
    assert narrowed(capabilities, (2, 3)).hosts is None  # one host
    assert narrowed(capabilities, (0, 2, 4)).hosts is None  # nothing is shared
    assert narrowed(Capabilities(), (1, 0)).hosts is None


# ---------------------------------------------------------------------- sums


@given(
    hosts=layouts,
    pair=st.sampled_from(PAIRS),
    shape=st.sampled_from([(), (1,), (7,), (5, 3), (64,), (300,)]),
    segment=st.sampled_from([8, 24, 100, 1 << 19]),
    budget=st.sampled_from([None, 8, 13, 64]),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_all_reduce_gives_the_documented_bits(
    hosts: tuple[int, ...],
    pair: Any,
    shape: tuple[int, ...],
    segment: int,
    budget: int | None,
    in_place: bool,
    seed: int,
) -> None:
    dtype, operator = pair
    size = len(hosts)
    inputs = distinct(seed, dtype, shape, size)
    given_values = [x.copy() for x in inputs]
    results, group = run_requests(
        size,
        lambda r: AllReduce(given_values[r], operator, out=given_values[r] if in_place else None),
        settings=Settings(algorithm=NAME, max_bytes=budget),
        capabilities=Capabilities(hosts=hosts, segment_bytes=segment),
        seed=seed,
    )
    expected = documented(inputs, operator)
    for rank, result in enumerate(results):
        assert same_bits(result, expected)
        assert in_place == (result is given_values[rank])
        assert in_place or same_bits(given_values[rank], inputs[rank])
    assert budget is None or group.largest <= budget


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["float32", "float16", "int32"])
@pytest.mark.parametrize("free", ["exact", "any"])
def test_all_reduce_sends_no_more_between_hosts(hosts: tuple[int, ...], name: str, free: str) -> None:
    size = len(hosts)
    inputs = distinct(3, np.dtype(name), (size * 600,), size)
    nbytes = inputs[0].nbytes
    found = {}
    for algorithm in (NAME, "pairwise"):
        results, group = run_requests(
            size,
            lambda r: AllReduce(inputs[r], "sum", order=free),
            settings=Settings(algorithm=algorithm),
            capabilities=Capabilities(hosts=hosts),
        )
        # Halves that are added in another order may round to another neighbour.
        close = [np.allclose(r, documented(inputs, "sum"), rtol=1e-2, atol=1e-2) for r in results]
        assert all(close)
        assert len({r.tobytes() for r in results}) == 1
        found[algorithm] = between(group.sent_bytes, hosts), between(group.sent_messages, hosts)
    assert found[NAME][0] <= found["pairwise"][0]
    assert found[NAME][1] <= found["pairwise"][1]
    count = max(hosts) + 1
    if free == "any" or hosts in ALIGNED or name == "int32":
        wide = 2 if name == "float16" else 1
        # One sum of each part comes from every host but the owner's, and one result goes to each of them.
        sums = sum(
            nbytes // size * (1 if hosts.count(other) == 1 else wide)
            for rank in range(size)
            for other in range(count)
            if other != hosts[rank]
        )
        assert found[NAME] == (sums + nbytes * (count - 1), 2 * size * (count - 1))


# ---------------------------------------------------------------------- gathers


@given(
    hosts=layouts,
    name=st.sampled_from(["bool", "int64", "float32", "bfloat16", "float8_e4m3fn"]),
    shape=st.sampled_from([(0,), (1,), (3, 2), (40,), (2, 0)]),
    segment=st.sampled_from([1, 8, 24, 1 << 19]),
    max_bytes=st.sampled_from([None, 1, 7, 64]),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_all_gather(
    hosts: tuple[int, ...],
    name: str,
    shape: tuple[int, ...],
    segment: int,
    max_bytes: int | None,
    in_place: bool,
    seed: int,
) -> None:
    size = len(hosts)
    shards = [values(seed + rank, shape, name) for rank in range(size)]
    expected = np.concatenate(shards)
    outs = [np.empty_like(expected) if in_place else None for _ in range(size)]
    group = group_of(size, algorithm=NAME, max_bytes=max_bytes, seed=seed, segment_bytes=segment, hosts=hosts)
    for rank, result in enumerate(run(group, lambda r: AllGather(shards[r], out=outs[r]))):
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        assert result.tobytes() == expected.tobytes()
        assert not in_place or result is outs[rank]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_all_gather_sends_each_shard_to_a_host_once(hosts: tuple[int, ...]) -> None:
    size, count = len(hosts), max(hosts) + 1
    shards = [values(rank, (100,), "int64") for rank in range(size)]
    found = {}
    for algorithm in (NAME, "direct", "ring"):
        group = group_of(size, algorithm=algorithm, hosts=hosts)
        run(group, lambda r: AllGather(shards[r]))
        found[algorithm] = between(group.sent_bytes, hosts), between(group.sent_messages, hosts)
    assert found[NAME] == (800 * size * (count - 1), size * (count - 1))
    for other in ("direct", "ring"):
        assert found[NAME][0] <= found[other][0]
    assert found[NAME][1] <= found["direct"][1]


# ---------------------------------------------------------------------- exchanges

counts = st.lists(st.integers(0, 4), min_size=9, max_size=9)


@given(
    hosts=layouts,
    name=st.sampled_from(["bool", "int64", "float32", "bfloat16"]),
    trailing=st.sampled_from([(), (3,), (2, 2)]),
    rows=st.lists(counts, min_size=9, max_size=9),
    max_bytes=st.sampled_from([None, None, 64]),
    seed=st.integers(0, 1 << 20),
)
def test_all_to_all_v(
    hosts: tuple[int, ...],
    name: str,
    trailing: tuple[int, ...],
    rows: list[list[int]],
    max_bytes: int | None,
    seed: int,
) -> None:
    size = len(hosts)
    send_counts = [row[:size] for row in rows[:size]]
    inputs = [values(seed + r, (sum(send_counts[r]), *trailing), name) for r in range(size)]
    group = group_of(size, algorithm=NAME, max_bytes=max_bytes, seed=seed, hosts=hosts)
    results = run(group, lambda r: AllToAllV(inputs[r], send_counts[r]))
    starts = [np.concatenate([[0], np.cumsum(row)]) for row in send_counts]
    for rank, (value, received) in enumerate(results):
        expected = np.concatenate(
            [inputs[s][starts[s][rank] : starts[s][rank + 1]] for s in range(size)], axis=0
        )
        assert received == tuple(send_counts[s][rank] for s in range(size))
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape
        assert value.tobytes() == expected.tobytes()


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("empty", [False, True])
def test_all_to_all_v_sends_each_row_between_hosts_once(hosts: tuple[int, ...], empty: bool) -> None:
    size = len(hosts)
    rows = [[0 if empty else 1 + (r + d) % 3 for d in range(size)] for r in range(size)]
    inputs = [values(r, (sum(rows[r]), 5), "int64") for r in range(size)]
    found = {}
    for algorithm in (NAME, "pairwise"):
        group = group_of(size, algorithm=algorithm, hosts=hosts)
        run(group, lambda r: AllToAllV(inputs[r], rows[r]))
        found[algorithm] = between(group.sent_bytes, hosts), between(group.sent_messages, hosts)
    tables = sum(
        8 * hosts.count(other)
        for rank in range(size)
        for other in set(hosts) - {hosts[rank]}
        if hosts.count(other) > 1
    )
    assert found[NAME][0] == found["pairwise"][0] + tables
    assert found[NAME][1] <= found["pairwise"][1]


@pytest.mark.parametrize(
    ("lengths", "sent", "match"),
    [
        ((7, 8), 15, "rank 1 sent 7 bytes to rank 0, which is no whole number of rows of 8 bytes"),
        ((1 << 60, 8), 16, "rank 1 announced 1152921504606846984 bytes to rank 0 and sent 16"),
    ],
)
async def test_tables_are_checked_before_room_is_made(
    lengths: tuple[int, int], sent: int, match: str
) -> None:
    """Rank 1, on rank 0's host, is out of its mind; rank 0 would pass its rows on to ranks 2 and 4."""
    hosts = (0, 0, 1, 1, 2, 2)
    group = group_of(6, algorithm=NAME, hosts=hosts)
    served = layout_of(hosts).served(0)
    assert len(served) == 2
    link = Link(group, 1)
    mad = [
        link.send(0, memoryview(bytes(8)), lane=0),
        link.send(0, memoryview(struct.pack("<2Q", *lengths)), lane=1),
        link.send(0, memoryview(bytes(sent)), lane=1),
    ]
    blocks = [memoryview(bytes(8))] * 6
    with pytest.raises(ProtocolError, match=match) as info:
        await asyncio.wait_for(
            hierarchical.all_to_all_v(Link(group, 0), blocks, 8, lambda n: memoryview(bytearray(sum(n)))), 10
        )
    assert info.value.rank == 1
    del mad


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all_v"])
@pytest.mark.parametrize("break_after", [0, 3, 11])
async def test_a_broken_link_leaves_nothing_running(operation: str, break_after: int) -> None:
    hosts = (0, 0, 1, 1, 2)
    group = group_of(5, algorithm=NAME, break_after=break_after, segment_bytes=8, hosts=hosts)

    async def body(rank: int) -> Any:
        value = values(rank, (20,), "int64")
        request: Any = {
            "all_reduce": lambda: AllReduce(value),
            "all_gather": lambda: AllGather(value),
            "all_to_all_v": lambda: AllToAllV(value, [4] * 5),
        }[operation]()
        link = Link(group, rank)
        request.prepare(rank, 5, link.settings)
        return await request.run(link)

    outcomes = await asyncio.gather(*(body(rank) for rank in range(5)), return_exceptions=True)
    kinds = {type(outcome).__name__ for outcome in outcomes}
    assert "Broken" in kinds
    assert kinds <= {"Broken", "ndarray", "VariableTensorExchange"}
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---------------------------------------------------------------------- choice


def test_the_selector_knows_hosts() -> None:
    def pick(operation: str, nbytes: int, hosts: tuple[int, ...] | None, size: int = 8, **named: Any) -> str:
        return choose(operation, nbytes, size, Capabilities(hosts=hosts), Settings(**named)).algorithm

    pairs, fours = (0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 1, 1, 1, 1)
    assert pick("all_reduce", 1 << 20, pairs) == NAME
    assert pick("all_reduce", 1 << 20, None) == "pairwise"
    assert pick("all_reduce", 8, pairs) == "recursive_doubling"
    assert pick("all_gather", 1 << 20, pairs) == NAME
    assert pick("all_gather", 8, pairs) == "recursive_doubling"
    assert pick("all_to_all_v", 4, pairs) == "pairwise"
    assert pick("all_to_all_v", 4, fours) == "pairwise"  # nothing to gain yet but between hosts
    assert pick("all_to_all_v", 4, tuple(rank // 8 for rank in range(32)), size=32) == NAME
    assert pick("all_to_all_v", 4, pairs, algorithm=NAME) == NAME
    assert pick("all_gather", 1 << 20, pairs[:4], size=8) != NAME  # a table for another group says nothing
    choice = choose("all_reduce", 1 << 20, 8, Capabilities(), Settings(algorithm=NAME))
    assert choice.algorithm == "pairwise"
    assert "needs several hosts that ranks share" in choice.reason


def test_without_hosts_it_says_so() -> None:
    link = Link(group_of(3), 0)
    with pytest.raises(ValueError, match="needs ranks that share hosts"):
        hierarchical.layout_for(link)
