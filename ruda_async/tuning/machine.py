"""Which machine a measurement is from."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from functools import cache
from pathlib import Path

__all__ = ["fingerprint", "machine"]


@cache
def machine() -> dict[str, str | int]:
    """What the costs of messages and additions depend on.

    No host name: the nodes of a cluster that are built alike share a measurement, and a container keeps one.
    """
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": _cores(),
        "python": f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}",
    }


def fingerprint(facts: dict[str, str | int]) -> str:
    """Sixteen hexadecimal digits that stand for a machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor()


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
