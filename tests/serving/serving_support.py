"""A served job of real processes, its clients, and the model that it has to equal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from digits_moe import DigitsMoE, Sizes, load, prepare, save
from support import free_port

import ruda_async
from ruda_async import moe

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Scores of one row differ by float32 rounding between batches; those of different rows by far more.
CLOSE = 1e-4
#: Seconds that a rank may take to come: on a busy host most of a minute goes into importing torch.
START = 180.0


def write_model(path: Path, seed: int = 5) -> None:
    """A model whose experts all matter; untrained."""
    torch.manual_seed(seed)
    model = DigitsMoE(Sizes(), range(8))
    with torch.no_grad():
        model.router.weight.mul_(6)
        for expert in model.experts.values():
            expert.up.weight.mul_(4)
            expert.down.weight.mul_(4)
        model.mean.copy_(torch.full((64,), 8.0))
    with ruda_async.sync.connect(f"memory://save-{os.getpid()}", rank=0, world_size=1) as comm:
        save(path, model, comm)


class Oracle:
    """The unsharded model, and rows whose answers are known.

    Attributes:
        pixels: float32 ``[512, 64]``.
        scores: ``[512, 10]``.
        experts: of each row, ``[512, 2]``.
    """

    def __init__(self, path: Path) -> None:
        model = load(path)
        self.pixels = np.random.default_rng(3).integers(0, 17, (512, 64)).astype(np.float32)
        with torch.no_grad():
            tokens = model.tokens(prepare(self.pixels, model.mean.numpy()))
            logits = model.router(tokens)
            mixed = moe.reference(tokens, logits, list(model.experts.values()), model.sizes.chosen)
            self.scores = model.output(tokens + mixed).numpy()
            self.experts = moe.route(logits, model.sizes.chosen).experts.numpy()
            # No row is so near to another choice of experts that rounding could change it.
            best = logits.sort(dim=1, descending=True).values
            assert (best[:, 1] - best[:, 2]).min() > 1e-5

    def check(self, rows: np.ndarray, results: list[dict[str, Any]]) -> None:
        """The answer for the rows of these numbers is right."""
        assert [result["row"] for result in results] == list(range(len(rows)))
        found = np.array([result["scores"] for result in results])
        np.testing.assert_allclose(found, self.scores[rows], atol=CLOSE, rtol=CLOSE)
        assert [result["class"] for result in results] == self.scores[rows].argmax(axis=1).tolist()


class Server:
    """Ranks in processes of their own, started one by one, so that each may be killed and replaced."""

    def __init__(self, scheme: str, model: Path, ranks: int, *options: str, parameters: str = "") -> None:
        job = f"serve-{os.getpid()}-{id(self)}"
        port = free_port()
        place = f"127.0.0.1:{port}/{job}" if scheme.endswith("tcp") else job
        self.base = ""  # until the front says where it serves
        self.size = ranks
        self._arguments = ("--model", str(model), "--port", "0", *options)
        self._environ = {
            **os.environ,
            "RUDA_URL": f"{scheme}://{place}?timeout=60{parameters}",
            "RUDA_SECRET": "of this test",
            "OMP_NUM_THREADS": "1",
            "RUDA_WORLD_SIZE": str(ranks),
        }
        self.processes: list[asyncio.subprocess.Process] = []
        self.output: list[str] = []
        self._readers: list[asyncio.Task[None]] = []

    async def start(self, rank: int | None) -> asyncio.subprocess.Process:
        """One rank; without a number, one that joins."""
        environ = self._environ if rank is None else {**self._environ, "RUDA_RANK": str(rank)}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLES / "serve_moe"),
            *self._arguments,
            *(("--join",) if rank is None else ()),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environ,
        )
        self.processes.append(process)
        self._readers.append(asyncio.ensure_future(self._read(process, rank)))
        return process

    async def _read(self, process: asyncio.subprocess.Process, rank: int | None) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if found := re.search(rb"serving on (http://\S+)", line):
                self.base = found[1].decode()
            self.output.append(f"[{'new' if rank is None else rank}] {line.decode(errors='replace')}")

    async def stats(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.base}/stats") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def until(
        self, condition: Callable[[dict[str, Any]], bool], limit: float = START
    ) -> dict[str, Any]:
        """The front's numbers, once they fulfil `condition`."""
        found: Any = None
        try:
            async with asyncio.timeout(limit):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        found = await self.stats()
                        if condition(found):
                            return dict(found)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not so within {limit} s: {found}\n{''.join(self.output)}") from None

    async def stop(self) -> list[int]:
        """SIGTERM for all, as a launcher does; the exit codes."""
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        return [await asyncio.wait_for(process.wait(), 60) for process in self.processes]

    async def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*self._readers)


@contextlib.asynccontextmanager
async def served(
    scheme: str, model: Path, ranks: int, *options: str, parameters: str = ""
) -> AsyncIterator[Server]:
    """A server of so many ranks that is ready; its output is shown where the test fails."""
    server = Server(scheme, model, ranks, *options, parameters=parameters)
    try:
        for rank in range(ranks):
            await server.start(rank)
        await server.until(lambda s: s["ready"] and len(s["ranks"]) == ranks)
        yield server
    except BaseException:
        print("".join(server.output))
        raise
    finally:
        await server.end()


class Clients:
    """Clients that ask again and again, and check every answer.

    Attributes:
        answered: answers that were right; a wrong one raises.
        refused: by error code, of answers that said so.
    """

    def __init__(self, server: Server, oracle: Oracle, seed: int = 0) -> None:
        self.answered = 0
        self.refused: dict[str, int] = {}
        self.problems: list[BaseException] = []
        self._server = server
        self._oracle = oracle
        self._random = np.random.default_rng(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = False

    async def ask(self, session: aiohttp.ClientSession, rows: np.ndarray) -> str:
        """One request; ``"ok"`` or the error's code."""
        url = f"{self._server.base}/v1/classify"
        body = self._oracle.pixels[rows].tobytes()
        async with session.post(
            url, data=body, headers={"Content-Type": "application/octet-stream"}
        ) as answer:
            told = await answer.json()
            if answer.status == 200:
                self._oracle.check(rows, told["results"])
                self.answered += 1
                return "ok"
            assert answer.status in (429, 503, 504), (answer.status, told)
            assert int(answer.headers["Retry-After"]) >= 1
            code: str = told["error"]
            self.refused[code] = self.refused.get(code, 0) + 1
            return code

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._stop:
            rows = self._random.integers(0, 512, self._random.integers(1, 9))
            if await self.ask(session, rows) != "ok":
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def busy(self, count: int, limit: float = 30) -> AsyncIterator[None]:
        """`count` clients meanwhile. None may wait longer than `limit` for an answer."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=limit)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            tasks = [asyncio.ensure_future(self._client(session)) for _ in range(count)]
            try:
                yield
            finally:
                self._stop = True
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                self.problems = [o for o in outcomes if isinstance(o, BaseException)]
        assert not self.problems, self.problems[0]

    async def more(self, count: int, limit: float = 60) -> None:
        """Until so many further answers have been right."""
        goal = self.answered + count
        try:
            async with asyncio.timeout(limit):
                while self.answered < goal:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{goal - self.answered} of {count} answers are missing") from None
