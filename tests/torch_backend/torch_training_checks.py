"""What torch builds on process groups, on this library's group and on Gloo's: see `torch_checks`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_checks import Check, Group, same

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def model(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(7)
    layers: list[nn.Module] = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(64))
    return nn.Sequential(*layers)


def train(net: nn.Module, steps: int = 3) -> None:
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def full(net: nn.Module) -> Iterator[Tensor]:
    for value in net.state_dict().values():
        yield value.full_tensor() if isinstance(value, DTensor) else value


def alike(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-6) -> None:
    for a, b in zip(full(ours), full(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def on_all_ranks(net: nn.Module, group: Group) -> None:
    """Every rank holds the same parameters to the bit."""
    for value in net.parameters():
        first = value.detach().clone()
        dist.broadcast(first, 0, group=group)
        same(first, value.detach())


# ---------------------------------------------------------------------- data parallel


@check
def data_parallel(ruda: Group, gloo: Group) -> None:
    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"find_unused_parameters": True}):
        nets = [DistributedDataParallel(model(norm=True), process_group=g, **options) for g in (ruda, gloo)]
        for net in nets:
            train(net)
        alike(*nets)
        on_all_ranks(nets[0], ruda)


@check
def data_parallel_hooks(ruda: Group, gloo: Group) -> None:
    hooks: tuple[tuple[float, Callable[[Group], tuple[Any, Any]]], ...] = (
        (0.001, lambda g: (g, default_hooks.allreduce_hook)),
        (0.001, lambda g: (g, default_hooks.fp16_compress_hook)),
        # Its callbacks start further calls and wait for them. With several buckets those would race with the
        # next bucket's call, and calls match by order.
        (
            25,
            lambda g: (
                powerSGD_hook.PowerSGDState(g, matrix_approximation_rank=1, start_powerSGD_iter=2),
                powerSGD_hook.powerSGD_hook,
            ),
        ),
    )
    for megabytes, hook in hooks:
        nets = []
        for group in (ruda, gloo):
            net = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=megabytes)
            net.register_comm_hook(*hook(group))
            train(net, steps=4)
            nets.append(net)
        alike(*nets, tolerance=2e-3)


@check
def data_parallel_accumulates(ruda: Group, gloo: Group) -> None:
    nets = [DistributedDataParallel(model(), process_group=g) for g in (ruda, gloo)]
    for net in nets:
        torch.manual_seed(dist.get_rank())
        with net.no_sync():
            net(torch.randn(4, 16)).sum().backward()
        net(torch.randn(4, 16)).sum().backward()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# ---------------------------------------------------------------------- sharded


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


@check
def fully_sharded(ruda: Group, gloo: Group) -> None:
    nets = [sharded(DeviceMesh.from_group(g, "cpu")) for g in (ruda, gloo)]
    plain = DistributedDataParallel(model(), process_group=gloo)
    for net in (*nets, plain):
        train(net)
    alike(nets[0], nets[1])
    alike(nets[0], plain.module, tolerance=1e-5)


@check
def fully_sharded_in_bfloat16(ruda: Group, gloo: Group) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    net = sharded(DeviceMesh.from_group(ruda, "cpu"), mp_policy=policy)
    exact = DistributedDataParallel(model(), process_group=gloo)
    train(net)
    train(exact)
    alike(net, exact.module, tolerance=2e-2)


@check
def hybrid_sharded(ruda: Group, gloo: Group) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    assert dist.get_backend(mesh.get_group("shard")) == "ruda"
    net = sharded(mesh)
    plain = DistributedDataParallel(model(), process_group=gloo)
    train(net)
    train(plain)
    alike(net, plain.module, tolerance=1e-5)


# ---------------------------------------------------------------------- distributed tensors


@check
def distributed_tensors(ruda: Group, gloo: Group) -> None:
    torch.manual_seed(3)
    size = dist.get_world_size()
    a, b = torch.randn(size * 3 + 1, 10), torch.randn(10, size * 2)  # the first does not divide evenly
    mesh = DeviceMesh.from_group(ruda, "cpu")
    for placement in (Shard(0), Shard(1), Replicate()):
        whole = distribute_tensor(a, mesh, [placement])
        same(whole.full_tensor(), a)
        for other in (Shard(0), Shard(1), Replicate()):
            same(whole.redistribute(mesh, [other]).full_tensor(), a)
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    for placement in (Replicate(), Shard(0), Shard(1)):
        torch.testing.assert_close(product.redistribute(mesh, [placement]).full_tensor(), a @ b)
    row = distribute_tensor(a, mesh, [Shard(0)]).requires_grad_()
    (row @ distribute_tensor(b, mesh, [Replicate()])).sum().backward()
    torch.testing.assert_close(row.grad.full_tensor(), torch.ones(len(a), size * 2) @ b.t())


# ---------------------------------------------------------------------- checkpoints


@check
def checkpoints(ruda: Group, gloo: Group) -> None:
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, 0, group=ruda)
    mesh = DeviceMesh.from_group(ruda, "cpu")
    net = sharded(mesh)
    train(net)
    state = {"net": net.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=place[0], process_group=ruda)
    other = sharded(mesh)
    loaded = {"net": other.state_dict(), "step": 0}
    dcp.load(loaded, checkpoint_id=place[0], process_group=ruda)
    assert loaded["step"] == 3
    for a, b in zip(full(net), full(other), strict=True):
        same(a, b)
    writing = dcp.async_save(state, checkpoint_id=f"{place[0]}/later", process_group=gloo)
    train(other, steps=1)  # meanwhile, the other group computes
    writing.result()
