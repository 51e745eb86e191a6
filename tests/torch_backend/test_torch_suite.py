"""torch's own distributed tests on this library's backend: all pass but for a kept list."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'ruda-async[torch]'")
pytest.importorskip("expecttest", reason="torch's tests need it: pip install expecttest")

import torch_suite  # noqa: E402

_BY_NAME = "torch lets the backend named gloo alone do this; ruda_async.torch_backend.monitored_barrier does"
_NO_GPU = "needs a CUDA device, and does not skip without one; fails on Gloo too"

#: What does not pass, and why; docs/torch_backend.md explains.
EXPECTED: dict[str, str] = {
    "test_get_backend": "asserts that the backend's name is that of the branch that the tests take",
    "test_monitored_barrier_failure_order": _BY_NAME,
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _BY_NAME,
    "test_SyncBatchNorm_process_group": "needs torchvision; fails on Gloo too",
    "test_all_to_all_cuda": _NO_GPU,
    "test_all_to_all_cuda_complex": _NO_GPU,
    "test_all_to_all_full_group_cuda": _NO_GPU,
    "test_all_to_all_group_cuda": _NO_GPU,
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL; fails on Gloo too",
    "test_batch_isend_irecv_op_err": _NO_GPU,
}
#: Torch skips these below eight ranks.
_EIGHT = ("_group_max", "_group_min", "_group_product", "_group_sum", "_group", "_order", "_wait_all_ranks")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is that of torch 2.13")
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
@pytest.mark.parametrize("world_size", [4, 8])
def test_of_torch(scheme: str, world_size: int) -> None:
    names = [name for name in torch_suite.test_names() if name not in EXPECTED]
    if world_size == 8:
        names = [n for n in names if n.endswith(_EIGHT) and "full_group" not in n]
    outcomes = torch_suite.run("ruda", names, world_size=world_size, environ={"RUDA_URL": f"{scheme}://"})
    bad = {name: outcome for name, outcome in outcomes.items() if outcome.kind in ("failed", "hung")}
    text = "\n".join(f"===== {name}: {outcome.kind}\n{outcome.text}" for name, outcome in bad.items())
    assert not bad, text
    assert sum(outcome.kind == "passed" for outcome in outcomes.values()) >= (100 if world_size == 4 else 20)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_list_names_what_does_not_pass() -> None:
    """An exception that is none any more leaves the list. (Those that hang are left out.)"""
    names = [name for name in EXPECTED if "rank_0_timeout" not in name]
    outcomes = torch_suite.run("ruda", names)
    assert [name for name, outcome in outcomes.items() if outcome.kind == "passed"] == []
