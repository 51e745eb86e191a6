"""Ranks as Ray actors: real actors of a real cluster on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ruda_async import CollectiveTimeoutError, ConfigError, PeerLostError, TransportUnavailableError

pytest.importorskip("ray", reason="needs Ray: pip install 'ruda-async[ray]'")

import ruda_async.ray
from ruda_async.ray import driver
from ruda_async.ray.place import Host, job_url

pytestmark = pytest.mark.timeout(180)  # Ray starts processes, and takes its time over it

Start = Callable[[str, int], list[Any]]
LIMIT = 60.0
FAR = 600.0


def values(count: int, seed: int = 0) -> list[Any]:
    """A distinct array for each rank."""
    return list(np.random.default_rng(seed).integers(-1000, 1000, (count, 5)))


@pytest.mark.parametrize("url", [None, "tcp://", "tcp://?heartbeat=3"])
@pytest.mark.parametrize("kind", ["Worker", "AsyncWorker"])
def test_four_actors_add_up(cluster: Any, start: Start, kind: str, url: str | None) -> None:
    actors, inputs = start(kind, 4), values(4)
    group = ruda_async.ray.connect_actors(actors, url=url, timeout=LIMIT)
    assert group.actors == tuple(actors)
    results = cluster.get([a.total.remote(x) for a, x in zip(actors, inputs, strict=True)])
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    for _, total in results:
        np.testing.assert_array_equal(total, sum(inputs))


def test_the_ranks_talk_past_ray(cluster: Any, start: Start) -> None:
    actors = start("Worker", 2)
    ruda_async.ray.connect_actors(actors, url="tcp://?heartbeat=3", timeout=LIMIT)
    facts = cluster.get([actor.facts.remote() for actor in actors])
    assert facts[0]["pid"] != facts[1]["pid"]
    assert [fact["heartbeat"] for fact in facts] == [3.0, 3.0]
    node = cluster.util.get_node_ip_address()
    assert facts[0]["peers"][1].startswith(f"{node} port ")


def test_an_asyncio_actor_serves_many_calls_at_once(cluster: Any, start: Start) -> None:
    actors = start("AsyncWorker", 3)
    ruda_async.ray.connect_actors(actors, timeout=LIMIT)
    inputs = [values(4, seed) for seed in range(3)]
    results = cluster.get([a.at_once.remote(x) for a, x in zip(actors, inputs, strict=True)])
    for result in results:
        np.testing.assert_array_equal(result, np.sum(inputs, axis=0))


def test_groups_in_another_order_and_again_under_one_name(cluster: Any, start: Start) -> None:
    actors = start("Worker", 3)
    first = ruda_async.ray.connect_actors(actors, group="first", timeout=LIMIT)
    back = ruda_async.ray.connect_actors(actors[::-1], group="back", timeout=LIMIT)
    inputs = values(3)

    def ranks(group: str) -> list[int]:
        calls = [a.total.remote(x, group) for a, x in zip(actors, inputs, strict=True)]
        results = cluster.get(calls)
        for _, total in results:
            np.testing.assert_array_equal(total, sum(inputs))
        return [rank for rank, _ in results]

    assert ranks("first") == [0, 1, 2]
    assert ranks("back") == [2, 1, 0]
    first.close()
    assert ranks("back") == [2, 1, 0]
    ruda_async.ray.connect_actors(actors[::-1], group="first", timeout=LIMIT)
    ruda_async.ray.connect_actors(actors, group="first", timeout=LIMIT)  # takes the former one's place
    assert ranks("first") == [0, 1, 2]
    back.close()
    kind, _, text = cluster.get(actors[1].outcome.remote(inputs[0], "back"))
    assert kind == "ConfigError"
    assert "no group 'back' (it is in 'first')" in text


def test_bad_input_fails_on_all_and_the_next_call_works(cluster: Any, start: Start) -> None:
    actors = start("Worker", 3)
    ruda_async.ray.connect_actors(actors, timeout=LIMIT)
    inputs = values(3)
    given = [inputs[0], np.array(["text"]), inputs[2]]
    for kind, rank, _ in cluster.get([a.outcome.remote(x) for a, x in zip(actors, given, strict=True)]):
        assert (kind, rank) == ("TensorContractError", 1)
    results = cluster.get([a.total.remote(x) for a, x in zip(actors, inputs, strict=True)])
    np.testing.assert_array_equal(results[1][1], sum(inputs))


def test_a_killed_actor_is_lost_to_its_peers(cluster: Any, start: Start) -> None:
    actors = start("Worker", 3)
    ruda_async.ray.connect_actors(actors, timeout=LIMIT)
    inputs = values(3)
    waiting = [actors[r].outcome.remote(inputs[r]) for r in (0, 1)]
    cluster.kill(actors[2])
    assert [(kind, rank) for kind, rank, _ in cluster.get(waiting)] == [("PeerLostError", 2)] * 2
    with pytest.raises(PeerLostError, match="actor of rank 2 is dead") as caught:
        ruda_async.ray.connect_actors(actors, timeout=LIMIT)
    assert caught.value.rank == 2
    fresh = [*actors[:2], *start("Worker", 1)]
    ruda_async.ray.connect_actors(fresh, timeout=LIMIT)
    with pytest.raises(ConfigError):  # before anybody joins: what there was goes on
        ruda_async.ray.connect_actors(fresh, url="tcpp://", timeout=LIMIT)
    assert cluster.get(actors[0].facts.remote())["world_size"] == 3


def until_told(cluster: Any, actor: Any, why: str) -> None:
    """The actor joins no more, and knows why; an asyncio one answers meanwhile, another when it has heard."""
    deadline = time.monotonic() + LIMIT
    while True:
        with pytest.raises(ConfigError, match="no group 'default'") as caught:
            cluster.get(actor.total.remote(np.ones(2)), timeout=LIMIT)
        if why in str(caught.value):
            return
        assert time.monotonic() < deadline, caught.value


@pytest.mark.parametrize("kind", ["Worker", "AsyncWorker"])
@pytest.mark.parametrize("dead", [0, 2])
def test_the_others_hear_of_an_actor_that_dies_before_it_joins(
    cluster: Any, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, dead: int
) -> None:
    """Between two steps; the others wait for it in the next one, and deadlines are far away."""
    actors = start(kind, 3)
    meet = driver._meet

    def killed(*args: Any) -> Any:
        steps = meet(*args)
        nodes = yield next(steps)
        place = yield steps.send(nodes)
        cluster.kill(actors[dead])
        yield steps.send(place)

    monkeypatch.setattr(driver, "_meet", killed)
    with pytest.raises(PeerLostError, match=f"actor of rank {dead} is dead") as caught:
        ruda_async.ray.connect_actors(actors, timeout=FAR)
    assert caught.value.rank == dead
    for actor in actors:
        if actor is not actors[dead]:
            until_told(cluster, actor, f"cannot form: the actor of rank {dead} is dead")

    monkeypatch.undo()
    actors[dead : dead + 1] = start(kind, 1)
    ruda_async.ray.connect_actors(actors, timeout=LIMIT)
    for _, total in cluster.get([actor.total.remote(np.ones(2)) for actor in actors]):
        np.testing.assert_array_equal(total, [3, 3])


def test_the_others_hear_of_an_actor_that_dies_while_it_joins(cluster: Any, start: Start) -> None:
    actors = [*start("Worker", 2), *start("Mortal", 1)]
    with pytest.raises(PeerLostError, match="actor of rank 2 is dead"):
        ruda_async.ray.connect_actors(actors, timeout=FAR)
    for actor in actors[:2]:
        until_told(cluster, actor, "cannot form: the actor of rank 2 is dead")


@pytest.mark.parametrize("kind", ["Worker", "AsyncWorker"])
def test_the_others_hear_of_an_actor_that_cannot_join(cluster: Any, start: Start, kind: str) -> None:
    """And what told them is gone when all have heard it."""
    from ray.experimental import internal_kv
    from ray_actors import disable

    def entries() -> list[Any]:
        found: list[Any] = internal_kv._internal_kv_list("failed/", namespace="ruda_async")
        return found

    actors = start(kind, 3)
    cluster.get(actors[1].__ray_call__.remote(disable))
    with pytest.raises(TransportUnavailableError, match="install the package") as caught:
        ruda_async.ray.connect_actors(actors, timeout=FAR)
    assert caught.value.rank == 1
    for actor in (actors[0], actors[2]):
        until_told(cluster, actor, "cannot form: install the package")
    deadline = time.monotonic() + LIMIT
    while entries():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_busy_actor_is_named(cluster: Any, start: Start) -> None:
    actors = start("Worker", 3)
    ruda_async.ray.connect_actors(actors, timeout=LIMIT)  # all have started
    actors[1].wait.remote()
    with pytest.raises(CollectiveTimeoutError, match="ranks 1 of 3 did not answer within 2 s") as caught:
        ruda_async.ray.connect_actors(actors, group="other", timeout=2)
    assert caught.value.missing == (1,)


def test_from_an_event_loop_and_from_an_actor(cluster: Any, start: Start) -> None:
    (commander,) = start("Commander", 1)
    actors, inputs = start("Worker", 2), values(2)
    for rank, total in cluster.get(commander.connect.remote(actors, inputs)):
        np.testing.assert_array_equal(total, sum(inputs))
        assert rank in (0, 1)
    kind, _, text = cluster.get(actors[0].outcome.remote(inputs[0], "commanded"))
    assert (kind, "in no group 'commanded'" in text) == ("ConfigError", True)


async def test_on_a_driver_with_an_event_loop(cluster: Any, start: Start) -> None:
    actors = start("AsyncWorker", 2)
    group = await ruda_async.ray.connect_actors_async(actors, timeout=LIMIT)
    assert (await actors[0].__ray_call__.remote(lambda actor: type(actor).__name__)) == "AsyncWorker"
    await group.aclose()
    with pytest.raises(ConfigError, match="no group 'default'"):
        await actors[0].total.remote(np.ones(2))


def test_an_asyncio_actor_has_to_be_a_rank(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"Stranger is an asyncio actor .* class Stranger\(.*AsyncRank\)"):
        ruda_async.ray.connect_actors(start("Stranger", 2), timeout=LIMIT)


def test_the_two_kinds_are_told_apart(cluster: Any, start: Start) -> None:
    actors = start("Worker", 1)
    ruda_async.ray.connect_actors(actors, timeout=LIMIT)
    kind, _, text = cluster.get(actors[0].wrong_kind.remote())
    assert kind == "ConfigError"
    assert "communicator('default')" in text


def test_mistakes_are_named_before_anything_happens(start: Start) -> None:
    (actor,) = start("Worker", 1)
    for actors, options, text in [
        ([], {}, "got no actors"),
        ([actor, actor], {}, r"actors\[1\] is the same actor as actors\[0\]"),
        ([actor, 3], {}, r"actors\[1\] is 3, which is no handle"),
        ([actor], {"group": ""}, "group='' is not a name"),
        ([actor], {"url": "lab"}, "names no transport"),
        ([actor], {"url": "tcpp://"}, "did you mean 'tcp'"),
        ([actor], {"heartbeet": 3, "url": "tcp://"}, "did you mean 'heartbeat'"),
        ([actor], {"algorithm": "magic"}, "algorithm='magic' is not known"),
    ]:
        with pytest.raises(ConfigError, match=text):
            ruda_async.ray.connect_actors(actors, timeout=LIMIT, **options)


@pytest.mark.parametrize(
    ("url", "one_node", "pattern"),
    [
        ("tcp://", False, r"tcp://10\.0\.0\.5/ray-\w{8}"),
        ("tcp://?heartbeat=2", False, r"tcp://10\.0\.0\.5/ray-\w{8}\?heartbeat=2"),
        ("tcp://:29500/job", False, r"tcp://10\.0\.0\.5:29500/job/ray-\w{8}"),
        ("tcp://h:29500", True, r"tcp://h:29500/ray-\w{8}"),
        ("memory://lab/a", True, r"memory://lab/a/ray-\w{8}"),
        (None, False, r"\w+://10\.0\.0\.5/ray-\w{8}"),
        ("nothing", True, "nothing"),
    ],
)
def test_where_a_group_meets(
    monkeypatch: pytest.MonkeyPatch, url: str | None, one_node: bool, pattern: str
) -> None:
    monkeypatch.delenv("RUDA_URL", raising=False)
    import re

    assert re.fullmatch(pattern, job_url(url, "10.0.0.5", one_node))
    if url == "tcp://":
        assert job_url(url, "::1", one_node).startswith("tcp://[::1]/ray-")


def test_a_place_keeps_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUDA_SECRET", "the driver's own, which actors need not have")
    host = Host("tcp://", 2, "127.0.0.1", one_node=True)
    try:
        assert len(host.place.secret) == 64
        assert host.place.secret not in repr(host.place)
        assert host.variables()["RUDA_SECRET"] == host.place.variables(1)["RUDA_SECRET"] == host.place.secret
        assert host.variables()["RUDA_LISTEN_FD"]
        assert not host.place.variables(1)["RUDA_LISTEN_FD"]
    finally:
        host.close()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    for call in (lambda: ruda_async.ray.connect_actors([object()]), ruda_async.ray.register_backend):
        with pytest.raises(TransportUnavailableError, match=r"pip install 'ruda-async\[ray\]'"):
            call()
