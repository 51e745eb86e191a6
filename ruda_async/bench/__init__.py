"""``ruda-async bench``: this library's collectives measured beside its peers, in one run.

In the manner of nccl-tests (https://github.com/NVIDIA/nccl-tests, ``doc/PERFORMANCE.md``) and of the OSU
micro-benchmarks (https://mvapich.cse.ohio-state.edu/benchmarks/). `run_plan` measures; `table`, `html` and
`markdown` show.
"""

from __future__ import annotations

from .driver import run_plan
from .plan import Plan
from .results import Report, Row

__all__ = ["Plan", "Report", "Row", "run_plan"]
