"""What to install where an optional dependency is missing: said here, in the same words everywhere."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

__all__ = ["how_to_install"]


def how_to_install(extra: str, *others: str, distribution: str = "ruda-async") -> str:
    """The command that brings what an extra of a distribution needs, as in ``pip install 'mpi4py>=4' mpich``.

    It names the requirements themselves: `ruda-async[mpi]` helps only where the distribution is on an
    index, and pip would install that over a checkout.

    Args:
        extra: a name from the distribution's ``optional-dependencies``.
        others: more packages for the same command, beyond what the extra brings.
        distribution: whose extra it is; it has to be installed for its requirements to be known.
    """
    try:
        declared = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    marked = re.compile(rf"""\bextra\s*==\s*['"]{re.escape(extra)}['"]""")
    needed = [line.partition(";")[0].replace(" ", "") for line in declared if marked.search(line)]
    return "pip install " + shlex.join([*(needed or [f"{distribution}[{extra}]"]), *others])
