"""`auto://` on one machine, where ranks that name different islands count as on different hosts."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from fake_plugins import FakePlugin
from hypothesis import given
from hypothesis import strategies as st
from mesh_support import run_each
from support import SCHEMES, free_port, fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    TensorContractError,
    sync,
)
from ruda_async.config import environment, resolve
from ruda_async.launch.plan import prepare
from ruda_async.transport import Capabilities, Job, composable_plugins, host_identity, host_numbers, param
from ruda_async.transport.conformance import SCENARIOS, run_scenario, runner
from ruda_async.transport.registry import get_plugin, plugins, register_plugin, unregister_plugin

if "shm" in SCHEMES:
    from ruda_auto.plan import Bid, Offer, decide
    from ruda_auto.router import _unpack, merged

pytestmark = pytest.mark.skipif("shm" not in SCHEMES, reason="no shared memory transport here: needs Linux")


@pytest.fixture(autouse=True)
def no_ucx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen must not depend on what else this machine has."""
    if "with_ucx" not in request.fixturenames:
        monkeypatch.delattr("ruda_ucx.UcxPlugin.reach")


@pytest.fixture
def with_ucx() -> None:
    pytest.importorskip("ucxx", reason="pip install 'ruda-async[ucx]'")


async def test_ucx_goes_between_hosts_where_all_have_it(with_ucx: None) -> None:
    async def rank_main(rank: int) -> Any:
        island = f"?island={rank // 2}"
        async with ruda_async.connect(shared + island, rank=rank, world_size=4, timeout=30) as comm:
            large = np.arange(100_000) * (rank + 1)
            assert (await comm.all_reduce_sum(large) == np.arange(100_000) * 10).all()
            return comm.describe()["transport"]["links"]

    shared = fresh_url("auto")
    links = await asyncio.gather(*(rank_main(rank) for rank in range(4)))
    assert links[0] == {"shm": [1], "ucx": [2, 3]}
    assert links[3] == {"shm": [2], "ucx": [0, 1]}


PAIRS = [{"island": "a"}, {"island": "a"}, {"island": "b"}, {"island": "b"}]


async def links(comm: AsyncCommunicator) -> dict[str, list[int]]:
    """The peers of each transport that was taken."""
    await comm.barrier()
    found: dict[str, list[int]] = comm.describe()["transport"]["links"]
    return {scheme: sorted(peers) for scheme, peers in found.items()}


@contextmanager
def known(*made: Any) -> Iterator[None]:
    for plugin in made:
        register_plugin(plugin)
    try:
        yield
    finally:
        for plugin in made:
            unregister_plugin(plugin.scheme)


class Fast(FakePlugin):
    """A better network, made of TCP; it may fail before or after it has met its peers."""

    reach = "network"

    def __init__(self, failing: str = "", ranks: tuple[int, ...] = (), **facts: Any) -> None:
        tcp: Any = get_plugin("tcp")
        super().__init__("fast", parameters=tcp.parameters, **{"preference": 15, **facts})
        self._tcp = tcp
        self._failing = failing
        self._ranks = ranks

    async def connect(self, job: Job) -> Any:
        if self._failing == "before" and job.rank in self._ranks:
            raise ConfigError("the fast cable is not plugged in")
        if self._failing == "careless" and job.rank in self._ranks:
            raise ZeroDivisionError("cables per hour")
        transport = await self._tcp.connect(replace(job))
        if self._failing == "after" and job.rank in self._ranks:
            transport.abort("unplugged")
            raise ConfigError("the fast cable was unplugged")
        return transport


# ---------------------------------------------------------------------- who is linked how


async def test_one_host_needs_no_network() -> None:
    found = await run_ranks(3, links, url=fresh_url("auto"))
    assert found == [{"shm": [1, 2]}, {"shm": [0, 2]}, {"shm": [0, 1]}]


async def test_each_pair_takes_its_best_link() -> None:
    found = await run_each([{"island": name} for name in "abac"], links, fresh_url("auto"))
    assert found == [
        {"shm": [2], "tcp": [1, 3]},
        {"tcp": [0, 2, 3]},
        {"shm": [0], "tcp": [1, 3]},
        {"tcp": [0, 1, 2]},
    ]


async def test_a_better_network_is_preferred_between_hosts_alone() -> None:
    with known(Fast(preference=500)):
        found = await run_each(PAIRS, links, fresh_url("auto"))
    assert found[0] == {"shm": [1], "fast": [2, 3]}
    assert found[3] == {"shm": [2], "fast": [0, 1]}


@pytest.mark.parametrize("failing", ["before", "careless"])
async def test_what_fails_on_one_rank_is_done_without(failing: str) -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        found = await links(comm)
        return found, comm.describe()["transport"]["unused"]

    with known(Fast(failing, (2,))):
        found = await run_each(PAIRS, body, fresh_url("auto"))
    assert [used for used, _ in found] == [
        {"shm": [1], "fast": [3], "tcp": [2]},
        {"shm": [0], "fast": [3], "tcp": [2]},
        {"shm": [3], "tcp": [0, 1]},
        {"shm": [2], "fast": [0, 1]},
    ]
    reason = {"before": "the fast cable is not plugged in", "careless": "cables per hour"}[failing]
    assert [unused for _, unused in found] == [{}, {}, {"fast": reason}, {}]


async def test_a_transport_that_is_not_usable_says_why() -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        return comm.describe()["transport"]["unused"]

    with known(Fast(unavailable="no cable; buy one")):
        assert await run_ranks(2, body, url=fresh_url("auto")) == [{"fast": "no cable; buy one"}] * 2
        url = fresh_url("auto") + "?without=fast,%20tcp"
        both = {"fast": "without= names it", "tcp": "without= names it"}
        assert await run_ranks(2, body, url=url) == [both] * 2


async def test_a_link_that_cannot_be_made_after_all_fails_the_job_at_once() -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    with known(Fast("after", (2,))):
        found = await run_each(PAIRS, links, fresh_url("auto"), timeout=25)
    assert [type(error) for error in found] == [PeerLostError, PeerLostError, ConfigError, PeerLostError]
    assert "the fast cable was unplugged" in str(found[2])
    assert time.monotonic() - started < 20, "somebody waited for the deadline"
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= open_before


async def test_where_anonymous_memory_is_forbidden_the_network_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        return await links(comm), comm.describe()["transport"]["unused"]["shm"]

    def forbidden(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    (found, reason), _ = await run_ranks(2, body, url=fresh_url("auto"))
    assert found == {"tcp": [1]}
    assert "may not make anonymous memory (Operation not permitted)" in reason


async def test_over_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        port = sock.getsockname()[1]
    found = await run_each([{"island": name} for name in "aab"], links, f"auto://[::1]:{port}/six")
    assert found[2] == {"tcp": [0, 1]}


async def test_ranks_without_a_link_all_fail() -> None:
    options = [{"without": "tcp"}, {}, {"without": "shm"}]
    found = await run_each(options, links, fresh_url("auto"))
    for error in found:
        assert isinstance(error, ConfigError)
        assert "ranks 0 and 2, on one host, have no transport in common" in str(error)
        assert "rank 0 has shm, no tcp (without= names it)" in str(error)
        assert "rank 2 has no shm (without= names it), tcp" in str(error)


async def test_without_names_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"rank 0: without='tpc' names no transport in 'tpc'; there are .*tcp"
    ):
        await ruda_async.connect(fresh_url("auto"), rank=0, world_size=2, timeout=5, without="tpc")


async def test_no_network_at_all_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 cannot listen on '192\.0\.2\.1'"):
        await ruda_async.connect(fresh_url("auto"), rank=1, world_size=2, timeout=20, bind="192.0.2.1")


async def test_a_job_of_one_needs_nobody() -> None:
    assert await run_ranks(1, links, url=fresh_url("auto")) == [{}]


async def test_absent_ranks_are_named() -> None:
    url = fresh_url("auto")

    async def join(rank: int) -> None:
        await ruda_async.connect(url, rank=rank, world_size=3, timeout=1)

    async with asyncio.timeout(20):
        found = await asyncio.gather(join(0), join(1), return_exceptions=True)
    for error in found:
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (2,)
        assert "rank 2 of 3 did not come" in str(error)


def test_no_descriptor_is_left() -> None:
    async def once() -> None:
        await run_each(PAIRS, links, fresh_url("auto"))

    asyncio.run(once())
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(once())
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------- promises of a transport


@pytest.mark.parametrize("ranks", ["loop", "threads"])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_conformance_with_several_links(name: str, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even ranks on one island, odd ones on another: links of both kinds where three or more take part."""
    from ruda_async.opening import open_transport

    async def join(url: str, rank: int, world_size: int) -> Any:
        config = resolve(url, rank=rank, world_size=world_size, timeout=30, island="ab"[rank % 2])
        return await open_transport(config)

    monkeypatch.setattr(runner, "_join", join)
    run_scenario(name, fresh_url("auto"), ranks=ranks)


async def test_capabilities_are_the_same_on_all_ranks() -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        await comm.barrier()
        return comm._node.transport.capabilities

    options = [
        {"island": "a", "eager_bytes": 1000},
        {"island": "a", "segment_bytes": 2_000_000},
        {"island": "b"},
    ]
    first, *others = await run_each(options, body, fresh_url("auto"))
    assert others == [first] * 2
    assert (first.eager_bytes, first.segment_bytes, first.hosts) == (1000, 2_000_000, (0, 0, 1))
    assert not first.shared_memory


async def test_what_one_transport_offers_beyond_is_offered_where_it_has_all_links() -> None:
    class Offering(Fast):
        async def connect(self, job: Job) -> Any:
            transport = await super().connect(job)
            transport.extra = f"of rank {job.rank}"
            return transport

    async def body(comm: AsyncCommunicator) -> Any:
        await comm.barrier()
        transport = comm._node.transport
        assert not hasattr(transport, "_extra")
        return getattr(transport, "extra", None)

    with known(Offering()):
        assert await run_each([{"island": "a"}, {"island": "b"}], body, fresh_url("auto")) == [
            "of rank 0",
            "of rank 1",
        ]
        # Rank 2 has links of one kind alone, but ranks 0 and 1 have not.
        options = [{"island": "a"}, {"island": "a"}, {"island": "b"}]
        assert await run_each(options, body, fresh_url("auto")) == [None] * 3


async def test_failures_reach_every_rank_over_every_link() -> None:
    async def body(comm: AsyncCommunicator) -> tuple[Any, Any, float]:
        value = np.ones(5000, np.float32)
        bad = await outcome(comm.all_reduce_sum(value > 0 if comm.rank == 3 else value))
        late = await outcome(
            comm.all_to_all_v(value, [5000, 0, 0, 0]) if comm.rank else comm.all_gather(value)
        )
        good = await comm.all_reduce_sum(value)
        return bad, late, float(good[0])

    for bad, late, good in await run_each(PAIRS, body, fresh_url("auto")):
        assert isinstance(bad, TensorContractError)
        assert bad.rank == 3
        assert isinstance(late, ruda_async.CollectiveMismatchError)
        assert good == 4


async def test_a_lost_rank_is_lost_to_all_and_the_others_go_on() -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        await comm.barrier()
        if comm.rank == 1:
            comm.abort("to be lost")
            return None
        error = await outcome(comm.all_reduce_sum(np.ones(10)))
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        smaller = await comm.shrink()
        total = await smaller.all_reduce_sum(np.full(60_000, comm.rank, np.float32))
        assert smaller._channel.capabilities.hosts == (0, 1, 1)
        return smaller.rank, smaller.world_size, float(total[-1])

    assert await run_each(PAIRS, body, fresh_url("auto")) == [(0, 3, 5.0), None, (1, 3, 5.0), (2, 3, 5.0)]


async def test_subgroups_know_their_hosts() -> None:
    async def body(comm: AsyncCommunicator) -> list[Any]:
        half = await comm.split(comm.rank % 2)
        three = await comm.split(None if comm.rank == 1 else 0)
        channel = comm.channel("other")
        assert half is not None
        assert "hierarchical" in channel.explain("all_reduce", 1 << 20)
        return [c and c._channel.capabilities.hosts for c in (comm, half, three, channel)]

    whole, three = (0, 0, 1, 1), (0, 1, 1)
    assert await run_each(PAIRS, body, fresh_url("auto")) == [
        [whole, None, None if rank == 1 else three, whole] for rank in range(4)
    ]


@pytest.mark.parametrize("islands", ["aabb", "abab", "aaab", "aabbbc"])
async def test_hierarchical_results_have_the_bits_of_the_others(islands: str) -> None:
    size = len(islands)

    async def body(comm: AsyncCommunicator) -> list[bytes]:
        rng = np.random.default_rng(comm.rank)
        found = []
        for dtype in (np.float32, np.float16, np.int64):
            value = (rng.standard_normal((30_000, 2)) * 100).astype(dtype)
            found += [
                (await comm.all_reduce_sum(value)).tobytes(),
                (await comm.all_gather(value)).tobytes(),
                (await comm.bounded(4096).all_reduce_sum(value[:5000])).tobytes(),
            ]
        counts = [(comm.rank + 3 * peer) % 4 * 500 for peer in range(size)]
        exchange = await comm.all_to_all_v(rng.standard_normal((sum(counts), 3)), counts)
        return [*found, exchange.value.tobytes(), bytes(np.array(exchange.receive_counts))]

    options = [{"island": name, "algorithm": "hierarchical"} for name in islands]
    results = await run_each(options, body, fresh_url("auto"))
    assert results == await run_ranks(size, body, url=fresh_url("memory"), algorithm="pairwise")


def test_blocking_calls_over_links_of_both_kinds() -> None:
    """Such calls run by hand as far as they get, and wait on one link while frames may wait on another."""
    url = fresh_url("auto")

    def rank(number: int) -> list[float]:
        with sync.connect(url, rank=number, world_size=4, timeout=30, **PAIRS[number]) as comm:
            sums = []
            for turn in range(60):
                rows = 1 + turn * turn * 20
                total = comm.all_reduce_sum(np.full(rows, number + turn, np.float32))
                gathered = comm.all_gather(np.full(rows, number, np.int32))
                sums.append(float(total[-1]) + float(gathered.sum()) / rows)
            return sums

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rank, range(4)))
    assert found == [[4.0 * turn + 6 + 6 for turn in range(60)]] * 4


def test_doctor_says_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ruda_async.cli import doctor

    auto = plugins()["auto"]
    monkeypatch.setattr(doctor, "plugins", lambda: {"auto": auto})
    (found,) = doctor.examine()["transports"]
    assert found["status"] == "works"
    assert found["detail"].endswith("between two ranks here: shm")


# ---------------------------------------------------------------------- defaults and parameters


@dataclass(frozen=True, slots=True)
class FakeOne:
    pace: float = param(1.0, doc="of one")
    room: int = param(5, doc="of both")


@dataclass(frozen=True, slots=True)
class FakeTwo:
    pace: float = param(2.0, doc="of two")
    room: int = param(5, doc="of both")


def test_the_default_where_ranks_may_be_on_several_hosts() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert resolve(environ=environ).scheme == "auto"
    with prepare(None, 2, environ={}) as plan:
        assert plan.url.startswith("shm://")


async def test_under_a_launcher() -> None:
    async def rank(number: int) -> dict[str, list[int]]:
        with environment({"RANK": str(number), "WORLD_SIZE": "2", **place}):
            async with ruda_async.connect(timeout=10) as comm:
                return await links(comm)

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(min(free_port(), 65000))}
    assert await asyncio.gather(rank(0), rank(1)) == [{"shm": [1]}, {"shm": [0]}]


async def test_parameters_reach_the_transports_that_have_them() -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        await comm.barrier()
        parts = comm.describe()["transport"]["transports"]
        return {scheme: part["heartbeat"] for scheme, part in parts.items()}

    url = fresh_url("auto") + "?heartbeat=7&ring_bytes=64k&socket_bytes=64k"
    assert await run_each(PAIRS, body, url) == [{"shm": 7, "tcp": 7}] * 4
    with pytest.raises(ConfigError, match="did you mean 'ring_bytes'"):
        resolve(url.replace("ring_bytes", "ring_byte"), rank=0, world_size=1, environ={})


def test_a_parameter_of_two_defaults_is_each_ones_own() -> None:
    from ruda_auto.plugins import joined, part_for

    tcp, shm = (get_plugin(scheme).parameters for scheme in ("tcp", "shm"))
    both: Any = joined((FakeOne, FakeTwo))
    assert part_for(FakeOne, both()) == FakeOne()
    assert part_for(FakeTwo, both()) == FakeTwo()
    assert part_for(FakeOne, both(pace=3)) == FakeOne(pace=3)
    assert part_for(FakeTwo, both(pace=3)) == FakeTwo(pace=3)
    given_both: Any = joined((tcp, shm))
    assert part_for(shm, given_both()) == shm()


def test_plugins_that_take_part() -> None:
    assert {"shm", "tcp"} <= {plugin.scheme for plugin in composable_plugins()}
    assert not {"memory", "auto"} & {plugin.scheme for plugin in composable_plugins()}
    auto = get_plugin("auto")
    assert auto.unavailable() is None


def test_without_any_network_it_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Fast):
        def unavailable(self) -> str | None:
            raise OSError("no bus")

    monkeypatch.setattr("ruda_auto.composable_plugins", lambda: [get_plugin("shm"), Careless()])
    reason = get_plugin("auto").unavailable()
    assert reason == (
        "no transport over a network is usable (fast: unavailable() raised OSError: no bus); install one"
    )


# ---------------------------------------------------------------------- what ranks tell each other


def bid(reach: str = "network", preference: int = 1, payload: bytes | None = b"") -> Bid:
    return Bid(reach, preference, payload)


def test_the_plan() -> None:
    host = {"wire": bid(preference=5), "ram": bid("host")}
    offers = [Offer("A", host), Offer("B", host), Offer("A", host | {"fast": bid(preference=9)})]
    assert decide(0, offers).routes == {1: "wire", 2: "ram"}
    assert decide(0, offers).hosts == (0, 1, 0)
    offers[1] = Offer("B", {"fast": bid(preference=2), "wire": bid(preference=3)})
    # The two have not the same preferences: the lower ones count, on both ends.
    assert decide(1, offers).routes[2] == decide(2, offers).routes[1] == "wire"
    offers[1] = Offer("B", {"ram": bid("host")})
    for rank in range(3):
        with pytest.raises(ConfigError, match="ranks 0 and 1, on two hosts, have no transport in common"):
            decide(rank, offers)


@given(st.lists(st.tuples(st.sampled_from("AB"), st.sets(st.sampled_from("xyz"))), min_size=2, max_size=6))
def test_both_ends_of_a_pair_decide_alike(ranks: list[tuple[str, set[str]]]) -> None:
    kinds = {"x": bid("host", 1), "y": bid("network", 5), "z": bid("network", 3)}
    offers = [
        Offer(host, {s: kinds[s] for s in schemes} | {"w": bid(preference=0)}) for host, schemes in ranks
    ]
    plans = [decide(rank, offers) for rank in range(len(offers))]
    for one, plan in enumerate(plans):
        assert set(plan.routes) == set(range(len(offers))) - {one}
        for other, scheme in plan.routes.items():
            assert plans[other].routes[one] == scheme
            common = ranks[one][1] & ranks[other][1]
            alone = ranks[one][0] != ranks[other][0]
            best = "x" if "x" in common and not alone else "y" if "y" in common else "z"
            assert scheme == (best if best in common else "w")


def test_offers_survive_the_journey() -> None:
    offer = Offer("A", {"wire": bid(payload=b"\0\1"), "ram": Bid("host", -3, None, "r" * 500)})
    read = Offer.unpack(offer.pack(), 1)
    assert read.bids["wire"] == offer.bids["wire"]
    assert read.bids["ram"].reason == "r" * 200


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        ["A"],
        ["A", []],
        [1, {}],
        ["A", {"x": ["host", 1, b""]}, 1],
        ["A", {"x": ["moon", 1, b"", ""]}],
        ["A", {"x": ["host", True, b"", ""]}],
        ["A", {"x": ["host", 1, "", ""]}],
        ["A", {"x": ["host", 1, b"", 3]}],
        ["A", {"x": ["host", 1, b"", "", ""]}],
        ["A", {"x": 3}],
        ["A", {str(n): ["host", 1, b"", ""] for n in range(100)}],
    ],
)
def test_nonsense_is_no_offer(told: Any) -> None:
    with pytest.raises(ProtocolError, match="rank 7 made no offer") as info:
        Offer.unpack(msgpack.packb(told), 7)
    assert info.value.rank == 7


@given(st.binary(max_size=60))
def test_bytes_are_an_offer_or_refused(data: bytes) -> None:
    try:
        Offer.unpack(data, 1)
    except ProtocolError:
        pass


def told(**changes: Any) -> bytes:
    values = {name: getattr(Capabilities(), name) for name in Capabilities.__dataclass_fields__} | changes
    packed: bytes = msgpack.packb(list(values.values()))
    return packed


def test_capabilities_are_checked() -> None:
    assert _unpack(told(), 1) == Capabilities()
    assert _unpack(told(max_message=5), 1).max_message == 5
    for changes in (
        {"ordered": 1},
        {"max_message": 0},
        {"max_message": "5"},
        {"segment_bytes": 0},
        {"segment_bytes": 1.5},
        {"latency": 0.0},
        {"bandwidth": float("-inf")},
        {"hosts": [0, 1]},
    ):
        with pytest.raises(ProtocolError, match="rank 4 told nothing of its links"):
            _unpack(told(**changes), 4)
    for data in (b"", b"\xc1", msgpack.packb(3), msgpack.packb([1] * 50)):
        with pytest.raises(ProtocolError):
            _unpack(data, 4)


def test_what_holds_for_several_kinds_of_links() -> None:
    near = Capabilities(
        shared_memory=True, device_memory=True, latency=1e-6, bandwidth=9e9, max_message=100, eager_bytes=10
    )
    far = Capabilities(ordered=False, secure=True, latency=1e-4, bandwidth=1e9, segment_bytes=1 << 22)
    both = merged([near, far])
    assert both == merged([far, near])
    assert both == Capabilities(
        ordered=False,
        shared_memory=False,
        device_memory=False,
        secure=False,
        max_message=100,
        eager_bytes=10,
        segment_bytes=1 << 22,
        latency=1e-4,
        bandwidth=1e9,
    )
    assert merged([near]) == near


def test_host_numbers() -> None:
    assert host_numbers("baab") == (0, 1, 1, 0)
    assert host_numbers("aaa") is None
    assert host_numbers("abc") is None
    assert host_numbers("") is None
    assert host_identity() == host_identity()
    assert len(host_identity()) == 32


@pytest.mark.parametrize("odd", [0, 1, 2])
async def test_a_rank_with_another_transport_in_its_url_is_refused_with_words(odd: int) -> None:
    """They meet at one port, and neither can read what the other has to offer."""
    auto = fresh_url("auto")

    async def rank_main(rank: int) -> Any:
        url = auto.replace("auto://", "tcp://") if rank == odd else auto
        async with ruda_async.connect(url, rank=rank, world_size=3, timeout=20):
            return None

    said = await asyncio.gather(*(outcome(rank_main(rank)) for rank in range(3)))
    assert all(isinstance(error, ProtocolError) for error in said)
    assert all("see that all ranks have the same URL and version" in str(error) for error in said)
