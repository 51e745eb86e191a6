"""The page at ``/`` in a real browser."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from serving_support import Clients, Oracle, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


async def page_of(url: str, profile: Path) -> str:
    """The document's HTML, three seconds of its own time after it was opened."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=3500", "--dump-dom", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


def table(page: str, name: str) -> list[list[str]]:
    """The cells of a table's rows, as text."""
    found = re.search(rf'<table id="{name}">(.*?)</table>', page, re.DOTALL)
    assert found is not None, page
    rows = re.findall(r"<tr>(.*?)</tr>", found[1], re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row)]
        for row in rows
    ]


async def test_it_shows_ranks_experts_latency_and_traffic(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with served("shm", model, 4, "--on-loss", "refuse") as server:
        clients = Clients(server, oracle)
        async with aiohttp.ClientSession() as session:
            for _ in range(10):
                assert await clients.ask(session, np.arange(64)) == "ok"
        stats = await server.until(lambda s: sum(rank["rows"] for rank in s["ranks"]) == 1280)
        page = await page_of(server.base, tmp_path / "first")
        assert '<span id="state">ready</span>' in page
        assert "4 of 4 ranks; 10 requests answered, none refused" in page
        ranks = table(page, "ranks")
        assert [row[0] for row in ranks] == ["rank", "0 (front)", "1", "2", "3"]
        assert [row[1:4] for row in ranks[1:]] == [
            [str(rank["pid"]), " ".join(map(str, rank["experts"])) or "-", str(rank["rows"])]
            for rank in stats["ranks"]
        ]
        experts = table(page, "experts")
        assert [row[:2] for row in experts[1:]] == [
            [str(number), str(rows)] for number, rows in enumerate(stats["expert_rows"])
        ]
        assert all(re.fullmatch(r"\d+\.\d ms", cell) for cell in table(page, "latency")[1])
        links = table(page, "links")
        assert links[1][1] == "-"
        assert all(float(links[1][peer]) > 0 for peer in (2, 3, 4))
        shown = re.search(r'data-shown="(\d+)"', page)
        assert shown is not None
        assert int(shown[1]) >= 2  # it looks again by itself

        server.processes[1].kill()
        await server.until(lambda s: s["ready"] and s["live"] == 3 == len(s["ranks"]))
        page = await page_of(server.base, tmp_path / "second")
        assert "3 of 4 ranks" in page
        assert [row[0] for row in table(page, "experts")[1:4]] == ["0 (lost)", "1 (lost)", "2 (lost)"]
