"""torch tensors as bytes and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.errors import TensorContractError
from ruda_async.tensors import TensorSpec, adapter_for
from ruda_async.tensors.dtypes import DTYPES

torch = pytest.importorskip("torch")

TORCH = adapter_for(torch.empty(0))


def distinct(shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor whose bytes differ from place to place."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 151 % 251).to(torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def plain_bytes(tensor: Any) -> bytes:
    """The elements in C order, found without the adapter."""
    flat = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@st.composite
def tensors(draw: st.DrawFn, expand: bool = True) -> Any:
    """A tensor of any dtype: sliced, permuted, perhaps expanded, perhaps with a gradient."""
    dtype = getattr(torch, draw(st.sampled_from(sorted(DTYPES))))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = distinct(shape, dtype)
    tensor = tensor[tuple(slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 3))) for _ in shape)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if expand and draw(st.booleans()):
        tensor = tensor.expand(3, *tensor.shape)
    if expand and dtype in (torch.float32, torch.bfloat16) and draw(st.booleans()):
        tensor.requires_grad_()
    return tensor


def name_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@given(tensors())
def test_read_gives_the_elements_in_c_order(tensor: Any) -> None:
    assert TORCH.spec(tensor) == TensorSpec(name_of(tensor), tuple(tensor.shape))
    view = TORCH.read(tensor)
    assert (view.format, view.ndim, view.c_contiguous) == ("B", 1, True)
    assert view.tobytes() == plain_bytes(tensor)


@given(tensors(expand=False))
def test_into_fills_any_layout(out: Any) -> None:
    source = distinct(tuple(out.shape), out.dtype).clone()
    target = TORCH.into(out, TensorSpec(name_of(out), tuple(out.shape)))
    target.buffer[:] = plain_bytes(source)
    assert target.finish() is out
    assert plain_bytes(out) == plain_bytes(source)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (3, 0), (0, 4)])
def test_allocate_round_trip(name: str, shape: tuple[int, ...]) -> None:
    source = distinct(shape, getattr(torch, name))
    target = TORCH.allocate(torch.nn.Parameter(torch.zeros(1)), shape, name)
    assert (target.buffer.format, target.buffer.readonly, target.buffer.nbytes) == ("B", False, source.nbytes)
    target.buffer[:] = TORCH.read(source)
    result = target.finish()
    assert type(result) is torch.Tensor
    assert (result.dtype, tuple(result.shape), result.requires_grad) == (source.dtype, shape, False)
    assert plain_bytes(result) == plain_bytes(source)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_contiguous_memory_is_not_copied(name: str) -> None:
    tensor = distinct((2, 3), getattr(torch, name)).clone()
    view = TORCH.read(tensor)
    out = torch.zeros_like(tensor)
    target = TORCH.into(out, TensorSpec(name, (2, 3)))
    target.buffer[:] = view
    assert plain_bytes(out) == plain_bytes(tensor)  # before finish(): the bytes went straight in
    tensor.view(torch.uint8).fill_(1)
    assert set(view) == {1}  # the view is the tensor's memory


def test_read_keeps_the_tensor_alive() -> None:
    view = TORCH.read(torch.full((1000,), 7, dtype=torch.uint8))
    torch.zeros(1000, dtype=torch.uint8)
    assert set(view) == {7}


def test_parameters_views_and_negated_tensors() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    assert TORCH.read(weight).tobytes() == plain_bytes(weight)
    assert TORCH.read((weight * 2).T).tobytes() == plain_bytes((weight * 2).T)
    negated = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj().imag
    assert negated.is_neg()
    assert TORCH.read(negated).tobytes() == torch.tensor([-1.0, -3.0, -5.0, -7.0]).numpy().tobytes()
    single = negated[1:2]
    assert single.is_contiguous()
    assert single.is_neg()
    assert TORCH.read(single).tobytes() == torch.tensor([-3.0]).numpy().tobytes()
    target = TORCH.into(single, TensorSpec("float32", (1,)))
    target.buffer[:] = torch.tensor([9.0]).numpy().tobytes()
    assert target.finish().tolist() == [9.0]


def test_autograd_notices_a_write_to_out() -> None:
    x = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    product = x * saved
    TORCH.into(saved, TensorSpec("float32", (3,))).finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_tensors() -> None:
    with torch.inference_mode():
        out = torch.zeros(2)
        target = TORCH.into(out, TORCH.spec(out))
        target.buffer[:] = TORCH.read(torch.ones(2))
        assert target.finish().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(2, dtype=torch.complex64), r"torch\.complex64 is not supported; .*view_as_real"),
        (lambda: torch.zeros(2, device="meta"), r"meta device has no data"),
        (lambda: torch.eye(2).to_sparse(), r"layout torch\.sparse_coo is not supported; pass \.to_dense\(\)"),
        (lambda: torch.eye(2).to_sparse_csr(), r"layout torch\.sparse_csr is not supported"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"quantized tensor \(torch\.qint8\) is not supported; pass .*dequantize\(\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_travel_are_named(make: Any, text: str) -> None:
    tensor = make()
    with pytest.raises(TensorContractError, match=text):
        adapter_for(tensor).spec(tensor)
    with pytest.raises(TensorContractError, match=text):
        adapter_for(tensor).read(tensor)


def test_function_transforms_are_refused() -> None:
    def inside(value: Any) -> Any:
        with pytest.raises(TensorContractError, match=r"torch\.func\.vmap.*outside of the transform"):
            TORCH.spec(value)
        with pytest.raises(TensorContractError, match=r"outside of the transform"):
            TORCH.read(value)
        return value.sum()

    torch.vmap(inside)(torch.zeros(2, 3))
    torch.func.grad(inside)(torch.zeros(3))


class Subclass(torch.Tensor):
    pass


class Sharded(torch.Tensor):
    def to_local(self) -> Any:
        raise AssertionError("only named, never called")


def test_subclasses_are_refused() -> None:
    with pytest.raises(TensorContractError, match=r"\.Subclass is not supported; pass \.as_subclass"):
        adapter_for(torch.zeros(2).as_subclass(Subclass))
    with pytest.raises(TensorContractError, match=r"\.Sharded is not supported; pass \.to_local\(\)"):
        adapter_for(torch.zeros(2).as_subclass(Sharded))
    with pytest.raises(
        TensorContractError, match=r"UninitializedParameter is not supported; .*run the module"
    ):
        adapter_for(torch.nn.UninitializedParameter())
    with (
        torch._subclasses.fake_tensor.FakeTensorMode(),
        pytest.raises(TensorContractError, match=r"FakeTensor is not supported; it has no data"),
    ):
        adapter_for(torch.zeros(2))


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (
            torch.zeros(2, 3, dtype=torch.float64),
            r"out= is float64\[2, 3\], but the result is float32\[2, 3\]",
        ),
        (torch.zeros(3, 2), r"out= is float32\[3, 2\], but the result is float32\[2, 3\]"),
        (torch.zeros(2, 3, requires_grad=True), r"out= requires a gradient.*pass out\.detach\(\)"),
        (torch.zeros(3).expand(2, 3), r"out= is an expanded tensor"),
    ],
)
def test_unfit_out_is_refused(out: Any, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        TORCH.into(out, TensorSpec("float32", (2, 3)))


def test_movedim_is_a_view() -> None:
    tensor = distinct((2, 3, 4), torch.int16)
    moved = TORCH.movedim(tensor, 2, 0)
    assert tuple(moved.shape) == (4, 2, 3)
    assert moved.data_ptr() == tensor.data_ptr()
    with pytest.raises(TensorContractError, match=r"shape \[2, 3, 4\] has no axis 3"):
        TORCH.movedim(tensor, 3, 0)


def test_unknown_dtype_is_not_allocated() -> None:
    with pytest.raises(TensorContractError, match=r"has no dtype 'float31'"):
        TORCH.allocate(torch.empty(0), (2,), "float31")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (5, 3), (0, 4)])
def test_cuda_round_trip(name: str, shape: tuple[int, ...]) -> None:
    host = distinct(shape, getattr(torch, name))
    source = host.cuda()
    if len(shape) == 2:
        source, host = source.T, host.T
    assert TORCH.read(source).tobytes() == plain_bytes(host)
    spec = TORCH.spec(source)
    out = torch.empty_like(source)
    for target in (TORCH.allocate(source, spec.shape, name), TORCH.into(out, spec)):
        target.buffer[:] = plain_bytes(host)
        result = target.finish()
        assert result.device == source.device
        assert plain_bytes(result.cpu()) == plain_bytes(host)
