"""torch as a device: the CPU, which computes as IEEE 754 says too, and CUDA's where there is one."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from support import run_ranks

torch = pytest.importorskip("torch", reason="pip install 'ruda-async[torch]'")

from torch_calls import CALLS, same, values  # noqa: E402

from ruda_async import AsyncCommunicator  # noqa: E402
from ruda_async.errors import TensorContractError  # noqa: E402
from ruda_async.tensors import TensorSpec, device_memory, dtype_of, reducer, reducer_at  # noqa: E402
from ruda_async.tensors import device as device_module  # noqa: E402
from ruda_async.tensors.torch_adapter import TorchAdapter  # noqa: E402
from ruda_async.tensors.torch_device import TorchResident, TorchStaged  # noqa: E402

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
CASES = [
    *itertools.product(FLOATS, ("sum", "mean", "max", "min", "prod")),
    *itertools.product(INTEGERS, ("sum", "max", "min", "prod", "band", "bor", "bxor")),
    *itertools.product(("bool",), ("max", "min", "band", "bor", "bxor")),
]
#: NaNs of both signs and with payload, infinities, zeros of both signs, the largest and smallest numbers.
SPECIAL = {
    "float16": (2, [0x7E00, 0xFE01, 0x7C01, 0x7C00, 0xFC00, 0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x0001, 0x8001]),
    "bfloat16": (2, [0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x0001, 0x8001]),
    "float32": (
        4,
        [
            0x7FC00000,
            0xFFC00001,
            0x7F800001,
            0x7F800000,
            0xFF800000,
            0,
            1 << 31,
            0x7F7FFFFF,
            1,
            (1 << 31) + 1,
        ],
    ),
    "float64": (
        8,
        [0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0 << 48, 0xFFF0 << 48, 0, 1 << 63, (0x7FF0 << 48) - 1, 1],
    ),
}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> TorchResident:
    return TorchResident(torch.empty(0, device=request.param).device)


def inputs(dtype: str, size: int, seed: int = 0) -> list[bytes]:
    """Any bits for each of `size` ranks, and every combination of two special values beside them."""
    rng = np.random.default_rng(seed)
    itemsize = dtype_of(dtype).itemsize
    if dtype == "bool":
        return [rng.integers(0, 2, 4000, np.uint8).tobytes() for _ in range(size)]
    unsigned = np.dtype(f"uint{8 * itemsize}")
    some = [rng.integers(0, 1 << 8 * itemsize, 4000, unsigned, endpoint=False) for _ in range(size)]
    if dtype in SPECIAL:
        _, special = SPECIAL[dtype]
        pairs = np.array(list(itertools.product(special, special)), unsigned)
        some = [np.concatenate((pairs[:, rank % 2], values)) for rank, values in enumerate(some)]
        ordinary = [rng.standard_normal(3000).astype("float32") for _ in range(size)]
        kind = getattr(torch, dtype)
        some = [
            np.concatenate((values, torch.from_numpy(more).to(kind).view(torch.uint8).numpy().view(unsigned)))
            for values, more in zip(some, ordinary, strict=True)
        ]
    return [values.tobytes() for values in some]


def on_device(device: TorchResident, data: bytes) -> memoryview:
    return device.read(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device.device))


def off_device(view: memoryview) -> bytes:
    memory: Any = device_memory(view)
    return bytes(memory.data.cpu().numpy())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize(("dtype", "operator"), CASES)
def test_a_whole_reduction_has_the_hosts_bits(
    device: TorchResident, dtype: str, operator: str, size: int
) -> None:
    raws = inputs(dtype, size)
    expected = bytearray(len(raws[0]))
    host = reducer(dtype, operator, size)
    host.reduce(memoryview(expected), [memoryview(raw) for raw in raws])
    given = [on_device(device, raw) for raw in raws]
    out = on_device(device, bytes(len(raws[0])))
    ours = reducer_at(out, host)
    assert ours is not host
    ours.reduce(out, given)
    assert off_device(out) == expected
    assert [off_device(view) for view in given] == raws
    ours.reduce(given[-1], given)  # in place
    assert off_device(given[-1]) == expected


@pytest.mark.parametrize(("dtype", "operator"), CASES)
def test_step_by_step_it_has_them_too(device: TorchResident, dtype: str, operator: str) -> None:
    """Partial results, and a result of three ranks from them, as recursive algorithms do it."""
    a, b, c = inputs(dtype, 3, seed=1)
    host = reducer(dtype, operator, 3)
    ours = reducer_at(on_device(device, a), host)
    assert (ours.widens, ours.itemsize) == (host.widens, host.itemsize)
    assert (ours.partial_dtype, ours.partial_itemsize) == (host.partial_dtype, host.partial_itemsize)
    wide = len(a) // host.itemsize * host.partial_itemsize

    def steps(arithmetic: Any, place: Any) -> Any:
        partials = [place(bytes(wide)) for _ in range(3)]
        for partial, raw in zip(partials, (a, b, c), strict=True):
            arithmetic.load(partial, place(raw))
        arithmetic.combine(partials[0], partials[0], partials[1])
        arithmetic.combine(partials[2], partials[0], partials[2])
        stored = place(bytes(len(a)))
        arithmetic.store(stored, partials[2])
        if not arithmetic.widens:
            arithmetic.finish_inplace(partials[2])
        return stored, partials[2]

    expected = steps(host, lambda data: memoryview(bytearray(data)))
    found = steps(ours, lambda data: on_device(device, data))
    assert off_device(found[0]) == expected[0]
    if not host.widens:
        assert off_device(found[1]) == expected[1]


def test_memory_is_sliced_and_copied_in_place(device: TorchResident) -> None:
    tensor = torch.arange(12, dtype=torch.int32, device=device.device)
    view: Any = device.read(tensor)
    assert (len(view), view.nbytes) == (48, 48)
    part = view[8:24][4:12]
    assert part.span == (tensor.data_ptr() + 12, tensor.data_ptr() + 20)
    assert part.__cuda_array_interface__["data"] == (tensor.data_ptr() + 12, False)
    assert part.__cuda_array_interface__["stream"] == 1
    part[:4] = view[40:44]
    assert tensor.tolist() == [0, 1, 2, 10, 4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(TypeError, match="bytes-like"):
        memoryview(view)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "int64"])
def test_transposed_elements_are_those_of_torch(device: TorchResident, dtype: str) -> None:
    tensor = torch.arange(2 * 3 * 5, device=device.device).to(getattr(torch, dtype))
    memory: Any = device.read(tensor)
    moved = memory.transposed(dtype_of(dtype).itemsize, (2, 3, 5), (1, 2, 0))
    expected = tensor.reshape(2, 3, 5).permute(1, 2, 0).contiguous()
    assert torch.equal(moved.data.view(tensor.dtype).reshape(3, 5, 2), expected)


def test_what_is_not_contiguous_is_copied_on_the_device(device: TorchResident) -> None:
    base = torch.arange(12.0, device=device.device).reshape(3, 4)
    for value in (base.t(), base[:, 1:3], torch.view_as_complex(base.reshape(3, 2, 2)).conj().imag):
        view: Any = device.read(value)
        assert torch.equal(view.data.view(torch.float32).reshape(value.shape), value.clone())
    whole: Any = device.read(base)
    assert whole.span[0] == base.data_ptr()


def test_out_is_written_in_place_or_at_the_end(device: TorchResident) -> None:
    spec = TensorSpec("float32", (3, 2))
    straight = torch.zeros(3, 2, device=device.device)
    before = straight._version
    target = device.into(straight, spec)
    source: Any = device.read(torch.arange(6.0, device=device.device))
    target.buffer[:] = source
    assert target.finish() is straight
    assert straight._version > before
    strided = torch.zeros(2, 3, device=device.device).t()
    target = device.into(strided, spec)
    target.buffer[:] = source
    assert not strided.any()
    assert target.finish() is strided
    elsewhere = torch.zeros(3, 2)  # on the host, whatever the device is
    target = device.into(elsewhere, spec)
    target.buffer[:] = source
    assert target.finish() is elsewhere
    for out in (straight, strided, elsewhere):
        assert out.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_staged_tensors_come_back_as_they_should(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is asked of a call's adapter for a device that the transport knows nothing of."""

    async def body(comm: AsyncCommunicator) -> Any:
        x = values(comm.rank, 30, torch.bfloat16)
        results = [await CALLS[name](comm, x)]
        out = torch.zeros(5, 30, dtype=x.dtype).t()
        assert await comm.all_reduce_sum(x, out=out) is out
        return [*results, out]

    expected = await run_ranks(3, body)
    monkeypatch.setattr(TorchAdapter, "on_devices", True)
    monkeypatch.setattr(TorchAdapter, "for_call", lambda self, value, resident: TorchStaged(value.device))
    monkeypatch.setattr(device_module, "_said", set())
    with caplog.at_level(logging.INFO, "ruda_async"):
        found = await run_ranks(3, body)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other)
    assert [record.getMessage()[:23] for record in caplog.records] == ["CUDA tensors are staged"]


def test_an_out_that_cannot_be_written_is_refused_as_on_the_host(device: TorchResident) -> None:
    spec = TensorSpec("float32", (3, 2))
    for out, reason in (
        (torch.zeros(3, 2, requires_grad=True), "requires a gradient"),
        (torch.zeros(1, 2).expand(3, 2), "share memory"),
        (torch.zeros(2, 3), r"float32\[2, 3\]"),
        (np.zeros((3, 2), np.float32), "ndarray"),
    ):
        with pytest.raises(TensorContractError, match=reason):
            device.into(out, spec)
