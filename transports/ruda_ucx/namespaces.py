"""Ranks that share memory but not what UCX needs beside it, which UCX does not notice.

UCX's shared memory wakes a sleeping peer through an abstract Unix socket, and those belong to a network
namespace; and it looks by its process ID whether a peer lives. Between two containers of one machine with a
common IPC or PID namespace it therefore finds the memory, but the peer sleeps on what is written there, or
is not found to be alive. Such ranks do without UCX's shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import UcxParameters

__all__ = ["NAMESPACES_BYTES", "boot_id", "divided", "memory_unasked", "namespaces", "without_memory"]

_SIZE = 8
#: Of what `namespaces` gives, where it gives anything.
NAMESPACES_BYTES = 3 * _SIZE


def boot_id() -> bytes:
    """Names the running kernel; empty where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read()
    except OSError:
        return b""


def namespaces() -> bytes:
    """Digests of this process's IPC, PID and network namespaces, each with the kernel's; or nothing."""
    kernel = boot_id()
    try:
        names = [os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid", "net")]
    except OSError:
        return b""
    return b"".join(blake2b(kernel + name.encode(), digest_size=_SIZE).digest() for name in names)


def divided(everyone: Iterable[bytes]) -> bool:
    """Whether some two ranks share memory and no network or PID namespace; `everyone`'s `namespaces`."""
    beside: dict[tuple[str, bytes], set[bytes]] = {}
    for told in filter(None, everyone):
        ipc, pid, network = (told[start : start + _SIZE] for start in range(0, NAMESPACES_BYTES, _SIZE))
        beside.setdefault(("ipc", ipc), set()).add(pid + network)
        beside.setdefault(("pid", pid), set()).add(network)
    return any(len(found) > 1 for found in beside.values())


def memory_unasked(parameters: UcxParameters) -> bool:
    """Whether UCX takes shared memory of its own accord: nobody said which transports it is to take."""
    return not parameters.tls and "UCX_TLS" not in os.environ


def without_memory(parameters: UcxParameters) -> UcxParameters:
    """The same parameters, for all of UCX's transports but those over shared memory."""
    return replace(parameters, tls="^sm")
