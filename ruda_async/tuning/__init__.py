"""What messages and additions cost here: measured once by ``ruda-async tune``, and used by `connect`.

Without a measurement, a transport's own declaration holds (`Capabilities`). On whatever rank the numbers come
from, rank 0's are those of all ranks: it tells the others before `connect` returns, so all decide alike.
"""

from __future__ import annotations

from .machine import fingerprint, machine
from .numbers import Numbers, numbers_of, with_numbers
from .store import default_path, find_numbers, read_tuning, write_tuning

__all__ = [
    "Numbers",
    "default_path",
    "find_numbers",
    "fingerprint",
    "machine",
    "numbers_of",
    "read_tuning",
    "with_numbers",
    "write_tuning",
]
