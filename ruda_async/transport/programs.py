"""Programs that packages bring along, such as the one that starts MPI's ranks."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["find_program"]


def find_program(name: str, distributions: Sequence[str]) -> str | None:
    """The path of a program: of the first of these distributions that is installed, else on ``PATH``."""
    for distribution in distributions:
        try:
            files = importlib.metadata.files(distribution) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name and (found := shutil.which(Path(str(file.locate())).resolve())):
                return found
    return shutil.which(name)
