"""Running a body on several ranks, over every transport that a machine has without further set-up."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import ruda_async
from ruda_async import AsyncCommunicator

Body = Callable[[AsyncCommunicator], Awaitable[Any]]

#: Schemes whose ranks may be tasks of one loop.
SCHEMES: tuple[str, ...] = ("memory", "tcp", "shm") if hasattr(os, "memfd_create") else ("memory", "tcp")
# Other transports, or fewer, through the same tests: RUDA_TEST_SCHEMES=ucx
SCHEMES = tuple(os.environ.get("RUDA_TEST_SCHEMES", ",".join(SCHEMES)).split(","))
#: Those whose ranks may be processes of their own.
BETWEEN_PROCESSES = tuple(scheme for scheme in SCHEMES if scheme != "memory")

_jobs = itertools.count()


#: Whatever seeds the tests set, other runs of them on this machine draw other ports.
_random = random.SystemRandom()


def free_port(family: int = socket.AF_INET, host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on.

    It is below those that systems give to connections and to port 0, so none of these takes it meanwhile.
    """
    while True:
        port = _random.randrange(10_000, 20_000)
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def fresh_url(scheme: str) -> str:
    """A URL that no other job of this test run uses."""
    job = f"test-{os.getpid()}-{next(_jobs)}"
    if scheme in ("tcp", "auto", "ucx"):
        return f"{scheme}://127.0.0.1:{free_port()}/{job}"
    return f"{scheme}://{job}"


async def run_ranks(
    world_size: int,
    body: Body,
    *,
    url: str | None = None,
    limit: float = 30,
    timeout: float = 10,
    **options: Any,
) -> list[Any]:
    """Run `body(comm)` on every rank, as tasks; the results in rank order. A failing rank fails the test."""
    url = url or fresh_url("memory")

    async def rank_main(rank: int) -> Any:
        async with ruda_async.connect(
            url, rank=rank, world_size=world_size, timeout=timeout, **options
        ) as comm:
            return await body(comm)

    async with asyncio.timeout(limit):
        tasks = [asyncio.ensure_future(rank_main(rank)) for rank in range(world_size)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Callable[[], int]]:
    """How often the event loop has turned since, for as long as the block lasts."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    try:
        yield lambda: turns
    finally:
        counting.cancel()


async def outcome(call: Awaitable[Any]) -> Any:
    """The call's result, or the error it raised (a cancellation is not caught)."""
    try:
        return await call
    except Exception as error:
        return error


async def run_programs(
    program: str, url: str, world_size: int, limit: float
) -> list[tuple[str, str, int | None]]:
    """Run a program's text as every rank, in processes, with ``url rank`` as arguments.

    Returns:
        what each printed, also on standard error, and its exit code. None outlives `limit` seconds.
    """
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, url, str(rank)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    try:
        printed = await asyncio.wait_for(asyncio.gather(*(p.communicate() for p in processes)), limit)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    codes = [process.returncode for process in processes]
    return [(out.decode(), err.decode(), code) for (out, err), code in zip(printed, codes, strict=True)]


@contextmanager
def running_programs(
    program: str, url: str, ranks: Iterable[int], *arguments: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """A program's text as some of the ranks, in processes, with ``url rank arguments…`` and pipes to each.

    None outlives the block.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, url, str(rank), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
