"""How much, and how long, a meeting bears with strangers and with those who are late."""

from __future__ import annotations

__all__ = ["GRACE", "MAX_STRANGERS", "PATIENCE"]

#: Connections that have not joined yet, at most, beyond one for each rank.
MAX_STRANGERS = 64
#: How long a stranger may take to join; and, on other ranks, a connection to be made or a port to answer
#: where there are more ports to try; in seconds.
PATIENCE = 5.0
#: For the last steps once the deadline has come: the final answer, and who is missing; in seconds.
GRACE = 1.0
