"""Which ranks are on one host, in the sense that matters to links that end there."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Hashable, Sequence
from hashlib import blake2b

__all__ = ["host_identity", "host_numbers"]

_BOOT = "/proc/sys/kernel/random/boot_id"
#: Abstract sockets are seen within a network namespace, System V memory within an IPC namespace, and users
#: are told apart within a user namespace.
_NAMESPACES = ("net", "ipc", "user")


def host_identity() -> str:
    """A text that is the same for two processes if they can share memory and sockets without a network.

    On Linux it stands for the running kernel (its boot id), the network, IPC and user namespaces and the
    user, so that containers with a network each count as hosts. Elsewhere it stands for host name, hardware
    address and user. It tells nothing else of any of these.
    """
    facts = [str(os.getuid())]
    try:
        with open(_BOOT, encoding="ascii") as file:
            facts.append(file.read().strip())
        facts += [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError:
        facts += [socket.gethostname(), hex(uuid.getnode())]
    return blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()


def host_numbers(identities: Sequence[Hashable]) -> tuple[int, ...] | None:
    """`Capabilities.hosts` for ranks on these hosts: numbers in order of appearance.

    None where all ranks are on one host, or none shares its own.

    >>> host_numbers(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    if not 1 < len(numbers) < len(identities):
        return None
    return tuple(numbers[identity] for identity in identities)
