"""`ShardedOptimizer`: each rank keeps and updates an equal part of the optimizer's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import ConfigError, TensorContractError
from .agreement import broadcast_tensors, check_initialised, describe, same_on_all_ranks
from .checkpoint import cut_state, whole_state
from .clipping import clip_grad_norm_
from .lanes import all_done, await_here, inner_of, refused
from .passes import is_known, known_to_all, mark_known
from .reduced import Reduced
from .shards import flatten

__all__ = ["ShardedOptimizer"]

#: What an optimizer's state consists of.
_STATE = {"state": dict, "param_groups": list}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ShardedOptimizer:
    """An optimizer whose state is spread over the ranks, each having ``1 / world_size`` of it.

    `step` sums gradients by reduce-scatter, so that each rank gets those of its shard, updates the shard, and
    gathers the parameters. For optimizers that treat every element alike (SGD, Adam, AdamW, RMSprop, …)
    the result is that of the plain optimizer on averaged gradients. A parameter without a gradient on every
    rank is left alone, as there. The stages are those of ZeRO-2 (Rajbhandari et al. 2020).

    Do not combine it with `GradientSync`, whose work it does itself. Parameters' data moves into memory of
    this object: make it after ``model.to(…)``. Collective: every rank makes one, and calls alike.

    Args:
        factory: makes a torch optimizer from parameter groups: ``partial(torch.optim.AdamW, lr=1e-3)``. The
            parameters in them are one-dimensional pieces of the real ones.
        params: parameters, or parameter groups as torch's optimizers take them; the same on all ranks.
        comm: a `ruda_async.sync.Communicator` or an `AsyncCommunicator` (see `off_loop`).
        divide_by: what the sum of gradients is divided by; the world size where None.
        broadcast: give all ranks rank 0's parameters first, frozen ones too.

    Attributes:
        optimizer: the inner optimizer, for learning-rate schedulers. Do not call its `step`.

    Raises:
        TensorContractError: a parameter cannot take part, or ranks' parameters differ (then on all ranks).
        ConfigError: there are no parameters, or one is there twice; the other ranks' call fails too. Where
            `factory` raises on one rank, the others' first step does, naming that rank.
        BlockedLoopError: called on the loop of an `AsyncCommunicator`.
        RudaError: as collectives do.
    """

    def __init__(
        self,
        factory: Callable[[list[dict[str, Any]]], Optimizer],
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        comm: Any,
        *,
        divide_by: float | None = None,
        broadcast: bool = True,
    ) -> None:
        inner = inner_of(comm)
        self._comm = comm
        self._inner = inner
        self._divide_by = divide_by
        try:
            groups = _groups(params)
        except (TensorContractError, ConfigError) as error:
            await_here(comm, refused(inner, "ShardedOptimizer", error))
        self._parameters: list[Parameter] = [p for group in groups for p in group["params"]]
        facts = [
            f"group {number}, {describe('parameter' if p.requires_grad else 'frozen', p)}"
            for number, group in enumerate(groups)
            for p in group["params"]
        ]
        await_here(comm, same_on_all_ranks(inner, "parameters to optimize", facts))
        if broadcast:
            await_here(comm, broadcast_tensors(inner, self._parameters))
        by_group = flatten(groups, inner.rank, inner.world_size)
        self._flats = [flat for flats in by_group for flat in flats]
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        #: How many parameters each group has, frozen ones too, as in a plain optimizer.
        self._sizes = [len(group["params"]) for group in groups]
        self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        self._reduced = False
        #: Of which gradients.
        self._seen = Reduced()
        pieces = [[piece.part for flat in flats for piece in flat.pieces] for flats in by_group]
        try:
            self.optimizer = factory(
                [{**group, "params": parts} for group, parts in zip(groups, pieces, strict=True)]
            )
        except Exception as error:  # the other ranks hear of it in their first step
            await_here(comm, refused(inner, "ShardedOptimizer", error, len(self._flats) + 1))

    # ------------------------------------------------------------------ a step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: change ``"lr"`` and the like there, alike on all ranks."""
        return self.optimizer.param_groups

    def shard_parameters(self) -> list[Parameter]:
        """This rank's pieces, one-dimensional, with their gradients after `reduce_gradients`."""
        return [piece.part for flat in self._flats for piece in flat.pieces]

    def reduce_gradients(self) -> None:
        """Sum gradients over ranks into the shards; collective.

        Where that was done since the last `step`, and backward has not run on any rank, it does nothing more
        than find this out, by a message.

        Raises:
            TensorContractError: a gradient is sparse or has another shape than its parameter, or a parameter
                was moved or unfrozen since this object was made; here or on the rank in ``.rank``.
            RudaError: as collectives do; also where this raised on another rank.
        """
        with known_to_all(self):
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        if self._reduced and not self._any_rank_has_new_gradients():
            return
        # Until they are summed again, `abandon` has to fail as many calls on every rank.
        self._reduced = False
        try:
            fault = self._fault()
            if fault is not None:
                raise TensorContractError(fault)
            for flat in self._flats:
                flat.load()
        except Exception as error:
            await_here(self._comm, refused(self._inner, "ShardedOptimizer", error, self._calls_left()))
        self._used.copy_(torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.uint8))
        await_here(self._comm, self._reduce())
        used = self._used.tolist()
        for flat in self._flats:
            if self._divide_by is not None:
                flat.gradient.div_(self._divide_by)
            flat.hand_out(used)
        self._reduced = True
        self._seen.note(self._parameters)

    def abandon(self, error: Exception) -> None:
        """Give this step up on all ranks: their `step` raises at once, naming this rank and `error`.

        To be called with whatever was caught between two steps, as `GradientSync.abandon`: an unreadable
        batch, an error in forward or in backward. Where `error` came out of a method of this object, the
        other ranks know already, and it does nothing.

        Raises:
            BlockedLoopError: called on the loop of an `AsyncCommunicator`.
        """
        if is_known(error, self):
            return
        mark_known(error, self)
        told = TensorContractError(f"this step was given up: {type(error).__name__}: {error}")
        call = refused(self._inner, "ShardedOptimizer", told, self._calls_left())
        with contextlib.suppress(TensorContractError):  # `told` itself
            await_here(self._comm, call)

    def _calls_left(self) -> int:
        """How many calls the other ranks make at once when they come to `reduce_gradients`.

        Only collectives change it, so it is the same on all ranks wherever each is between two of them.
        """
        return 1 if self._reduced else len(self._flats) + 1

    def _any_rank_has_new_gradients(self) -> bool:
        """Whether backward ran since they were reduced: a step that was skipped leaves them behind."""
        ours = any(p.grad is not None and not self._seen.has(p) for p in self._parameters)
        vote = torch.tensor([ours], dtype=torch.uint8)
        await_here(self._comm, self._inner.all_reduce(vote, "max", out=vote))
        return bool(vote.item())

    def _fault(self) -> str | None:
        """Why this rank cannot take part in a reduction."""
        for index, p in enumerate(self._parameters):
            if _is_sparse(p.grad):
                remedy = "make it dense (sparse=False for embeddings)"
                return f"the gradient of parameter {index} is sparse; {remedy}"
            if p.grad is not None and p.grad.shape != p.shape:
                return (
                    f"the gradient of parameter {index} has shape {list(p.grad.shape)} and the parameter "
                    f"{list(p.shape)}; leave .grad to backward, or give it the parameter's shape"
                )
        for index in self._frozen:
            if self._parameters[index].grad is not None and self._parameters[index].requires_grad:
                return (
                    f"parameter {index} was frozen when this optimizer was made and has a gradient now; make "
                    "another ShardedOptimizer after unfreezing"
                )
        moved = next((number for flat in self._flats if (number := flat.moved()) is not None), None)
        if moved is None:
            return None
        return (
            f"the data of parameter {moved} is no longer in this optimizer's memory, so no step would reach "
            "it; call model.to(…) and the like before making a ShardedOptimizer"
        )

    async def _reduce(self) -> None:
        op = "mean" if self._divide_by is None else "sum"
        inner = self._inner
        calls = [inner.reduce_scatter(flat.message, op, out=flat.gradient) for flat in self._flats]
        await all_done(inner.all_reduce(self._used, "max", out=self._used), *calls)

    def clip_grad_norm_(
        self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Sum gradients and clip them by their norm over all shards; see `training.clip_grad_norm_`."""
        with known_to_all(self):
            self._reduce_gradients()
            return clip_grad_norm_(
                (),
                max_norm,
                self._comm,
                sharded=self.shard_parameters(),
                norm_type=norm_type,
                error_if_nonfinite=error_if_nonfinite,
            )

    def step(self) -> None:
        """Reduce gradients, update this rank's shard, and gather all parameters; collective.

        Where it fails before the update, parameters and state are as they were, on all ranks. Where the inner
        optimizer raises, or the gathering fails, the other ranks' shards and state have taken the step, and
        no rank has the others' new parameters: the next step that succeeds makes parameters the same
        everywhere, but only a checkpoint makes up for the update that one rank lacks.

        Raises:
            RudaError: as collectives do; also where this raised on another rank, or `abandon` was called.
        """
        with known_to_all(self):
            self._reduce_gradients()
            try:
                self.optimizer.step()
            except Exception as error:
                await_here(self._comm, refused(self._inner, "ShardedOptimizer", error, len(self._flats)))
            await_here(self._comm, self._gather())
            self._reduced = False

    async def _gather(self) -> None:
        inner = self._inner
        await all_done(*(inner.all_gather(flat.shard, out=flat.whole) for flat in self._flats))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, of the parameters (or make those zero) and of the shards."""
        # Whether gradients are reduced stays as it is: ranks that differ in when they call this agree on it.
        for p in self._parameters:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad = torch.zeros_like(p.grad)
        self.optimizer.zero_grad()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, root: int | None = None) -> dict[str, Any] | None:
        """The whole state, in the form of a plain optimizer's; collective.

        It fits any number of ranks, and the plain optimizer. Parameters are not in it: they are whole on
        every rank, in ``model.state_dict()``.

        Args:
            root: the one rank that gets it (the others get None), or None for all.

        Raises:
            TensorContractError: the inner optimizer's state is not elementwise.
        """
        state = await_here(self._comm, whole_state(self._inner, self.optimizer, self._flats, root))
        if state is None:
            return None
        groups = []
        first = 0
        for group, count in zip(self.optimizer.param_groups, self._sizes, strict=True):
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({**options, "params": list(range(first, first + count))})
            first += count
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that any number of ranks, or a plain optimizer, saved; no communication.

        Every rank is given the whole state.

        Raises:
            ConfigError: it is of other parameters, or no optimizer's state. Nothing was changed, and the
                other ranks do not know of it: see that all of them load the same.
        """
        if not all(isinstance(state_dict.get(key), kind) for key, kind in _STATE.items()):
            there = ", ".join(map(repr, state_dict)) or "nothing"
            raise ConfigError(
                f"rank {self._inner.rank} of {self._inner.world_size}: a state has 'state' and "
                f"'param_groups', and this has {there}; pass what state_dict() returned"
            )
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        if theirs != self._sizes:
            raise ConfigError(
                f"the state has groups of {theirs} parameters and this optimizer of {self._sizes}; "
                "make it with the parameter groups that the state was saved with"
            )
        numbers = [index for group in state_dict["param_groups"] for index in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for place, piece in enumerate(piece for flat in self._flats for piece in flat.pieces):
            whole = state_dict["state"].get(numbers[piece.number])
            if whole is not None:
                shape = self._parameters[piece.number].shape
                _check_shapes(piece.number, shape, whole)
                state[place] = cut_state(piece, shape, whole)
        groups = []
        place = 0
        for theirs_, ours in zip(state_dict["param_groups"], self.optimizer.param_groups, strict=True):
            count = len(ours["params"])
            options = {k: v for k, v in theirs_.items() if k not in ("params", "param_names")}
            groups.append({**options, "params": list(range(place, place + count))})
            place += count
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def __repr__(self) -> str:
        return (
            f"<ShardedOptimizer of {len(self._parameters)} parameters, rank {self._inner.rank} of "
            f"{self._inner.world_size}: {type(self.optimizer).__name__}>"
        )


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _check_shapes(index: int, shape: torch.Size, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
            raise ConfigError(
                f"the state {key!r} of parameter {index} has shape {list(value.shape)} and the parameter "
                f"{list(shape)}; it was saved with another model"
            )


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups, checked."""
    given = list(params)
    groups: list[dict[str, Any]] = (
        [{**group} for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
    )
    seen: set[Parameter] = set()
    for group in groups:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for p in group["params"]:
            if p in seen:
                raise ConfigError("a parameter is there twice; give each to one group, once")
            if p.requires_grad and p.dtype not in _FLOATS:
                raise TensorContractError(
                    f"a parameter is {p.dtype}, whose gradients cannot be summed over ranks; leave it out, "
                    "or make it float16, bfloat16, float32 or float64"
                )
            check_initialised(f"parameter {len(seen)}", p)
            seen.add(p)
    if not any(p.requires_grad for p in seen):
        raise ConfigError("there are no parameters that require a gradient")
    return groups
