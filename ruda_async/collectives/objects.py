"""Small Python objects between ranks, as msgpack: data only, nothing that is run when it is read.

Objects are encoded and decoded on the event loop (decoding in a thread from a megabyte on), so they are
for settings and summaries; arrays belong into the tensor collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from ..errors import ProtocolError, TensorContractError
from ..transport.threads import in_thread
from .all_gather_v import gather_blocks
from .broadcast import broadcast_bytes
from .messages import EMPTY, peers, receive_bytes, scratch, send_bytes, split
from .movement import agreed, check_root

if TYPE_CHECKING:
    from .operation import Link, Settings

__all__ = ["MAX_OBJECT", "AllGatherObject", "BroadcastObject", "GatherObject", "decode", "encode"]

#: The longest encoded object in bytes.
MAX_OBJECT = 64 * 1024 * 1024
#: Lists and dicts within each other.
_MAX_DEPTH = 128
#: Encoded objects from this size on are decoded beside the event loop.
_IN_THREAD = 1024 * 1024
_ACCEPTED = "None, bool, int (64 bits), float, str, bytes, list, and dict with str or int keys"
_SCALARS = frozenset({type(None), bool, float, bytes})


# ---------------------------------------------------------------------- encoding


def check_object(name: str, value: Any) -> None:
    """See that `value` comes out as it went in.

    Args:
        name: the method called, for error texts.
        value: the object.

    Raises:
        TensorContractError: it has a type in it that msgpack does not keep, an integer beyond 64 bits, text
            that is no Unicode, or more than 128 levels (as a list in itself has).
    """
    level: list[Any] = [value]
    pending = [iter(level)]
    while pending:
        for item in pending[-1]:
            kind = type(item)
            if kind in _SCALARS:
                continue
            if kind is str:
                _check_text(name, item)
            elif kind is int:
                _check_integer(name, item)
            elif kind is list or kind is dict:
                if len(pending) > _MAX_DEPTH:
                    raise TensorContractError(
                        f"{name}: the object is nested more than {_MAX_DEPTH} levels or contains itself; "
                        "flatten it"
                    )
                if kind is dict:
                    _check_keys(name, item)
                    pending.append(iter(item.values()))
                else:
                    pending.append(iter(item))
                break
            else:
                _refuse(name, item)
        else:
            pending.pop()


def _check_text(name: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TensorContractError(
                f"{name}: a str has a lone surrogate at position {error.start}, which is no Unicode text; "
                "pass bytes"
            ) from None


def _check_integer(name: str, number: int) -> None:
    if not -(1 << 63) <= number < 1 << 64:
        raise TensorContractError(
            f"{name}: an integer of {number.bit_length()} bits does not fit into 64; pass a str or bytes"
        )


def _check_keys(name: str, mapping: dict[Any, Any]) -> None:
    for key in mapping:
        if type(key) is str:
            _check_text(name, key)
        elif type(key) is int:
            _check_integer(name, key)
        else:
            raise TensorContractError(
                f"{name}: a dict has the key {key!r} of type {_type_name(key)}; keys are str or int"
            )


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refuse(name: str, value: Any) -> None:
    kind = type(value)
    if kind is tuple:
        remedy = "; make it a list"
    elif issubclass(kind, (set, frozenset)):
        remedy = "; make it a sorted list"
    elif kind in (bytearray, memoryview):
        remedy = "; make it bytes"
    elif hasattr(value, "tolist"):
        remedy = "; use .item() or .tolist(), or a tensor collective"
    else:
        remedy = "; turn it into these"
    raise TensorContractError(
        f"{name}: an object of type {_type_name(value)} cannot be sent; accepted are {_ACCEPTED}{remedy}"
    )


def encode(name: str, value: Any) -> memoryview:
    """`value` as msgpack.

    Raises:
        TensorContractError: as for `check_object`, or it takes more than `MAX_OBJECT` bytes.
    """
    check_object(name, value)
    try:
        data: bytes = msgpack.packb(value)
    except ValueError as error:  # a str or bytes beyond msgpack's own 4 GiB
        raise TensorContractError(f"{name}: the object cannot be encoded: {error}") from None
    if len(data) > MAX_OBJECT:
        raise TensorContractError(
            f"{name}: the object takes {len(data)} bytes and the limit is {MAX_OBJECT} (64 MiB); send arrays "
            "with the tensor collectives"
        )
    return memoryview(data)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _unpack(data: memoryview) -> Any:
    """Decode, within limits that follow from the length of `data`."""
    value = msgpack.unpackb(data, strict_map_key=False, ext_hook=_refuse_extension)
    check_object("the object received", value)  # msgpack decodes timestamps without asking
    return value


async def decode(data: memoryview, sender: int) -> Any:
    """What `encode` made.

    Args:
        data: the bytes.
        sender: the rank they came from.

    Raises:
        ProtocolError: they are not that.
    """
    try:
        if len(data) < _IN_THREAD:
            return _unpack(data)
        return await in_thread(lambda: _unpack(data))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"rank {sender} sent {len(data)} bytes that are no object of this library ({error}); see that "
            "all ranks run the same version",
            rank=sender,
        ) from None


# ---------------------------------------------------------------------- the requests


class BroadcastObject:
    """Give every rank the root's object.

    Args:
        value: None, bool, int of 64 bits, float, str, bytes, lists of these, and dicts of them with str or
            int keys; at most 64 MiB as msgpack. Elsewhere than on the root it is checked too, and not sent.
        root: the rank whose object it is.

    The result is a new object, on the root as well.
    """

    __slots__ = ("_data", "_root", "_value")

    operation = "broadcast_object"

    def __init__(self, value: Any, root: int) -> None:
        self._value = value
        self._root = root
        self._data = EMPTY

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check and encode the object; see `collectives.request.Request`.

        Raises:
            TensorContractError: no such root, or an object that cannot be sent.
        """
        self._root = root = check_root(self.operation, self._root, size)
        if rank == root:
            self._data = encode(self.operation, self._value)
        else:
            check_object(self.operation, self._value)
        return agreed(self.operation, "", None, settings.algorithm, settings.max_bytes, (("root", root),))

    async def run(self, link: Link) -> Any:
        """Pass it down a binomial tree; the object."""
        data = await broadcast_bytes(link, self._root, self._data, MAX_OBJECT)
        return await decode(data, self._root)


class GatherObject:
    """Give the root every rank's object.

    Args:
        value: as for `BroadcastObject`.
        root: the rank that gets them.

    The result is a list in rank order on the root, and None elsewhere.
    """

    __slots__ = ("_data", "_root", "_value")

    operation = "gather_object"

    def __init__(self, value: Any, root: int) -> None:
        self._value = value
        self._root = root
        self._data = EMPTY

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check and encode the object; see `collectives.request.Request`.

        Raises:
            TensorContractError: no such root, or an object that cannot be sent.
        """
        self._root = root = check_root(self.operation, self._root, size)
        self._data = encode(self.operation, self._value)
        return agreed(self.operation, "", None, settings.algorithm, settings.max_bytes, (("root", root),))

    async def run(self, link: Link) -> list[Any] | None:
        """Send it to the root, which answers when it has all."""
        rank, size, root = link.rank, link.size, self._root
        if rank != root:
            answer = link.recv_into(root, EMPTY)
            await send_bytes(link, root, self._data)
            await answer
            return None
        received = [self._data] * size
        for peer in peers(rank, size):
            received[peer] = await receive_bytes(link, peer, MAX_OBJECT)
        objects = [await decode(data, peer) for peer, data in enumerate(received)]
        answers = [link.send(peer, EMPTY) for peer in peers(rank, size)]
        for sent in answers:
            await sent
        return objects


class AllGatherObject:
    """Give every rank every rank's object.

    Args:
        value: as for `BroadcastObject`.

    The result is a list in rank order.
    """

    __slots__ = ("_data", "_value")

    operation = "all_gather_object"

    def __init__(self, value: Any) -> None:
        self._value = value
        self._data = EMPTY

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check and encode the object; see `collectives.request.Request`.

        Raises:
            TensorContractError: an object that cannot be sent.
        """
        self._data = encode(self.operation, self._value)
        return agreed(self.operation, "", None, settings.algorithm, settings.max_bytes)

    async def run(self, link: Link) -> list[Any]:
        """Gather the encoded objects; the objects."""
        received: list[memoryview] = []

        async def place(lengths: list[int]) -> memoryview:
            for peer, length in enumerate(lengths):
                if length > MAX_OBJECT:
                    raise ProtocolError(
                        f"rank {peer} announced an object of {length} bytes, more than {MAX_OBJECT}",
                        rank=peer,
                    )
            room = scratch(sum(lengths))
            received.extend(split(room, lengths))
            return room

        algorithm = "direct" if link.size <= 8 else "ring"
        await gather_blocks(link, self._data, 1, algorithm, place)
        return [await decode(data, peer) for peer, data in enumerate(received)]
