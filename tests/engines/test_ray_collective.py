"""Programs written for ``ray.util.collective`` run on the backend ``"ruda"``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

import ruda_async.ray
from ruda_async import TransportUnavailableError

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'ruda-async[ray]'")
pytest.importorskip(
    "ray.util.collective.backend_registry", reason="needs a Ray with a registry of collective backends"
)


pytestmark = pytest.mark.timeout(180)

Start = Callable[[str, int], list[Any]]
SIZE = 3


def arrays(kind: str, dtype: str = "float32") -> list[Any]:
    """A distinct tensor for each rank, with sums that are exact."""
    numbers = np.random.default_rng(5).integers(1, 9, (SIZE, 2, 3)).astype(dtype)
    return [as_kind(kind, array) for array in numbers]


def as_kind(kind: str, array: Any) -> Any:
    return pytest.importorskip("torch").from_numpy(array.copy()) if kind == "torch" else array.copy()


@pytest.fixture
def group(cluster: Any, start: Start) -> list[Any]:
    """Actors that have initialised the group ``default``."""
    actors = start("Collective", SIZE)
    cluster.get([actor.init.remote(SIZE, rank, "default") for rank, actor in enumerate(actors)])
    return actors


def call(name: str, actors: list[Any], per_rank: list[tuple[Any, ...]], **options: Any) -> list[Any]:
    """Make a call on all ranks: what it left in each one's arguments."""
    calls = [a.call.remote(name, *args, **options) for a, args in zip(actors, per_rank, strict=True)]
    left: list[Any] = ray.get(calls)
    return left


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_call(group: list[Any], kind: str) -> None:
    inputs = arrays(kind)
    numbers = np.array([np.asarray(x) for x in inputs])
    zeros = as_kind(kind, np.zeros((2, 3), np.float32))

    for (total,) in call("allreduce", group, [(x,) for x in inputs]):
        assert type(total) is type(inputs[0])
        np.testing.assert_array_equal(total, numbers.sum(0))
    for rank, (total,) in enumerate(call("reduce", group, [(x,) for x in inputs], dst_rank=1)):
        np.testing.assert_array_equal(total, numbers.sum(0) if rank == 1 else numbers[rank])
    for (value,) in call("broadcast", group, [(x,) for x in inputs], src_rank=2):
        np.testing.assert_array_equal(value, numbers[2])
    for parts, _ in call("allgather", group, [([zeros + 0 for _ in inputs], x) for x in inputs]):
        np.testing.assert_array_equal(np.array([np.asarray(part) for part in parts]), numbers)
    lists = [[x + rank * 10 for rank in range(SIZE)] for x in inputs]
    for rank, (out, _) in enumerate(call("reducescatter", group, [(zeros, x) for x in lists])):
        np.testing.assert_array_equal(out, (numbers + rank * 10).sum(0))
    assert call("barrier", group, [()] * SIZE) == [()] * SIZE
    sending = group[0].call.remote("send", inputs[0], 2)
    received, _ = ray.get(group[2].call.remote("recv", zeros, 0))
    np.testing.assert_array_equal(received, numbers[0])
    ray.get(sending)


def test_operators(group: list[Any]) -> None:
    from ray.util.collective.types import ReduceOp

    numbers = np.array(arrays("numpy", "int64"))
    for op, expected in [
        (ReduceOp.SUM, numbers.sum(0)),
        (ReduceOp.PRODUCT, numbers.prod(0)),
        (ReduceOp.MIN, numbers.min(0)),
        (ReduceOp.MAX, numbers.max(0)),
    ]:
        for (result,) in call("allreduce", group, [(x,) for x in numbers], op=op):
            np.testing.assert_array_equal(result, expected)


def test_scalars_and_lists_that_do_not_fit(group: list[Any]) -> None:
    for (total,) in call("allreduce", group, [(np.array(float(r)),) for r in range(SIZE)]):
        assert total == 3.0
    ones = np.ones(2, np.float32)
    wrong = [ones, np.ones(3, np.float32), ones]
    for kind, _, text in call("allgather", group, [(wrong, ones)] * SIZE):
        assert kind == "TensorContractError"
        assert "tensor 1 of the list is float32(3,)" in text
    lengths = [2, 3, 2]  # found by talking, and so on every rank
    for kind, _, _ in call("allreduce", group, [(np.ones(n),) for n in lengths]):
        assert kind == "CollectiveMismatchError"
    for (total,) in call("allreduce", group, [(ones,)] * SIZE):
        np.testing.assert_array_equal(total, [SIZE, SIZE])


def test_a_name_can_be_used_again(group: list[Any]) -> None:
    ray.get([actor.destroy.remote("default") for actor in group])
    ray.get([actor.init.remote(SIZE, rank, "default") for rank, actor in enumerate(group[::-1])])
    for (value,) in call("broadcast", group, [(x,) for x in arrays("numpy")], src_rank=0):
        np.testing.assert_array_equal(value, arrays("numpy")[2])  # the last actor is rank 0 now


def test_keys_of_a_group_that_died_mislead_nobody(cluster: Any, start: Start) -> None:
    from ray.experimental import internal_kv

    space = ray.get_runtime_context().namespace
    stale = msgpack.packb(["tcp://127.0.0.1:9/gone", "0" * 64, [b"another token"]])
    for rank, value in enumerate([stale, b"an old token", b"another token"]):
        key = f"{space}/haunted/{SIZE}/{rank}"
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace="ruda_async")
    actors = start("Collective", SIZE)
    ray.get([actor.init.remote(SIZE, rank, "haunted") for rank, actor in enumerate(actors)])
    for (total,) in call("allreduce", actors, [(x,) for x in arrays("numpy")], group_name="haunted"):
        np.testing.assert_array_equal(total, sum(arrays("numpy")))
    assert internal_kv._internal_kv_list(f"{space}/haunted", namespace="ruda_async") == []


def test_groups_that_the_driver_declares(cluster: Any, start: Start) -> None:
    actors = start("Collective", SIZE)
    ruda_async.ray.register_backend()
    ruda_async.ray.register_backend()  # harmless twice
    ray.util.collective.create_collective_group(actors, SIZE, [2, 0, 1], "ruda", "declared")
    inputs = arrays("numpy")
    for (value,) in call("broadcast", actors, [(x,) for x in inputs], src_rank=0, group_name="declared"):
        np.testing.assert_array_equal(value, inputs[1])
    ray.get([actor.destroy.remote("declared") for actor in actors])


def test_the_single_controller_form(cluster: Any, start: Start) -> None:
    experimental = pytest.importorskip("ray.experimental.collective")
    actors = start("Collective", SIZE)
    ruda_async.ray.register_backend()
    handle = experimental.create_collective_group(actors, backend="ruda", name="controlled")
    for (total,) in call("allreduce", actors, [(x,) for x in arrays("numpy")], group_name="controlled"):
        np.testing.assert_array_equal(total, sum(arrays("numpy")))
    assert handle.backend == "RUDA"


def test_a_ray_without_a_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.util.collective.backend_registry", None)
    monkeypatch.delattr(ray.util.collective, "backend_registry")
    text = rf"Ray {ray.__version__} has no registry .* upgrade it"
    with pytest.raises(TransportUnavailableError, match=text):
        ruda_async.ray.register_backend()
