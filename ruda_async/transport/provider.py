"""Whole collectives that a transport runs natively: shared memory that sums in place, MPI, Gloo, NCCL.

A transport lists them in its optional attribute ``providers``. The selector asks each, before its own
tables, whether it wants a call; the core makes the ranks agree on the call, lends the memory, and tells the
provider when a call ends early. So a provider moves and combines bytes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .base import Buffer

__all__ = ["NativeCall", "NativeGroup", "NativeReducer", "Provider"]


class NativeCall(NamedTuple):
    """What all ranks of one call have agreed on (but for the two tuples of lengths).

    Attributes:
        operation: ``all_reduce``, ``reduce``, ``reduce_scatter``, ``all_gather``, ``all_gather_v``,
            ``gather``, ``scatter``, ``broadcast``, ``all_to_all``, ``all_to_all_v`` or ``barrier``.
        size: the number of ranks.
        dtype: the library's dtype name, such as ``"float32"``; ``""`` where there is no tensor.
        nbytes: bytes of this rank's input (for a broadcast: of the tensor; for a scatter: of one shard).
            For the operations of variable length it is the bytes of one row.
        operator: of a reduction: ``sum mean max min prod band bor bxor``; None for others.
        root: the group rank, where the operation has one.
        send_lengths: for ``all_to_all_v``: bytes that this rank sends to each; known to `Provider.run` alone.
        receive_lengths: for ``all_to_all_v`` and ``all_gather_v``: bytes that this rank gets from each; known
            to `Provider.run` alone.

    When a provider is asked about a scatter, `dtype` is empty and `nbytes` is 0, since the root alone knows
    them by then; `Provider.run` gets the real ones.
    """

    operation: str
    size: int
    dtype: str = ""
    nbytes: int = 0
    operator: str | None = None
    root: int | None = None
    send_lengths: tuple[int, ...] = ()
    receive_lengths: tuple[int, ...] = ()


class NativeGroup(NamedTuple):
    """One call in flight, as its provider sees it.

    Attributes:
        rank: this rank's number in the group.
        size: the number of ranks.
        members: the job's rank of each group rank.
        channel: the number of the channel. Calls of one channel come one at a time.
        sequence: the call's number on its channel. It only rises; calls that are not native have numbers too.
        epoch: agreed among the ranks. It rises whenever a native call of this channel has ended early on any
            rank, or the channel was closed and opened again: what such a call had begun, on whichever
            rank, is then no part of the new epoch. Where `Provider.agrees` it is this rank's own.
        deadline: `time.monotonic` seconds; informative, the core tells the provider when time is up.
        head: the call's encoded fingerprint, for providers that compare it themselves.
        in_place: input and result share memory: `source` is `out`; in an all-gather or gather it is this
            rank's part of `out`; in a scatter `out` is this rank's part of it. Otherwise they do not overlap.
        owned: the memory of the result belongs to this call and is forgotten if that fails. Otherwise it is
            the caller's.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    channel: int
    sequence: int
    epoch: int
    deadline: float
    head: bytes
    in_place: bool = False
    owned: bool = True


class NativeReducer(Protocol):
    """The documented arithmetic of the call's operator and dtype over `size` ranks.

    Views are contiguous bytes of whole elements. The methods hold the thread for as long as the
    arithmetic takes: cut long inputs, and let the loop turn in between. They may run in several threads.
    """

    dtype: str
    operator: str
    size: int
    itemsize: int

    def reduce(self, out_raw: memoryview, raws: Sequence[memoryview]) -> None:
        """``out_raw`` = all ranks' elements `raws`, in rank order, combined as documented.

        `out_raw` may be exactly one of `raws`.
        """
        ...

    def finish_inplace(self, raw: memoryview) -> None:
        """Divide a finished sum by the number of ranks where the operator is ``mean``; else do nothing.

        For float32 and float64 alone: halves round once, in `reduce`.
        """
        ...


class Provider(Protocol):
    """Runs whole collectives. One object serves all channels of one transport, on its event loop.

    Attributes:
        name: what ``algorithm=`` and `Communicator.explain` call it; not the name of a built-in algorithm.
        exact: reductions come out as `NativeReducer.reduce` has them, to the bit. A provider with an order
            of its own says False and gets floating reductions under ``order="any"`` alone.
        agrees: `run` itself sees to it that all ranks have entered the same call, by comparing
            `NativeGroup.head`, before it writes a result; it raises `UnexpectedMessage` where a peer's
            differs. Otherwise the core lets the ranks agree first, in ``log2(size)`` rounds of messages.
            Operations of variable length, and scatter, are always agreed on by the core.

    A provider may also have the attribute ``device_memory``, True where `run` takes `DeviceBuffer`s. Over a
    transport that takes them itself, tensors stay in device memory only if all its providers say so.
    """

    name: str
    exact: bool
    agrees: bool

    def objection(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """Why this provider cannot run the call over these job ranks, in a few words; None when it can.

        To be decided by the arguments, and by what is the same on all ranks, alone: all must answer alike.
        """
        ...

    def reason(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """Why it should run the call though nobody asked for it by name, as half a sentence; or None.

        Asked only where there is no objection; to be decided as that.
        """
        ...

    async def run(
        self,
        group: NativeGroup,
        call: NativeCall,
        source: Buffer,
        out: Buffer,
        reducer: NativeReducer | None,
    ) -> None:
        """Run the call.

        Args:
            group: who takes part.
            call: what is to be done.
            source: this rank's input: contiguous bytes, only to be read, perhaps read-only. Empty where the
                rank has none: for a barrier, and in a broadcast or scatter elsewhere than on the root.
            out: memory for the result: as long as it is; empty where the rank gets none.
            reducer: of a reduction.

        May raise any error; a `PeerLostError` names the job rank. When `run` has ended, however it did,
        neither memory is touched any more.
        """
        ...

    def fail(self, group: NativeGroup, error: BaseException) -> None:
        """The call ends early on this rank: its task was cancelled, its time is up, a peer failed.

        `run` has to end soon, with whatever error. It may have ended already, even well. Does not block.
        """
        ...

    def forget(self, channel: int) -> None:
        """The channel was closed here: release what is kept for it. Does not block."""
        ...
