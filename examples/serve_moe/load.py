"""Load test: the sharded server under many clients, beside the same model in one process and over Gloo.

    python examples/serve_moe/load.py --model digits.npz [--clients 64 | --rate 200] [--seconds 20]

Each variant is a server of its own, started by ``ruda-async run``, and every answer is compared with the
unsharded model's. Clients keep one request each under way, which shows the most that a server can do. With
`--rate` requests come at random at so many a second, whether or not earlier ones were answered, which
shows what users wait: latency counts from when a request was due. Variants take turns, `--rounds` times, and
the best round of each is shown. Clients run in this process, on the same machine, and take their share of it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

folder = Path(__file__).resolve().parent
sys.path[:] = [str(folder.parent), *(place for place in sys.path if Path(place or ".").resolve() != folder)]

from digits_moe import load, prepare  # noqa: E402

from ruda_async import moe  # noqa: E402

#: What batches of other sizes may change in a score: float32 rounding.
CLOSE = 1e-4
#: name → (ranks or None for those asked for, URL, exchange).
VARIANTS = {
    "shm": (None, "shm://load?timeout=60", "ruda"),
    "tcp": (None, "tcp://127.0.0.1:0?timeout=60", "ruda"),
    "gloo in threads": (None, "shm://load?timeout=60", "gloo"),
    "one process": (1, "shm://load?timeout=60", "none"),
}


@dataclass
class Figures:
    """One variant's round.

    Attributes:
        answered: right answers.
        wrong, refused, lost: answers with other numbers, with an error, and requests without an answer.
        latencies: seconds of each right answer.
        seconds: of the round.
        stall: how late the event loop of the worst rank was, in milliseconds: ``p99_ms``,
            ``max_ms``, and of its own making, without waiting for a core, ``own_p99_ms``.
    """

    answered: int = 0
    wrong: int = 0
    refused: int = 0
    lost: int = 0
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stall: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Right answers a second."""
        return self.answered / self.seconds

    def percentile(self, share: float) -> float:
        """Of latency, in milliseconds."""
        return 1000 * float(np.quantile(self.latencies, share)) if self.latencies else float("nan")


class Truth:
    """Rows, and what the unsharded model says of them."""

    def __init__(self, path: Path, count: int = 512) -> None:
        model = load(path)
        rng = np.random.default_rng(1)
        self.pixels = rng.integers(0, 17, (count, 64)).astype(np.float32)
        with torch.no_grad():
            tokens = model.tokens(prepare(self.pixels, model.mean.numpy()))
            experts = list(model.experts.values())
            mixed = moe.reference(tokens, model.router(tokens), experts, model.sizes.chosen)
            self.scores = model.output(tokens + mixed).numpy()


class Load:
    """Requests to one server, and what became of them in `figures`."""

    def __init__(self, session: aiohttp.ClientSession, base: str, truth: Truth, rows: int) -> None:
        self.figures = Figures()
        self._session = session
        self._base = base
        self._truth = truth
        self._rows = rows
        self._rng = np.random.default_rng()

    async def request(self, due: float) -> bool:
        """One request, which was due at `due`; whether it was accepted."""
        truth, figures = self._truth, self.figures
        chosen = self._rng.integers(0, len(truth.pixels), self._rows)
        try:
            async with self._session.post(
                f"{self._base}/v1/classify",
                data=truth.pixels[chosen].tobytes(),
                headers={"Content-Type": "application/octet-stream"},
            ) as answer:
                told = await answer.json()
        except (aiohttp.ClientError, TimeoutError):
            figures.lost += 1
            return True
        if answer.status != 200:
            figures.refused += 1
            return False
        found = np.array([result["scores"] for result in told["results"]])
        if np.allclose(found, truth.scores[chosen], atol=CLOSE, rtol=CLOSE):
            figures.answered += 1
            figures.latencies.append(time.monotonic() - due)
        else:
            figures.wrong += 1
        return True

    async def clients(self, number: int, seconds: float) -> None:
        """So many clients, each with one request after the other."""

        async def client(until: float) -> None:
            while (start := time.monotonic()) < until:
                if not await self.request(start):
                    await asyncio.sleep(0.05)

        start = time.monotonic()
        await asyncio.gather(*(client(start + seconds) for _ in range(number)))
        self.figures.seconds = time.monotonic() - start

    async def arrivals(self, rate: float, seconds: float) -> None:
        """Requests that are due at random, `rate` a second (a Poisson process)."""
        due = start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (due := due + self._rng.exponential(1 / rate)) < start + seconds:
                await asyncio.sleep(max(due - time.monotonic(), 0))
                group.create_task(self.request(due))
        self.figures.seconds = time.monotonic() - start


async def measure(base: str, truth: Truth, options: argparse.Namespace) -> Figures:
    """Load one server, after a moment that does not count."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for seconds in (min(2.0, options.seconds / 4), options.seconds):
            requests = Load(session, base, truth, options.rows)
            if options.rate:
                await requests.arrivals(options.rate, seconds)
            else:
                await requests.clients(options.clients, seconds)
        async with session.get(f"{base}/stats") as answer:
            ranks: list[dict[str, Any]] = (await answer.json())["ranks"]
    figures = requests.figures
    figures.stall = {
        key: max(rank["stall"][key] for rank in ranks) for key in ("p99_ms", "own_p99_ms", "max_ms")
    }
    return figures


async def round_of(name: str, options: argparse.Namespace, truth: Truth) -> Figures:
    """Start a variant's server, measure it, and see that it ends well.

    Raises:
        RuntimeError: the server did not start, or did not end with 0.
    """
    ranks, url, exchange = VARIANTS[name]
    command = [sys.executable, "-m", "ruda_async", "run", "-n", str(ranks or options.ranks), "--url", url]
    command += ["--no-prefix", "--grace", "15", str(folder), "--model", str(options.model), "--port", "0"]
    command += ["--exchange", exchange, *(options.server or [])]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        while True:
            line = (await process.stdout.readline()).decode()
            if not line:
                raise RuntimeError(f"{name}: the server did not start; run: {' '.join(command)}")
            if line.startswith("serving on "):
                base = line.split()[-1]
                break
        await until_ready(base)
        figures = await measure(base, truth, options)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()
    if process.returncode not in (0, 128 + signal.SIGTERM):
        raise RuntimeError(f"{name}: the server ended with {process.returncode}")
    return figures


async def until_ready(base: str) -> None:
    """Wait until the server answers requests, and its ranks have told their numbers."""
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{base}/stats") as answer:
                told = await answer.json()
            if told["ready"] and told["ranks"]:
                return
            await asyncio.sleep(0.1)


def score(figures: Figures, options: argparse.Namespace) -> float:
    """What makes a round the best: its rate, or with a given one how soon half of its answers came."""
    return -figures.percentile(0.5) if options.rate else figures.rate


def show(best: dict[str, Figures], options: argparse.Namespace) -> None:
    """A table in Markdown."""
    how = f"{options.rate:g} requests a second" if options.rate else f"{options.clients} clients"
    print(f"{how}, {options.rows} rows a request, {options.ranks} ranks where sharded\n")
    print(
        "| variant | requests/s | p50 | p99 | loop late, p99 | of its own | most | lost | wrong | refused |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, f in best.items():
        print(
            f"| {name} | {f.rate:.0f} | {f.percentile(0.5):.1f} ms | {f.percentile(0.99):.1f} ms | "
            f"{f.stall['p99_ms']:.1f} ms | {f.stall['own_p99_ms']:.1f} ms | {f.stall['max_ms']:.1f} ms | "
            f"{f.lost} | {f.wrong} | {f.refused} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the sharded server beside others of its kind.")
    parser.add_argument("--model", type=Path, default=Path("digits.npz"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0, help="requests a second, in place of clients")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="of each request")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--server", nargs=argparse.REMAINDER, help="further options of the server")
    options = parser.parse_args()
    torch.set_num_threads(1)
    truth = Truth(options.model)
    best: dict[str, Figures] = {}
    bad = 0
    for _ in range(options.rounds):
        for name in options.variants:
            figures = asyncio.run(round_of(name, options, truth))
            bad += figures.wrong + figures.lost
            if name not in best or score(figures, options) > score(best[name], options):
                best[name] = figures
    show({name: best[name] for name in options.variants}, options)
    if bad:
        print(f"FAILED: {bad} requests were lost or answered wrongly")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
