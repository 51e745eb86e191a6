"""Running the ranks of a job on this host: `spawn` a function, or `run` a program."""

from __future__ import annotations

from .run import run
from .spawn import SpawnError, spawn

__all__ = ["SpawnError", "run", "spawn"]
