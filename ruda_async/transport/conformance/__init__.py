"""The suite that every transport passes, for plugin authors to run over their own.

In a test file of the plugin's, with pytest::

    from ruda_async.transport.conformance import SCENARIOS, run_scenario

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_conformance(name):
        run_scenario(name, "mine://lab")

or without any file, from the command line::

    pytest --pyargs ruda_async.transport.conformance --ruda-url mine://lab

Where ranks have to be started by another engine, such as MPI's, that engine runs the suite::

    mpiexec -n 5 python -m ruda_async.transport.conformance mine://lab

A scenario is a coroutine that every rank runs (`async def scenario(transport)`); it asserts, and
coordinates by messages alone, so it runs the same with ranks as tasks, threads or processes.
"""

from __future__ import annotations

from . import endings as endings  # which enter their scenarios
from . import messages as messages
from . import withdrawing as withdrawing
from .runner import (
    run_in_loop,
    run_in_processes,
    run_in_threads,
    run_placed,
    run_scenario,
    run_scenarios,
)
from .scenario import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "Scenario",
    "run_in_loop",
    "run_in_processes",
    "run_in_threads",
    "run_placed",
    "run_scenario",
    "run_scenarios",
]
