"""torch's collectives, each as one call of this library.

A `Call` is built on the thread that asked for it, which checks its tensors, and carried out on the loop.
Everything that only moves goes in rows of elements, so that ranks have to agree on numbers of elements and
on dtypes, as with torch's own backends, and not on shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives.operation import Link
from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from .operands import Pieces, Receiver, flat, operator, plain, scaled
from .work import COMPLETIONS

__all__ = [
    "Call",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "all_to_all_list",
    "barrier",
    "broadcast",
    "carry_out",
    "gather",
    "receive",
    "receive_any",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_list",
    "refusal",
    "scatter",
    "send",
]

#: Results up to this many bytes are settled on the loop, larger ones in another thread.
_ON_THE_LOOP = 1 << 16

Start = Callable[[AsyncCommunicator, float], Coroutine[Any, Any, Any]]


class Call(NamedTuple):
    """One call of the library.

    Attributes:
        start: makes the call with a timeout in seconds.
        finish: takes its result to where torch wants it, and returns the call's value; None where the
            result lies there already.
        nbytes: how much `finish` copies.
    """

    start: Start
    finish: Callable[[Any], Any] | None = None
    nbytes: int = 0


async def carry_out(call: Call, communicator: AsyncCommunicator, seconds: float) -> Any:
    """Make the call; its first step takes the channel's next number."""
    result = await call.start(communicator, seconds)
    if call.finish is None:
        return None
    if call.nbytes <= _ON_THE_LOOP:
        return call.finish(result)
    return await asyncio.get_running_loop().run_in_executor(COMPLETIONS, call.finish, result)


# ---------------------------------------------------------------------- refusing


class _Refused:
    """A call whose input is bad here: it fails on every rank, and takes the number that it would have."""

    def __init__(self, operation: str, error: TensorContractError) -> None:
        self.operation = operation
        self._error = error

    def prepare(self, rank: int, size: int, settings: Any) -> bytes:
        raise self._error

    async def run(self, link: Link) -> None:
        raise self._error


def refusal(name: str, error: TensorContractError) -> Call:
    """The call that tells all ranks that this one cannot make call `name`."""
    return Call(lambda comm, seconds: comm._call(_Refused(name, error), seconds))


# ---------------------------------------------------------------------- reductions


def all_reduce(tensor: Any, op: Any) -> Call:
    """Combine `tensor` in place."""
    name, factor = operator(op, tensor)
    target = plain(tensor)
    value = scaled(target, factor)
    return Call(lambda comm, seconds: comm.all_reduce(value, name, out=target, timeout=seconds))


def reduce(tensor: Any, root: int, op: Any) -> Call:
    """Combine `tensor` in place on `root`; the others' keep their values."""
    name, factor = operator(op, tensor)
    target = plain(tensor)
    value = scaled(target, factor)

    def start(comm: AsyncCommunicator, seconds: float) -> Coroutine[Any, Any, Any]:
        out = target if comm.rank == root else None
        return comm.reduce(value, root, name, out=out, timeout=seconds)

    return Call(start)


def reduce_scatter(output: Any, input: Any, op: Any) -> Call:
    """Combine `input`, a block for each rank, into this rank's `output`."""
    name, factor = operator(op, input)
    value, out = scaled(flat(input), factor), Receiver(output)
    return _into(out, lambda comm, seconds: comm.reduce_scatter(value, name, out=out.row, timeout=seconds))


def reduce_scatter_list(output: Any, inputs: Sequence[Any], op: Any, rank: int, size: int) -> Call:
    """Combine a list of one tensor for each rank, perhaps of different sizes, into `output`."""
    blocks = Pieces(inputs, size)
    name, factor = operator(op, inputs[0])
    value, out = scaled(blocks.joined(), factor), Receiver(output)
    if blocks.equal:
        return _into(
            out, lambda comm, seconds: comm.reduce_scatter(value, name, out=out.row, timeout=seconds)
        )
    if out.row.numel() != blocks.sizes[rank]:
        raise TensorContractError(
            f"the output has {out.row.numel()} elements, but tensor {rank} of the inputs has "
            f"{blocks.sizes[rank]}"
        )

    def finish(total: Tensor) -> None:
        out.row.copy_(torch.split(total, blocks.sizes)[rank])
        if out.settle is not None:
            out.settle()

    return Call(lambda comm, seconds: comm.all_reduce(value, name, timeout=seconds), finish, _nbytes(out.row))


# ---------------------------------------------------------------------- gathers


def all_gather(output: Any, input: Any) -> Call:
    """Every rank's `input`, one after the other, in `output`."""
    value, out = flat(input), Receiver(output)
    return _into(out, lambda comm, seconds: comm.all_gather(value, out=out.row, timeout=seconds))


def all_gather_list(outputs: Sequence[Any], input: Any, size: int) -> Call:
    """Every rank's `input` in its tensor of `outputs`; they may be of different sizes."""
    blocks, value = Pieces(outputs, size), flat(input)
    if blocks.equal:
        return Call(
            lambda comm, seconds: comm.all_gather(value, out=blocks.row, timeout=seconds),
            None if blocks.row is not None else blocks.fill,
            sum(blocks.sizes) * value.element_size(),
        )
    return Call(lambda comm, seconds: comm.all_gather_v(value, timeout=seconds), *_checked(blocks, value))


def gather(outputs: Sequence[Any] | None, input: Any, root: int, rank: int, size: int) -> Call:
    """Every rank's `input` in its tensor of the root's `outputs`."""
    value = flat(input)
    if rank != root:
        if outputs:
            raise TensorContractError(f"gather to rank {root} has outputs on rank {rank}; pass none there")
        return Call(lambda comm, seconds: comm.gather(value, root, timeout=seconds))
    blocks = Pieces(outputs or (), size)
    return Call(
        lambda comm, seconds: comm.gather(value, root, out=blocks.row, timeout=seconds),
        None if blocks.row is not None else blocks.fill,
        sum(blocks.sizes) * value.element_size(),
    )


# ---------------------------------------------------------------------- from one to all


def broadcast(tensor: Any, root: int) -> Call:
    """The root's `tensor` in every rank's."""
    value = Receiver(tensor)
    source = flat(tensor)
    return _into(value, lambda comm, seconds: comm.broadcast(source, root, out=value.row, timeout=seconds))


def scatter(output: Any, inputs: Sequence[Any] | None, root: int, rank: int, size: int) -> Call:
    """This rank's tensor of the root's list `inputs` in `output`."""
    out = Receiver(output)
    value = None
    if rank == root:
        value = Pieces(inputs or (), size).joined()
    elif inputs:
        raise TensorContractError(f"scatter from rank {root} has inputs on rank {rank}; pass none there")
    return _into(
        out, lambda comm, seconds: comm.scatter(value, root, like=out.row, out=out.row, timeout=seconds)
    )


# ---------------------------------------------------------------------- from all to all


def all_to_all(
    output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], size: int
) -> Call:
    """Rows of `input` to each rank and of `output` from each, as many as the splits say; equal without."""
    source, target = plain(input), plain(output)
    send = _elements(source, input_splits, size, "input")
    receive = _elements(target, output_splits, size, "output")
    value, out = source.reshape(-1), Receiver(output)
    return _exchange(value, send, receive, out)


def all_to_all_list(outputs: Sequence[Any], inputs: Sequence[Any], size: int) -> Call:
    """Tensor *r* of `inputs` to rank *r*; what comes from rank *r* in tensor *r* of `outputs`."""
    source, target = Pieces(inputs, size), Pieces(outputs, size)
    value = source.joined()
    if target.row is not None:
        return _exchange(value, source.sizes, target.sizes, Receiver(target.row))
    return Call(
        lambda comm, seconds: comm.all_to_all_v(value, source.sizes, timeout=seconds),
        *_checked(target, value),
    )


def _exchange(value: Tensor, send: list[int], receive: list[int], out: Receiver) -> Call:
    def finish(exchange: Any) -> None:
        _check_counts(exchange.receive_counts, receive)
        if out.settle is not None:
            out.settle()

    return Call(
        lambda comm, seconds: comm.all_to_all_v(value, send, out=out.row, timeout=seconds),
        finish,
        0 if out.settle is None else _nbytes(out.row),
    )


def _elements(tensor: Tensor, splits: Sequence[int], size: int, side: str) -> list[int]:
    """How many elements go to, or come from, each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise TensorContractError(
                f"the {side} has {rows} rows, which {size} ranks do not divide; pass {side}_split_sizes"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise TensorContractError(
            f"{side}_split_sizes={list(splits)} are not {size} numbers that sum to the {side}'s {rows} rows"
        )
    width = tensor.numel() // rows if rows else 0
    return [n * width for n in splits]


def _checked(blocks: Pieces, value: Tensor) -> tuple[Callable[[Any], None], int]:
    """A `finish` that gives each tensor of `blocks` what came from its rank, and what it copies."""

    def finish(exchange: Any) -> None:
        _check_counts(exchange.receive_counts, blocks.sizes)
        blocks.fill(exchange.value)

    return finish, sum(blocks.sizes) * value.element_size()


def _check_counts(came: Sequence[int], expected: list[int]) -> None:
    if list(came) != expected:
        raise TensorContractError(
            f"the ranks sent {list(came)} elements, but the output has room for {expected}; split sizes of "
            "sender and receiver have to agree"
        )


# ---------------------------------------------------------------------- the rest


def barrier() -> Call:
    """Wait for all ranks."""
    return Call(lambda comm, seconds: comm.barrier(timeout=seconds))


def send(tensor: Any, dest: int, tag: int) -> Call:
    """Send `tensor` to one rank."""
    value = flat(tensor)
    return Call(lambda comm, seconds: comm.send(value, dest, tag=tag, timeout=seconds))


def receive(tensor: Any, source: int, tag: int) -> Call:
    """Receive from one rank into `tensor`."""
    out = Receiver(tensor)
    return _into(out, lambda comm, seconds: comm.recv(source, tag=tag, out=out.row, timeout=seconds))


def receive_any(tensor: Any, tag: int) -> Call:
    """Receive from whichever rank sends first into `tensor`; the value is that rank."""
    out = Receiver(tensor)

    def finish(received: tuple[Tensor, int]) -> int:
        if out.settle is not None:
            out.settle()
        return received[1]

    return Call(
        lambda comm, seconds: comm.recv_any(tag=tag, out=out.row, timeout=seconds),
        finish,
        0 if out.settle is None else _nbytes(out.row),
    )


def _into(out: Receiver, start: Start) -> Call:
    settle = out.settle
    if settle is None:
        return Call(start)
    return Call(start, lambda _: settle(), _nbytes(out.row))


def _nbytes(row: Tensor) -> int:
    return row.numel() * row.element_size()
