"""The library's logger, and the fields that its records carry beyond their text.

Every record of the logger ``ruda_async`` that is about a call or a rank has attributes that begin with
``ruda_``, set by `logging`'s `extra`; formatters that write JSON show them without further ado.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..call import Operation

__all__ = ["log", "operation_fields"]

log = logging.getLogger("ruda_async")


def operation_fields(operation: Operation, outcome: str) -> dict[str, object]:
    """What a record about a call says of it."""
    return {
        "ruda_rank": operation.rank,
        "ruda_world_size": operation.size,
        "ruda_channel": operation.channel.name,
        "ruda_operation": operation.name,
        "ruda_sequence": operation.sequence,
        "ruda_outcome": outcome,
    }
