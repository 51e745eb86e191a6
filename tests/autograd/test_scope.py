"""`CollectiveScope`: losses that do not use what other ranks' losses use."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from autograd_support import leaf
from rank_threads import in_threads

from ruda_async import CollectiveTimeoutError, RudaError, TensorContractError, autograd, sync
from ruda_async.autograd import CollectiveScope, complete_scopes


@pytest.mark.timeout(30)
def test_without_a_scope_a_skipped_collective_hangs() -> None:
    """The case that the scope is for: it has to fail without it, or the other tests prove nothing."""

    def body(comm: sync.Communicator) -> None:
        x = leaf(1, 2)
        used, skipped = x.sum(), autograd.all_reduce_sum(comm, x, timeout=0.3).sum()
        if comm.rank:
            used.backward()
        else:
            with pytest.raises(CollectiveTimeoutError):
                (used + skipped).backward()
        comm.channel("end").barrier()

    in_threads(2, body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("poison", [1.0, math.nan, math.inf, -math.inf])
def test_skipped_on_one_rank(poison: float) -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x, factor = leaf(1, 2), leaf(3)
        expert = autograd.all_gather(comm, x * factor)
        if comm.rank == 1:
            expert = expert * poison  # its value reaches no loss; nor may it reach a gradient
        loss = (expert if comm.rank == 0 else x * 10).sum()
        completed = scope.complete(loss)
        assert completed.item() == loss.item()
        completed.backward()
        assert x.grad is not None
        assert factor.grad is not None
        # rank 0's loss counts every rank's x*factor once; rank 1 adds its own.
        assert x.grad.tolist() == ([3, 3] if comm.rank == 0 else [13, 13])
        assert factor.grad.item() == 3
        assert comm.stats()["channels"] == 1

    in_threads(2, body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_skipped_output_and_loss_that_are_not_finite(value: float) -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x = leaf(value, 1)
        y = autograd.all_reduce_sum(comm, x)
        assert not y.isfinite().all()
        loss = torch.tensor(value, dtype=torch.float64) if comm.rank else y[1]
        completed = scope.complete(loss)
        assert completed.numpy(force=True).tobytes() == loss.numpy(force=True).tobytes()
        completed.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0, 1]

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_edited_and_deleted_outputs() -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x = leaf(1)
        y = autograd.all_reduce_sum(comm, x)
        y.mul_(5)
        loss = y.sum() if comm.rank == 0 else torch.zeros((), dtype=torch.float64)
        del y
        scope.complete(loss).backward()
        assert x.grad is not None
        assert x.grad.item() == 5

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_used_nowhere_stays_out_of_backward() -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x = leaf(1, 2)
        for _ in range(3):
            autograd.all_reduce_sum(comm, x)
        loss = (x * x).sum()
        completed = scope.complete(loss)
        assert completed is loss
        before = comm.stats()["peers"][1 - comm.rank]["messages_sent"]
        completed.backward()
        assert comm.stats()["peers"][1 - comm.rank]["messages_sent"] == before  # not one message
        constant = torch.ones(())
        assert scope.complete(constant) is constant

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_needed_only_through_what_another_rank_was_given() -> None:
    """What is added on one rank depends on a call that no loss needed before: a second vote finds it."""

    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x = leaf(comm.rank + 1.0)
        first = autograd.all_reduce_sum(comm, x)
        # Only rank 1's second call depends on its first; only rank 0's loss needs the second.
        second = autograd.all_reduce_sum(comm, first * x if comm.rank == 1 else x * 1)
        loss = second.sum() if comm.rank == 0 else torch.zeros((), dtype=torch.float64)
        scope.complete(loss).backward()
        assert x.grad is not None
        # second = x0 + (x0 + x1)·x1; its gradients at x = (1, 2): 1 + x1 and x0 + 2·x1
        assert x.grad.item() == (3 if comm.rank == 0 else 5)

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_a_rank_whose_input_needs_no_gradient_passes_its_loss_s_on() -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x = torch.tensor([1.0, 2.0], requires_grad=comm.rank == 0)
        data = autograd.all_gather(comm, torch.ones(2))  # needs a gradient nowhere
        scope.complete((autograd.all_gather(comm, x) * data * (comm.rank + 1)).sum()).backward()
        if comm.rank == 0:
            assert x.grad is not None
            assert x.grad.tolist() == [3, 3]
        else:
            assert x.grad is None

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_what_is_tracked_nowhere_does_not_communicate_in_backward() -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        weight = leaf(1, 2)
        data = autograd.all_gather(comm, torch.ones(1, dtype=torch.float64))
        loss = scope.complete((weight * data).sum())
        before = comm.stats()["peers"]
        loss.backward()
        assert comm.stats()["peers"] == before

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_second_derivative_where_one_rank_s_loss_is_linear() -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        x = leaf(2.0)
        total = autograd.all_reduce_sum(comm, x)
        loss = (total**3 if comm.rank == 0 else total).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        assert first.item() == 3 * 4.0**2 + 1
        scope.complete(first.sum()).backward()
        assert x.grad is not None
        assert x.grad.item() == 2 * 6 * 4.0  # both ranks' first are 3·total² + 1

    in_threads(2, body)


@pytest.mark.timeout(30)
def test_steps_of_one_scope_and_nothing_is_kept() -> None:
    def body(comm: sync.Communicator) -> None:
        with CollectiveScope() as scope:
            bound = scope.bind(comm)
            assert bound.autodiff_context is scope
            assert autograd.differentiable(comm).autodiff_context is scope
            assert comm.channel("x").autodiff_context is None
            x = leaf(1)
            for step in range(4):
                y = bound.all_reduce_sum(x)
                node = weakref.ref(y.grad_fn)
                scope.complete(y.sum() if step % 2 == comm.rank else x.sum()).backward()
                del y
                gc.collect()
                assert node() is None
            assert x.grad is not None
            assert x.grad.item() == 6
        assert bound.autodiff_context is None

    in_threads(2, body)


# ---------------------------------------------------------------------- several groups


@pytest.mark.timeout(30)
def test_grid_of_two_by_two() -> None:
    """Rows and columns: rank 0's loss needs rank 3 by way of a group that rank 0 is not in."""

    def body(comm: sync.Communicator) -> None:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        assert row is not None
        assert column is not None
        scopes = [CollectiveScope(), CollectiveScope()]
        scopes[0].bind(row)
        scopes[1].bind(column)
        x = leaf(comm.rank + 1.0)
        inner = autograd.all_reduce_sum(column, x)
        outer = autograd.all_reduce_sum(row, inner)
        loss = outer.sum() if comm.rank == 0 else torch.zeros((), dtype=torch.float64)
        given = scopes if comm.rank % 2 else scopes[::-1]  # in any order
        complete_scopes(loss, given).backward()
        assert x.grad is not None
        assert x.grad.item() == 1

    in_threads(4, body)


@pytest.mark.timeout(30)
def test_grid_where_nobody_needs_anything() -> None:
    def body(comm: sync.Communicator) -> None:
        scopes = []
        x = leaf(1)
        for color in (comm.rank // 2, comm.rank % 2):
            group = comm.split(color)
            assert group is not None
            scopes.append(CollectiveScope())
            autograd.all_reduce_sum(scopes[-1].bind(group), x)
        loss = x.sum()
        assert complete_scopes(loss, scopes) is loss

    in_threads(4, body)


@pytest.mark.timeout(30)
def test_chain_of_overlapping_pairs() -> None:
    """News travels from one end of a chain of groups to the other, and end ranks wait for it."""

    def body(comm: sync.Communicator) -> None:
        pairs = [comm.split(0 if comm.rank in (left, left + 1) else None) for left in range(3)]
        scopes = {left: CollectiveScope() for left, pair in enumerate(pairs) if pair is not None}
        value = x = leaf(1.0)
        for left in reversed(range(3)):
            if left in scopes:
                scopes[left].bind(pairs[left])
                value = autograd.all_reduce_sum(pairs[left], value)
        loss = value.sum() if comm.rank == 0 else torch.zeros((), dtype=torch.float64)
        complete_scopes(loss, scopes.values()).backward()
        assert x.grad is not None
        assert x.grad.item() == 1  # rank 0's loss is the sum of all

    in_threads(4, body)


# ---------------------------------------------------------------------- misuse


@pytest.mark.timeout(30)
def test_misuse() -> None:
    def body(comm: sync.Communicator) -> None:
        with pytest.raises(RudaError, match="not bound"):
            CollectiveScope().complete(torch.zeros(()))
        with pytest.raises(RudaError, match="at least one"):
            complete_scopes(torch.zeros(()), [])
        scope = CollectiveScope()
        scope.bind(comm)
        with pytest.raises(RudaError, match="bound to"):
            scope.bind(comm.channel("other"))
        with pytest.raises(RudaError, match="each once"):
            complete_scopes(torch.zeros(()), [scope, scope])
        with pytest.raises(TypeError, match="not a communicator"):
            CollectiveScope().bind(object())

    in_threads(1, body)


@pytest.mark.timeout(30)
def test_ranks_that_recorded_other_calls_are_told() -> None:
    def body(comm: sync.Communicator) -> None:
        scope = CollectiveScope()
        scope.bind(comm)
        with torch.set_grad_enabled(comm.rank == 0):
            autograd.all_reduce_sum(comm, torch.ones(1))
        with pytest.raises(TensorContractError, match=r"recorded \d differentiable") as caught:
            scope.complete(torch.zeros(()))
        assert caught.value.rank == 1 - comm.rank
        loss = torch.zeros(())
        with pytest.raises(TensorContractError, match="complete"):
            scope.complete(loss) if comm.rank == 0 else complete_scopes(loss, [scope])
        assert comm.all_reduce_sum(torch.ones(1)).item() == 2

    in_threads(2, body)
