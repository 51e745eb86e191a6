"""What a rank remembers of channels that are not open here: those it closed, and those it has yet to open."""

from __future__ import annotations

from collections import OrderedDict

from .notices import Failure
from .tags import is_past

__all__ = ["ClosedChannels"]

#: So many closed channels are remembered, the latest used: how far they had counted. One that is opened
#: again counts on from there, since other ranks may still be in its former life; and late messages of
#: calls that failed are known as such.
_MAX_COUNTED = 32768
#: Channels with failed calls that this rank has not opened yet.
_MAX_FAILED = 4096


class ClosedChannels:
    """Channels by number; bounded, so that the oldest are forgotten."""

    def __init__(self) -> None:
        self._counted: OrderedDict[int, int] = OrderedDict()
        self._failed: OrderedDict[int, dict[int, Failure]] = OrderedDict()

    def close(self, id: int, sequence: int) -> None:
        """Channel `id` was closed here when its next call would have been number `sequence`."""
        self._counted[id] = sequence
        self._counted.move_to_end(id)
        if len(self._counted) > _MAX_COUNTED:
            self._counted.popitem(last=False)

    def open(self, id: int) -> tuple[int, dict[int, Failure]]:
        """Forget the channel: the number to count from, and the calls that have failed elsewhere already."""
        return self._counted.pop(id, 0), self._failed.pop(id, {})

    def fail(self, id: int, sequence: int, failure: Failure) -> None:
        """A call failed on a channel that is not open here."""
        if self.is_past(id, sequence):
            return
        self._failed.setdefault(id, {}).setdefault(sequence, failure)
        if len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)

    def is_past(self, id: int, sequence: int) -> bool:
        """Whether the call came before the channel was closed."""
        counted = self._counted.get(id)
        return counted is not None and is_past(sequence, counted)
