"""The checksum of the payload that is coming in, if its frame carries one."""

from __future__ import annotations

from ...errors import ProtocolError
from .. import wire

__all__ = ["Guard"]


class Guard:
    """Compares payloads with their checksums as they come.

    Attributes:
        required: payloads without a checksum are refused.
        active: the payload that is coming has a checksum.
    """

    __slots__ = ("_crc", "_said", "active", "required")

    def __init__(self, required: bool) -> None:
        self.required = required
        self._said = self._crc = 0
        self.active = False

    def begin(self, frame: wire.Frame, said: int) -> None:
        """A payload begins whose frame has `said` where a checksum would be.

        Raises:
            ProtocolError: it has none, and one is required.
        """
        self._said = said
        self._crc = 0
        self.active = bool(frame.flags & wire.CHECKED)
        if self.required and not self.active and frame.payload_bytes:
            raise ProtocolError("a payload came without a checksum; give checksum=true on all ranks")

    def add(self, part: memoryview, last: bool) -> None:
        """Some of the payload has come.

        Raises:
            ProtocolError: it was the last of it, and the checksum does not agree.
        """
        self._crc = wire.payload_crc((part,), self._crc)
        if last:
            self.active = False
            wire.check_payload(self._said, self._crc)
