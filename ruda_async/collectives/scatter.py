"""Scatter: equal shards from the root to all ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgpack
import numpy as np

from ..errors import ProtocolError, TensorContractError
from ..tensors import TensorSpec, adapter_for, adapter_for_call, dtype_of
from ..transport.provider import NativeCall
from .broadcast import broadcast_bytes
from .gather_scatter import binomial_scatter, direct_scatter
from .messages import (
    EMPTY,
    peers,
    receive_bytes,
    same_memory,
    send_bytes,
    separate,
)
from .movement import agreed, check_leading_axis, check_root
from .selector import choose

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["Scatter"]

T = TypeVar("T")

#: The longest description of a tensor in bytes: a dtype's name and a shape.
_DESCRIPTION = 1024


class Scatter(Generic[T]):
    """Give every rank its equal shard of the root's tensor.

    What is scattered only the root knows, so a small description (dtype and shape) travels first; each
    rank checks it against what it was given before anybody's call can succeed.

    Args:
        value: on the root ``[size*n, …]`` of any dtype; only read. Elsewhere None, or a tensor ``[n, …]`` of
            the shape and dtype that is expected, which must then be what comes.
        root: the rank whose tensor it is.
        like: on ranks that pass no `value`: any tensor, whose kind and device the result takes. Without it
            the result is a numpy array (or of `out`'s kind).
        out: a tensor ``[n, …]`` to fill and return instead of a fresh one.

    The result is ``[n, …]``, fresh on the root as well.
    """

    __slots__ = ("_adapter", "_expected", "_like", "_out", "_root", "_shard", "_target", "_value")

    operation = "scatter"

    def __init__(self, value: T | None, root: int, *, like: T | None = None, out: T | None = None) -> None:
        self._value = value
        self._root = root
        self._like: Any = value if value is not None else like if like is not None else out
        self._out = out
        self._adapter: TensorAdapter[Any]
        self._expected: TensorSpec | None = None
        self._shard: TensorSpec
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: no such root; on the root no tensor, a scalar, or a leading axis that `size`
                does not divide; an `out` that does not fit.
        """
        self._root = root = check_root("scatter", self._root, size)
        if self._like is None:
            if rank == root:
                raise TensorContractError(
                    "scatter: the root passes the tensor to scatter, and here value is None on the root"
                )
            self._like = np.empty(0)
        self._adapter = adapter = adapter_for_call(self._like, settings.device_memory)
        if rank == root:
            if self._value is None:
                raise TensorContractError(
                    "scatter: the root passes the tensor as its first argument, not as like= or out="
                )
            self._shard = _shard(adapter.spec(self._value), size)
            if self._out is not None:
                self._target = adapter.into(self._out, self._shard)
        else:
            if self._value is not None:
                self._expected = adapter.spec(self._value)
            if self._out is not None:
                expected = self._expected or adapter_for(self._out).spec(self._out)
                self._target = adapter.into(self._out, expected)
        return agreed("scatter", "", None, settings.algorithm, settings.max_bytes, (("root", root),))

    async def run(self, link: Link) -> T:
        """Move the shards; this rank's."""
        root = self._root
        # Whether shards are large is not known before the description is here, so it cannot decide.
        native = link.native(NativeCall("scatter", link.size, root=root)) if link.providers else None
        algorithm = choose(
            "scatter", 0, link.size, link.capabilities, link.settings, providers=link.providers
        ).algorithm
        binomial = algorithm == "binomial"
        await self._describe(link, binomial)
        shard = self._shard
        target = self._target or await link.allocate(self._adapter, self._like, shard.shape, shard.dtype)
        out = target.buffer
        source = EMPTY
        if link.rank == root:
            source = self._adapter.read(self._value)
            own = source[root * len(out) : (root + 1) * len(out)]
            if self._out is not None and not same_memory(out, own):
                source = await separate(link, source, out)
        if native is not None and len(out):
            native.call = native.call._replace(dtype=shard.dtype, nbytes=len(out))
            in_place = link.rank == root and same_memory(out, own)
            await native.run(link, source, out, in_place=in_place, owned=self._out is None)
        else:
            await (binomial_scatter if binomial else direct_scatter)(link, root, source, out)
        result: T = target.finish()
        return result if self._out is None else self._out

    async def _describe(self, link: Link, tree: bool) -> None:
        """Let all ranks know the root's shard; then see that it is what this one expects."""
        root = self._root
        data = EMPTY
        if link.rank == root:
            data = memoryview(_description(self._shard))
        if tree:
            data = await broadcast_bytes(link, root, data, _DESCRIPTION)
        elif link.rank == root:
            for peer in peers(root, link.size):
                await send_bytes(link, peer, data)
        else:
            data = await receive_bytes(link, root, _DESCRIPTION)
        if link.rank == root:
            return
        self._shard = shard = _described(bytes(data), root)
        if self._expected is not None and self._expected != shard:
            raise TensorContractError(
                f"scatter: rank {root} scatters shards of {shard.dtype} {list(shard.shape)}, and value here "
                f"is {self._expected.dtype} {list(self._expected.shape)}; pass None, or one like the shard"
            )
        if self._out is not None and self._adapter.spec(self._out) != shard:
            self._target = self._adapter.into(self._out, shard)


@lru_cache(maxsize=4096)
def _shard(spec: TensorSpec, size: int) -> TensorSpec:
    dtype, shape = spec
    check_leading_axis("scatter", shape)
    if shape[0] % size:
        raise TensorContractError(
            f"scatter: the leading axis of shape {list(shape)} has length {shape[0]}, which the world size "
            f"{size} does not divide; pad it to {shape[0] + size - shape[0] % size}"
        )
    return TensorSpec(dtype, (shape[0] // size, *shape[1:]))


@lru_cache(maxsize=4096)
def _description(spec: TensorSpec) -> bytes:
    encoded: bytes = msgpack.packb([spec.dtype, spec.shape])
    return encoded


@lru_cache(maxsize=4096)
def _described(data: bytes, root: int) -> TensorSpec:
    """What `_description` encoded, from the network."""
    try:
        dtype, shape = msgpack.unpackb(data)
        dtype_of(dtype)
        if not shape or not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
            raise ValueError("not a shape")
        return TensorSpec(dtype, tuple(shape))
    except (ValueError, TypeError, msgpack.UnpackException):
        raise ProtocolError(
            f"rank {root} sent {len(data)} bytes that do not describe a tensor; see that all ranks run the "
            "same version",
            rank=root,
        ) from None
