"""Ranks of a served job die, stand still and come back, in the middle of load."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from serving_support import Clients, Oracle, Server, served, write_model

pytestmark = pytest.mark.timeout(600)  # each process imports torch


def holders(stats: dict) -> list[int]:
    """All experts that ranks hold, in ascending order."""
    return sorted(number for rank in stats["ranks"] for number in rank["experts"])


async def until_live(server: Server, ranks: int) -> dict:
    """`ranks` ranks serve, and have told what they hold."""
    return await server.until(lambda s: s["ready"] and s["live"] == ranks == len(s["ranks"]))


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_survivors_take_over_and_a_new_rank_relieves_them(
    scheme: str, model: Path, oracle: Oracle
) -> None:
    async with served(scheme, model, 4) as server:
        clients = Clients(server, oracle)
        async with clients.busy(16):
            await clients.more(100)
            server.processes[2].kill()
            stats = await until_live(server, 3)
            assert holders(stats) == list(range(8))
            await clients.more(100)
            assert stats["losses"] >= 1

            pid = (await server.start(None)).pid
            stats = await until_live(server, 4)
            assert holders(stats) == list(range(8))
            assert [len(rank["experts"]) for rank in stats["ranks"]] == [0, 3, 3, 2]
            assert [rank["pid"] for rank in stats["ranks"]].index(pid) == 3
            await clients.more(100)
            # Its experts work on what those of the lost rank would have.
            await server.until(lambda s: s["joins"] == 1 and s["live"] == 4 and s["ranks"][3]["rows"] > 100)
        # A lost rank costs nobody an answer: what was under way has been tried again.
        assert set(clients.refused) <= {"overloaded"}
        codes = await server.stop()
        assert [codes[i] for i in (0, 1, 3, 4)] == [0, 0, 0, 0]


async def test_a_request_that_finds_the_loss_is_answered_by_the_survivors(
    model: Path, oracle: Oracle
) -> None:
    """Its second try waits for them, and is not spent on the ranks that are no more."""
    async with served("shm", model, 3) as server, aiohttp.ClientSession() as session:
        clients = Clients(server, oracle)
        for live in (2, 1):
            process = server.processes[live]
            process.kill()
            await process.wait()
            assert await clients.ask(session, np.arange(live)) == "ok"
            await until_live(server, live)


async def test_experts_that_are_lost_may_be_refused(model: Path, oracle: Oracle) -> None:
    async with served("shm", model, 4, "--on-loss", "refuse") as server:
        clients = Clients(server, oracle)
        server.processes[2].kill()
        stats = await until_live(server, 3)
        assert stats["absent"] == [3, 4, 5]
        assert holders(stats) == [0, 1, 2, 6, 7]
        lost = np.isin(oracle.experts, [3, 4, 5]).any(axis=1)
        assert 0 < lost.sum() < 512
        async with aiohttp.ClientSession() as session:
            for row in range(40):
                code = await clients.ask(session, np.array([row]))
                assert code == ("expert_lost" if lost[row] else "ok"), row

            await server.start(None)
            stats = await until_live(server, 4)
            assert stats["absent"] == []
            for row in range(40):
                assert await clients.ask(session, np.array([row])) == "ok"


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_a_rank_that_stands_still_is_dropped_and_comes_back(
    scheme: str, model: Path, oracle: Oracle
) -> None:
    options = ("--batch-timeout", "60", "--request-timeout", "20")
    async with served(scheme, model, 3, *options, parameters="&heartbeat=2") as server:
        clients = Clients(server, oracle)
        async with clients.busy(8):
            await clients.more(50)
            stopped = server.processes[1]
            stopped.send_signal(signal.SIGSTOP)
            stats = await until_live(server, 2)
            assert holders(stats) == list(range(8))
            await clients.more(50)
            stopped.send_signal(signal.SIGCONT)
            stats = await until_live(server, 3)
            assert [len(rank["experts"]) for rank in stats["ranks"]] == [0, 4, 4]
            assert stopped.pid in [rank["pid"] for rank in stats["ranks"]]
            await clients.more(50)
        assert set(clients.refused) <= {"rank_lost", "overloaded"}


async def test_the_front_serves_alone_when_all_workers_are_gone(model: Path, oracle: Oracle) -> None:
    async with served("shm", model, 3) as server:
        clients = Clients(server, oracle)
        async with clients.busy(4):
            await clients.more(20)
            for process in server.processes[1:]:
                process.kill()
            stats = await until_live(server, 1)
            assert holders(stats) == list(range(8))
            await clients.more(20)


async def test_workers_end_when_the_front_is_gone(model: Path) -> None:
    async with served("tcp", model, 3, "--rejoin-timeout", "1") as server:
        server.processes[0].kill()
        codes = await asyncio.gather(*(process.wait() for process in server.processes[1:]))
        assert codes == [1, 1]
        assert "no job at" in "".join(server.output)


@pytest.mark.parametrize("gone", [False, True])
async def test_no_expert_comes_from_another_file_than_the_others(
    gone: bool, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """The file is replaced (or deleted) while it is served; then experts are lost."""
    path = tmp_path / "served.npz"
    path.write_bytes(model.read_bytes())
    async with served("shm", path, 3) as server, aiohttp.ClientSession() as session:
        clients = Clients(server, oracle)
        if gone:
            path.unlink()
        else:
            write_model(path, seed=6)
        server.processes[1].kill()
        stats = await until_live(server, 2)
        assert stats["absent"] == [0, 1, 2, 3]
        assert "has changed or gone" in "".join(server.output)
        lost = np.isin(oracle.experts, [0, 1, 2, 3]).any(axis=1)
        for row in range(30):
            code = await clients.ask(session, np.array([row]))
            assert code == ("expert_lost" if lost[row] else "ok"), row

        if not gone:  # a rank with the new model does not get in
            stranger = await server.start(None)
            assert await asyncio.wait_for(stranger.wait(), 180) == 1
            assert "is another model than the front's" in "".join(server.output)
            await until_live(server, 2)
        path.write_bytes(model.read_bytes())
        await server.start(None)
        stats = await until_live(server, 3)
        assert stats["absent"] == []
        for row in range(30):
            assert await clients.ask(session, np.array([row])) == "ok"
