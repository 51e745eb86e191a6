"""Finding the adapter of a value, and adding one."""

from __future__ import annotations

import array
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ruda_async.errors import TensorContractError
from ruda_async.tensors import Target, TensorSpec, adapter, adapter_for, register_adapter

torch = pytest.importorskip("torch")


def run_python(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_the_library_does_not_import_torch() -> None:
    run_python(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import numpy\n"
        "from ruda_async.tensors import adapter_for, reducer\n"
        "assert adapter_for(numpy.zeros(2)).kind == 'numpy'\n"
        "reducer('bfloat16', 'sum', 2)\n"
        "try:\n"
        "    adapter_for([1, 2])\n"
        "except ValueError:\n"
        "    pass\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
    )


def test_both_kinds_are_found() -> None:
    assert adapter_for(np.zeros(2)).kind == "numpy"
    assert adapter_for(torch.zeros(2)).kind == "torch"
    assert adapter_for(torch.nn.Parameter(torch.zeros(2))) is adapter_for(torch.zeros(2))


@pytest.mark.parametrize(
    ("value", "name"),
    [([1, 2], "list"), (3.0, "float"), (True, "bool"), (None, "NoneType"), (array.array("f"), "array.array")],
)
def test_other_values_are_refused_by_type(value: object, name: str) -> None:
    with pytest.raises(
        TensorContractError, match=rf"type {name} is no tensor.*numpy\.asarray or torch\.as_tensor"
    ):
        adapter_for(value)


def test_out_of_another_kind_is_refused() -> None:
    spec = TensorSpec("float32", (2,))
    with pytest.raises(TensorContractError, match=r"out= is of type torch\.Tensor, but the input is a numpy"):
        adapter_for(np.zeros(2)).into(torch.zeros(2), spec)
    with pytest.raises(
        TensorContractError, match=r"out= is of type numpy\.ndarray, but the input is a torch"
    ):
        adapter_for(torch.zeros(2)).into(np.zeros(2, np.float32), spec)


class ArrayAdapter:
    """`array.array` of doubles: a third kind of tensor, with one axis."""

    kind = "array"

    def accepts(self, value: object) -> bool:
        return isinstance(value, array.array)

    def spec(self, value: Any) -> TensorSpec:
        return TensorSpec("float64", (len(value),))

    def read(self, value: Any) -> memoryview:
        return memoryview(value).cast("B")

    def allocate(self, like: Any, shape: tuple[int, ...], dtype: str) -> Target[Any]:
        made = array.array("d", bytes(8 * shape[0]))
        return Target(memoryview(made).cast("B"), lambda: made)

    def into(self, out: Any, spec: TensorSpec) -> Target[Any]:
        adapter.check_out(self, out, spec)
        return Target(memoryview(out).cast("B"), lambda: out)

    def movedim(self, value: Any, source: int, destination: int) -> Any:
        return value


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry as it is, put back afterwards."""
    monkeypatch.setattr(adapter, "_adapters", list(adapter._adapters))
    monkeypatch.setattr(adapter, "_by_type", {})


@pytest.mark.usefixtures("registry")
def test_a_third_kind_can_be_registered() -> None:
    value = array.array("d", [1.0, 2.0])
    with pytest.raises(TensorContractError):
        adapter_for(value)
    register_adapter(ArrayAdapter())
    third = adapter_for(value)
    assert third.kind == "array"
    target = third.allocate(value, third.spec(value).shape, "float64")
    target.buffer[:] = third.read(value)
    assert target.finish() == value
    with pytest.raises(TensorContractError, match=r"accepted are array, numpy, torch tensors"):
        adapter_for("text")
    assert adapter_for(np.zeros(1)).kind == "numpy"


@pytest.mark.usefixtures("registry")
def test_a_later_adapter_goes_before_the_earlier() -> None:
    first, second = ArrayAdapter(), ArrayAdapter()
    register_adapter(first)
    assert adapter_for(array.array("d")) is first
    register_adapter(second)
    assert adapter_for(array.array("d")) is second
