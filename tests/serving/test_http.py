"""The served job over HTTP: answers, streams, errors, back-pressure, cancellation, draining, numbers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from serving_support import EXAMPLES, Clients, Oracle, Server, served

pytestmark = pytest.mark.timeout(600)  # each process imports torch


@pytest.fixture
async def server(model: Path) -> AsyncIterator[Server]:
    async with served("shm", model, 3) as server:
        yield server


async def test_answers_streams_and_errors(server: Server, oracle: Oracle) -> None:
    url = f"{server.base}/v1/classify"
    rows = np.arange(200)
    images = oracle.pixels[rows].tolist()
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={"images": images}) as answer:
            assert answer.status == 200
            oracle.check(rows, (await answer.json())["results"])

        # More rows than a batch holds: the lines come in parts, each row once.
        async with session.post(url, json={"images": images, "stream": True}) as answer:
            assert answer.content_type == "application/x-ndjson"
            lines = [json.loads(line) async for line in answer.content]
        oracle.check(rows, sorted(lines, key=lambda line: line["row"]))

        headers = {"Accept": "text/event-stream"}
        async with session.post(url, json={"images": images}, headers=headers) as answer:
            assert answer.content_type == "text/event-stream"
            events = (await answer.text()).split("\n\n")
        lines = [json.loads(event.removeprefix("data: ")) for event in events if event]
        oracle.check(rows, sorted(lines, key=lambda line: line["row"]))

        json_type = {"Content-Type": "application/json"}
        for body, status, code in (
            (b"{", 400, "bad_request"),
            (b"[]", 400, "bad_request"),
            (b'{"images": []}', 400, "bad_request"),
            (b'{"images": [[1, 2]]}', 400, "bad_request"),
            (b'{"images": [["a"]]}', 400, "bad_request"),
            (json.dumps({"images": [[float("nan")] * 64]}).encode(), 400, "bad_request"),
            (json.dumps({"images": [[1e39] * 64]}).encode(), 400, "bad_request"),
            (json.dumps({"images": [[-1] * 64]}).encode(), 400, "bad_request"),
            (json.dumps({"images": [["3"] * 64]}).encode(), 400, "bad_request"),
            (json.dumps({"images": [[True] * 64]}).encode(), 400, "bad_request"),
            (json.dumps({"images": [[1] * 64], "stream": "yes"}).encode(), 400, "bad_request"),
            (json.dumps({"images": [[1] * 64] * 257}).encode(), 413, "too_large"),
            (b"x" * 1_000_000, 413, "too_large"),
            (b"[" * 100_000, 400, "bad_request"),
        ):
            async with session.post(url, data=body, headers=json_type) as answer:
                assert (answer.status, (await answer.json())["error"]) == (status, code), body[:40]
        async with session.get(url) as answer:
            assert answer.status == 405
        binary = {"Content-Type": "Application/Octet-Stream"}
        async with session.post(url, data=oracle.pixels[:2].tobytes(), headers=binary) as answer:
            oracle.check(np.arange(2), (await answer.json())["results"])
        assert "Warning" not in "".join(server.output)  # what clients send wrongly is no news for the log
        assert await Clients(server, oracle).ask(session, rows[:3]) == "ok"


async def test_health_metrics_and_numbers(server: Server, oracle: Oracle) -> None:
    clients = Clients(server, oracle)
    async with aiohttp.ClientSession() as session:
        for _ in range(20):
            assert await clients.ask(session, np.arange(8)) == "ok"
        for path in ("/healthz", "/readyz"):
            async with session.get(server.base + path) as answer:
                assert answer.status == 200
        stats = await server.until(lambda s: sum(rank["rows"] for rank in s["ranks"]) == 320)
        assert sum(stats["expert_rows"]) == 320  # 20 requests of 8 rows with 2 experts each
        assert stats["requests"] == {"ok": 20}
        assert 0 < stats["latency_ms"]["p50"] <= stats["latency_ms"]["p99"] <= stats["latency_ms"]["max"]
        sent, received = stats["ranks"][0]["peers"]["1"], stats["ranks"][1]["peers"]["0"]
        assert sent["bytes_sent"] > 160 * 64 * 4 / 4
        assert received["bytes_received"] > 0
        async with session.get(f"{server.base}/metrics") as answer:
            assert answer.content_type == "text/plain"
            text = await answer.text()
    values = dict(re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
    assert float(values['serve_requests_total{code="ok"}']) == 20
    assert float(values["serve_ready"]) == 1
    assert sum(float(v) for k, v in values.items() if k.startswith("serve_expert_rows_total")) == 320
    assert float(values['serve_link_sent_bytes_total{peer="1",rank="0"}']) > 0
    assert any(key.startswith("ruda_operation_seconds_count{") for key in values)


async def test_a_client_that_leaves_ends_its_work_everywhere(model: Path, oracle: Oracle) -> None:
    """A worker stands still, so batches wait; when their clients have gone, so have they."""
    options = ("--batch-timeout", "100", "--request-timeout", "100", "--in-flight", "2")
    async with served("shm", model, 3, *options, parameters="&heartbeat=100") as server:
        idle = await server.stats()
        server.processes[1].send_signal(signal.SIGSTOP)
        clients = Clients(server, oracle)
        async with aiohttp.ClientSession() as session:
            asking = [asyncio.ensure_future(clients.ask(session, np.arange(i, i + 40))) for i in range(6)]
            streaming = asyncio.ensure_future(
                session.post(
                    f"{server.base}/v1/classify?stream=1",
                    data=oracle.pixels[:40].tobytes(),
                    headers={"Content-Type": "application/octet-stream"},
                )
            )
            await server.until(lambda s: s["in_flight"] == 2 and s["queue_rows"] == 280 - 128)
            for task in (*asking, streaming):
                task.cancel()
            await asyncio.gather(*asking, streaming, return_exceptions=True)
            stats = await server.until(lambda s: s["in_flight"] == 0 and s["queue_rows"] == 0)
            assert stats["losses"] == 0
            server.processes[1].send_signal(signal.SIGCONT)
            # The worker that stood still hears of it and goes on, as does everything else.
            assert await clients.ask(session, np.arange(5)) == "ok"
        stats = await server.until(
            lambda s: [r["channels"] for r in s["ranks"]] == [r["channels"] for r in idle["ranks"]]
        )
        assert stats["requests"] == {"disconnected": 7, "ok": 1}


async def test_a_full_queue_is_said_and_slow_requests_end(model: Path, oracle: Oracle) -> None:
    options = ("--max-queue", "64", "--max-request", "64", "--in-flight", "1", "--max-batch", "32")
    options += ("--request-timeout", "2", "--batch-timeout", "100")
    async with served("shm", model, 3, *options, parameters="&heartbeat=100") as server:
        server.processes[1].send_signal(signal.SIGSTOP)
        clients = Clients(server, oracle)
        async with aiohttp.ClientSession() as session:
            stuck = [asyncio.ensure_future(clients.ask(session, np.arange(32)))]
            await server.until(lambda s: s["in_flight"] == 1)  # or the third would find the queue full
            stuck += [asyncio.ensure_future(clients.ask(session, np.arange(32))) for _ in range(2)]
            await server.until(lambda s: s["queue_rows"] == 64)
            assert await clients.ask(session, np.arange(1)) == "overloaded"
            assert await asyncio.gather(*stuck) == ["timeout"] * 3
            server.processes[1].send_signal(signal.SIGCONT)
            await server.until(lambda s: s["in_flight"] == 0)
            assert await clients.ask(session, np.arange(9)) == "ok"


async def test_sigterm_answers_what_was_accepted(model: Path, oracle: Oracle) -> None:
    async with served("shm", model, 3, "--batch-timeout", "100", parameters="&heartbeat=100") as server:
        worker = server.processes[1]
        worker.send_signal(signal.SIGSTOP)
        clients = Clients(server, oracle)
        async with aiohttp.ClientSession() as session:
            asking = [asyncio.ensure_future(clients.ask(session, np.arange(i, i + 5))) for i in range(12)]
            await server.until(lambda s: s["in_flight"] > 0 and s["ready"])
            for process in server.processes:
                process.send_signal(signal.SIGTERM)
            await server.until(lambda s: s["draining"])
            async with session.get(f"{server.base}/readyz") as answer:
                assert answer.status == 503
            assert await clients.ask(session, np.arange(1)) == "draining"
            worker.send_signal(signal.SIGCONT)
            assert await asyncio.gather(*asking) == ["ok"] * 12
        assert [await asyncio.wait_for(process.wait(), 60) for process in server.processes] == [0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_front_without_a_word(number: signal.Signals, model: Path) -> None:
    async with served("shm", model, 2) as server:
        host, port = server.base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/classify HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
        writer.write(head.encode())
        assert b"100 Continue" in await reader.readline()  # the body is awaited
        server.processes[1].send_signal(signal.SIGSTOP)
        rows = np.zeros((1, 64), np.float32).tobytes()
        async with aiohttp.ClientSession() as session:
            url, kind = f"{server.base}/v1/classify", {"Content-Type": "application/octet-stream"}
            stuck = asyncio.ensure_future(session.post(url, data=rows, headers=kind))
            await server.until(lambda s: s["in_flight"] > 0)
            server.processes[0].send_signal(number)
            await server.until(lambda s: s["draining"])
            server.processes[0].send_signal(number)
            assert await asyncio.wait_for(server.processes[0].wait(), 60) == -number
            await asyncio.gather(stuck, return_exceptions=True)
        writer.close()
    assert "Traceback" not in "".join(server.output)


async def test_a_front_that_waits_for_ranks_ends_when_it_is_told(model: Path) -> None:
    server = Server("shm", model, 2)
    try:
        front = await server.start(0)
        await server.until(lambda s: not s["ready"])
        front.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(front.wait(), 30) == 0  # and not only when connecting times out
    finally:
        await server.end()


#: A worker that gets signals while it serves and after that, until the interpreter has ended.
SIGNALLED = """
import asyncio, atexit, os, signal, sys
from serve_moe.rank import one_signal_ignored

def signalled(times):
    for _ in range(times):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))

async def live():
    with one_signal_ignored():
        signalled(int(sys.argv[2]))
        await asyncio.sleep(0)

class Last:
    def __del__(self):
        signalled(1)

atexit.register(signalled, 1)
sys.last_to_go = Last()
asyncio.run(live())
signalled(1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_ends_does_not_fall_by_the_launchers_signal(
    number: signal.Signals,
) -> None:
    """A front with little to drain ends its workers before the launcher comes to signal them all."""

    async def code(times: int) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SIGNALLED, number.name, str(times)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await asyncio.wait_for(process.wait(), 200)

    assert await code(1) == 0
    assert await code(2) in (-number, 128 + number, 1)


async def test_a_batch_that_takes_too_long_is_tried_once_more(model: Path, oracle: Oracle) -> None:
    options = ("--batch-timeout", "0.5", "--retries", "1")
    async with served("shm", model, 3, *options, parameters="&heartbeat=100") as server:
        server.processes[1].send_signal(signal.SIGSTOP)
        clients = Clients(server, oracle)
        async with aiohttp.ClientSession() as session:
            assert await clients.ask(session, np.arange(7)) == "batch_timeout"
            server.processes[1].send_signal(signal.SIGCONT)
            for _ in range(5):
                assert await clients.ask(session, np.arange(7)) == "ok"


async def test_under_the_launcher(model: Path) -> None:
    """`run` takes the folder, and passes SIGTERM on."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ruda_async", "run", "-n", "3", "--keep-going", "--grace", "20"),
        *(str(EXAMPLES / "serve_moe"), "--model", str(model), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(300):
            lines = []
            while not (found := re.search(r"serving on (http://\S+)", lines[-1] if lines else "")):
                lines.append((await process.stdout.readline()).decode())
                assert lines[-1], lines
            async with aiohttp.ClientSession() as session:
                stats: dict[str, Any] = {}
                while len(stats.get("ranks", ())) < 3:
                    async with session.get(f"{found[1]}/stats") as answer:
                        stats = await answer.json()
                    await asyncio.sleep(0.05)
                # A lost worker does not end the job.
                os.kill(stats["ranks"][1]["pid"], signal.SIGKILL)
                while stats["live"] != 2:
                    async with session.get(f"{found[1]}/stats") as answer:
                        stats = await answer.json()
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 128 + signal.SIGTERM, output.decode()
    assert "the others go on" in output.decode()


async def test_mistakes_are_said_at_once(model: Path, tmp_path: Path) -> None:
    async def run(*options: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / "serve_moe"), *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 180)
        return process.returncode, output.decode()

    code, text = await run("--model", str(tmp_path / "none.npz"))
    assert code == 1
    assert "train_digits_moe.py --save" in text
    code, text = await run("--model", str(model), "--max-batch", "0")
    assert code == 2
    assert "--max-batch has to be above 0" in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = await run("--model", str(model), "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "in use" in text
