"""``ray.util.collective`` over this library: the backend ``"ruda"``.

Its calls block and work in place, on numpy arrays and torch tensors. Its lists "with one for each GPU" have
one element here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from .. import sync
from ..config import CommonParameters, environment
from ..errors import TensorContractError
from ..tensors import adapter_for
from ..transport.parameters import parse_parameters
from .board import Board
from .place import Host

__all__ = ["RudaGroup"]

#: Ray's name of an operator → ours.
_OPERATORS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVERAGE": "mean"}


class RudaGroup(BaseGroup):  # type: ignore[misc]  # Ray's classes are untyped
    """One actor's end of a group, made by Ray's ``init_collective_group`` or ``create_collective_group``.

    Raises:
        CollectiveTimeoutError: some ranks did not come within ``RUDA_TIMEOUT`` (300 s).
        ConfigError, TransportUnavailableError: ``RUDA_URL`` cannot be used.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        common = parse_parameters(
            CommonParameters,
            "RUDA_URL",
            {"timeout": os.environ.get("RUDA_TIMEOUT") or None},
            labels={"timeout": "RUDA_TIMEOUT"},
        )
        board = Board(group_name, rank, world_size)
        if rank:
            place = board.find(common.timeout)
            with environment(place.variables(rank)):
                self._comm = sync.connect()
        else:
            self._comm = _host(board)

    @classmethod
    def backend(cls) -> str:
        """The name under which Ray knows this backend."""
        return "RUDA"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """It needs nothing but this library."""
        return True

    def destroy_group(self) -> None:
        """Close this rank's communicator."""
        self._comm.close()

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensor: Sequence[Any], allreduce_options: Any = None) -> None:
        """Combine over ranks, in place."""
        value = _only(tensor, "allreduce")
        operator = _operator(allreduce_options)
        self._comm.all_reduce(value, operator, out=value, timeout=_timeout(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all ranks."""
        self._comm.barrier(timeout=_timeout(barrier_options))

    def reduce(self, tensor: Sequence[Any], reduce_options: Any = None) -> None:
        """Combine over ranks, in place on the root alone."""
        value, root = _only(tensor, "reduce"), getattr(reduce_options, "root_rank", 0)
        out = value if root == self.rank else None
        operator = _operator(reduce_options)
        self._comm.reduce(value, root, operator, out=out, timeout=_timeout(reduce_options))

    def broadcast(self, tensor: Sequence[Any], broadcast_options: Any = None) -> None:
        """The root's tensor, in place on the others."""
        value, root = _only(tensor, "broadcast"), getattr(broadcast_options, "root_rank", 0)
        out = None if root == self.rank else value
        self._comm.broadcast(value, root, out=out, timeout=_timeout(broadcast_options))

    def allgather(
        self, tensor_list: Sequence[Sequence[Any]], tensor: Sequence[Any], allgather_options: Any = None
    ) -> None:
        """Every rank's tensor, into a list with one for each."""
        value, outs = _only(tensor, "allgather"), _only(tensor_list, "allgather")
        self._check_shapes("allgather", value, outs)
        gathered = self._comm.all_gather(value[None], timeout=_timeout(allgather_options))
        for out, part in zip(outs, gathered, strict=True):
            out[...] = part

    def reducescatter(
        self, tensor: Sequence[Any], tensor_list: Sequence[Sequence[Any]], reducescatter_options: Any = None
    ) -> None:
        """Combine the lists over ranks; rank *r* gets the *r*-th tensor."""
        out, values = _only(tensor, "reducescatter"), _only(tensor_list, "reducescatter")
        self._check_shapes("reducescatter", out, values)
        operator, timeout = _operator(reducescatter_options), _timeout(reducescatter_options)
        self._comm.reduce_scatter(_stack(values), operator, out=out[None], timeout=timeout)

    def send(self, tensor: Sequence[Any], send_options: Any) -> None:
        """Send a tensor to one rank."""
        self._comm.send(_only(tensor, "send"), send_options.dst_rank, timeout=_timeout(send_options))

    def recv(self, tensor: Sequence[Any], recv_options: Any) -> None:
        """Receive a tensor of one rank, in place."""
        value = _only(tensor, "recv")
        self._comm.recv(recv_options.src_rank, out=value, timeout=_timeout(recv_options))

    def _check_shapes(self, call: str, one: Any, many: Sequence[Any]) -> None:
        """Whatever Ray itself does not check of a list with one tensor a rank."""
        expected = tuple(one.shape), one.dtype
        for index, other in enumerate(many):
            if (tuple(other.shape), other.dtype) != expected:
                raise TensorContractError(
                    f"{call} in Ray's group {self.group_name!r}: tensor {index} of the list is "
                    f"{other.dtype}{tuple(other.shape)} and the single one {one.dtype}{tuple(one.shape)}; "
                    "make them alike",
                    rank=self.rank,
                )


def _host(board: Board) -> sync.Communicator:
    """Rank 0's communicator: the place is shown to the others until all have joined."""
    host = Host(None, board.world_size, ray.util.get_node_ip_address(), one_node=board.world_size == 1)
    met = threading.Event()
    showing = threading.Thread(target=board.publish, args=(host.place, met), name="ruda-async board")
    showing.start()
    try:
        with environment(host.variables()):
            return sync.connect()
    finally:
        met.set()
        showing.join()
        host.close()


def _only(tensors: Sequence[Any], call: str) -> Any:
    """The one tensor of a list that has one for each GPU of the actor."""
    if len(tensors) != 1:
        raise TensorContractError(
            f"{call} with {len(tensors)} tensors of one actor: the backend 'ruda' takes one; make an actor "
            "for each GPU"
        )
    return tensors[0]


def _operator(options: Any) -> str:
    operator = getattr(options, "reduceOp", None)
    if operator is None:
        return "sum"
    if operator.name not in _OPERATORS:
        raise TensorContractError(
            f"the backend 'ruda' has no {operator.name}; it has {', '.join(_OPERATORS)}"
        )
    return _OPERATORS[operator.name]


def _timeout(options: Any) -> float | None:
    """Seconds, or None for the communicator's: Ray's default is a negative duration."""
    value = getattr(options, "timeout_ms", None)
    return value.total_seconds() if isinstance(value, timedelta) and value > timedelta() else None


def _stack(values: Sequence[Any]) -> Any:
    """One tensor with a leading axis for the list."""
    adapter = adapter_for(values[0])
    spec = adapter.spec(values[0])
    stacked: Any = adapter.allocate(values[0], (len(values), *spec.shape), spec.dtype).finish()
    for index, value in enumerate(values):
        stacked[index] = value
    return stacked
