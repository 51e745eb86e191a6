"""Running data-moving requests on a group of ranks, and inputs whose every element can be told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from strict_link import StrictGroup, StrictLink

from ruda_async.collectives.operation import Settings
from ruda_async.transport.base import Capabilities, Envelope

DTYPES = ("bool", "uint16", "int64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn")
LAYOUTS = ("plain", "transposed", "reversed", "strided", "readonly")


class Link(StrictLink):
    """A strict link that can also wait for a message without taking it."""

    async def probe(self, peer: int, lane: int = 0) -> Envelope:
        stream = peer, self.rank, lane
        while not self.group.sends[stream]:
            self.group.future().cancel()  # raises once the group is broken
            await asyncio.sleep(0)
        assert stream not in self.group.busy
        return Envelope(b"", sum(len(buffer) for buffer in self.group.sends[stream][0][0]))


def group_of(
    size: int,
    *,
    algorithm: str | None = None,
    max_bytes: int | None = None,
    seed: int = 0,
    break_after: int | None = None,
    **capabilities: Any,
) -> StrictGroup:
    """A group with the given settings and capabilities."""
    settings = Settings(algorithm=algorithm, max_bytes=max_bytes)
    return StrictGroup(size, settings, Capabilities(**capabilities), seed, break_after)


async def run_links(group: StrictGroup, body: Callable[[Link], Any]) -> list[Any]:
    """Run `body` on every rank; everything started has to be over at the end."""
    links = [Link(group, rank) for rank in range(group.size)]
    results = await asyncio.wait_for(asyncio.gather(*(body(link) for link in links)), 20)
    assert not group.pending, "a rank returned before its transfers were over"
    assert not any(group.sends.values())
    assert not any(group.receives.values())
    if group.settings.max_bytes is not None:
        assert group.largest <= group.settings.max_bytes
    return results


def run(group: StrictGroup, make: Callable[[int], Any]) -> list[Any]:
    """Run the request that `make(rank)` returns on every rank; their fingerprints must be equal."""
    heads = set()

    async def body(link: Link) -> Any:
        request = make(link.rank)
        heads.add(request.prepare(link.rank, link.size, link.settings))
        return await request.run(link)

    results = asyncio.run(run_links(group, body))
    assert len(heads) == 1
    return results


def dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def values(seed: int, shape: tuple[int, ...], name: str = "float32", layout: str = "plain") -> Any:
    """Random bits of a dtype in memory of the given layout; two seeds have nothing in common."""
    random = np.random.default_rng(seed)
    if layout == "transposed":
        return values(seed, shape[::-1], name).T
    if layout == "reversed":
        return values(seed, shape, name)[::-1]
    if layout == "strided":
        return values(seed, (2 * shape[0], *shape[1:]), name)[::2]
    itemsize = dtype(name).itemsize
    count = int(np.prod(shape, dtype=int))
    raw = random.integers(0, 2 if name == "bool" else 256, count * itemsize, dtype=np.uint8)
    array = raw.view(dtype(name)).reshape(shape)
    if layout == "readonly":
        array.flags.writeable = False
    return array


def assert_same(actual: Any, expected: Any) -> None:
    """Kind, dtype, shape and bits are equal."""
    assert type(actual) is np.ndarray
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()


def torch_bits(tensor: Any) -> bytes:
    """The bytes of a torch tensor of any dtype, in C order."""
    import torch

    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data
