"""Running a scenario's ranks: as tasks of one loop, as threads, or as processes."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ..base import Transport
from .scenario import SCENARIOS, Scenario

__all__ = ["run_in_loop", "run_in_processes", "run_in_threads", "run_placed", "run_scenario", "run_scenarios"]

Join = Callable[[str, int, int], Awaitable[Transport]]

#: Seconds that one scenario may take.
LIMIT = 30.0


async def _join(url: str, rank: int, world_size: int) -> Transport:
    from ...config import resolve
    from ...opening import open_transport

    return await open_transport(resolve(url, rank=rank, world_size=world_size, timeout=LIMIT))


async def _run_rank(scenario: Scenario, url: str, rank: int) -> None:
    await _run_body(scenario, await _join(url, rank, scenario.world_size))


async def _run_body(scenario: Scenario, transport: Transport) -> None:
    try:
        await scenario.body(transport)
    except BaseException:
        transport.abort("its scenario failed")
        raise
    finally:
        await transport.close()


def run_in_loop(scenario: Scenario, url: str) -> None:
    """All ranks as tasks of one event loop."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as group:
            for rank in range(scenario.world_size):
                group.create_task(_run_rank(scenario, url, rank))

    asyncio.run(main())


def run_in_threads(scenario: Scenario, url: str) -> None:
    """Every rank on a thread and event loop of its own."""
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            asyncio.run(asyncio.wait_for(_run_rank(scenario, url, rank), LIMIT))
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(scenario.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT + 5)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{scenario.name} hangs")


def _process_main(url: str, rank: int, pipe: Connection) -> None:
    """Run the scenarios that `pipe` names, and tell by it how each ended."""
    while True:
        scenario = SCENARIOS[pipe.recv()]
        try:
            asyncio.run(asyncio.wait_for(_run_rank(scenario, url, rank), LIMIT))
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


def run_in_processes(scenarios: Sequence[Scenario], url: str) -> None:
    """One scenario after the other, every rank in a process, which serves all of them.

    The URL must name an address that is free, not port 0.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(max(scenario.world_size for scenario in scenarios)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_process_main, args=(url, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for scenario in scenarios:
            _run_among(pipes[: scenario.world_size], scenario)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _run_among(pipes: Sequence[Connection], scenario: Scenario) -> None:
    """Let the ranks at the other ends of `pipes` run the scenario."""
    for pipe in pipes:
        pipe.send(scenario.name)
    running = {pipe: rank for rank, pipe in enumerate(pipes)}
    while running:
        ready: list[Any] = wait(list(running), LIMIT + 20)
        if not ready:
            raise TimeoutError(f"{scenario.name} hangs on ranks {sorted(running.values())}")
        for pipe in ready:
            rank = running.pop(pipe)
            try:
                failure = pipe.recv()
            except EOFError:
                failure = "it died"
            if failure is not None:
                raise AssertionError(f"rank {rank} of {scenario.name}:\n{failure}")


def run_placed(name: str, url: str) -> bool:
    """One rank's part of a scenario, in a process that an engine such as mpiexec has started and numbered.

    To be called in all of them. Ranks beyond those that the scenario takes do nothing.

    Returns:
        whether this rank took part.
    """
    from ...config import resolve
    from ...opening import open_transport

    scenario = SCENARIOS[name]
    placed = resolve(url, timeout=LIMIT)
    if placed.world_size < scenario.world_size:
        raise ValueError(f"{name} takes {scenario.world_size} ranks, and there are {placed.world_size}")
    if placed.rank >= scenario.world_size:
        return False
    # A job of its own: ranks may still be leaving the scenario before.
    config = dataclasses.replace(placed, world_size=scenario.world_size, name=f"{placed.name}/{name}")

    async def main() -> None:
        async with asyncio.timeout(LIMIT):
            await _run_body(scenario, await open_transport(config))

    asyncio.run(main())
    return True


def run_scenario(name: str, url: str, *, ranks: str = "loop") -> None:
    """Run one scenario over `url`, with `ranks` in one ``loop``, in ``threads`` or in ``processes``."""
    run_scenarios([name], url, ranks=ranks)


def run_scenarios(names: Sequence[str], url: str, *, ranks: str = "loop") -> None:
    """Run several scenarios as `run_scenario` does; processes are started once, and serve all of them."""
    scenarios = [SCENARIOS[name] for name in names]
    if ranks == "processes":
        run_in_processes(scenarios, url)
        return
    run = {"loop": run_in_loop, "threads": run_in_threads}[ranks]
    for scenario in scenarios:
        run(scenario, url)
