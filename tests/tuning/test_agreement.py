"""All ranks go by rank 0's numbers, whatever each of them was told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ruda_async
from ruda_async import CollectiveTimeoutError, ConfigError, PeerLostError, notices
from ruda_async.communicator import open_transport
from ruda_async.config import resolve
from ruda_async.tags import CONTROL_TAG
from ruda_async.tuning import Numbers, write_tuning
from ruda_async.url import split_url

#: So dear and so cheap that the choice differs from that by any transport's declaration.
DEAR = Numbers(1.0, 1.0, 1e12, 1e12)


def tuned(path: Path, url: str, numbers: Numbers = DEAR) -> str:
    write_tuning(path, {split_url(url).scheme: numbers})
    return str(path)


async def each(url: str, size: int, body: Callable[[Any], Any], **per_rank: dict[int, Any]) -> list[Any]:
    async def rank(number: int) -> Any:
        options = {name: values[number] for name, values in per_rank.items() if number in values}
        async with ruda_async.connect(url, rank=number, world_size=size, timeout=20, **options) as comm:
            return await body(comm)

    return list(await asyncio.gather(*map(rank, range(size))))


async def explained(comm: Any) -> str:
    # A call whose rounds differ between algorithms would hang, or be a mismatch, if ranks chose apart.
    total = await comm.all_reduce_sum(np.arange(1 << 16, dtype=np.float32) + comm.rank)
    assert total[1] == comm.world_size + sum(range(comm.world_size))
    text: str = comm.explain("all_reduce", 1 << 18)
    return text


async def test_rank_0_decides(url: str, tmp_path: Path) -> None:
    own = tuned(tmp_path / "a.json", url)
    texts = await each(url, 4, explained, tuning={0: own, 1: "off", 2: str(tmp_path / "not there")})
    assert len(set(texts)) == 1
    assert "latency 1 s, 1 s for each further message" in texts[0]
    assert "over 4 ranks: recursive_doubling, log2(ranks) rounds" in texts[0]


async def test_what_other_ranks_have_does_not_count(url: str, tmp_path: Path) -> None:
    own = tuned(tmp_path / "a.json", url)
    texts = await each(url, 4, explained, tuning={0: "off", 1: own, 2: own, 3: own})
    assert len(set(texts)) == 1
    assert "latency 1 s" not in texts[0]
    assert "over 4 ranks: pairwise" in texts[0]


async def test_segments_are_rank_0s_too(new_url: Callable[[str], str]) -> None:
    async def pieces(comm: Any) -> Any:
        value = np.arange(3 << 18, dtype=np.float32) * (comm.rank + 1)
        first = await comm.all_reduce_sum(value)
        second = await comm.broadcast(value, 0)
        return first[5], second[5], comm._node.capabilities.segment_bytes

    sizes = {0: 100_000, 1: 4096, 2: 1 << 20, 3: 64 << 10}
    results = await each(new_url("tcp"), 4, pieces, segment_bytes=sizes)
    assert results == [(50.0, 5.0, 100_000)] * 4


async def test_the_machines_own_file_is_used_unless_it_is_turned_off(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ruda_async.tuning import default_path

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned(default_path(), url)
    assert all("latency 1 s" in text for text in await each(url, 2, explained))
    monkeypatch.setenv("RUDA_TUNING", "off")
    assert not any("latency 1 s" in text for text in await each(url, 2, explained))


async def test_a_file_that_cannot_be_used_is_refused_by_rank_0(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        await ruda_async.connect(url, rank=0, world_size=1, tuning=str(tmp_path / "none.json"))
    alone = await ruda_async.connect(url, rank=0, world_size=1, tuning=tuned(tmp_path / "a.json", url))
    assert "latency 1 s" in alone.explain("all_gather", 8)
    await alone.close()


@pytest.mark.parametrize("says", ["nothing", "nonsense", "goodbye"])
async def test_a_rank_0_that_never_tells(new_url: Callable[[str], str], says: str) -> None:
    url = new_url("tcp")

    async def stranger() -> None:
        transport = await open_transport(resolve(url, rank=0, world_size=2, timeout=20))
        if says == "nonsense":
            data = notices.encode("costs", 1, 0.0, 0.0, -1.0, 1.0)
            await transport.send(1, CONTROL_TAG, (memoryview(data),))
        if says == "goodbye":
            await transport.close()
        await joined.wait()
        await transport.close()

    joined = asyncio.Event()
    hosting = asyncio.ensure_future(stranger())
    timeout = 1 if says == "nothing" else 20
    error = CollectiveTimeoutError if says == "nothing" else PeerLostError
    try:
        with pytest.raises(error) as caught:
            await ruda_async.connect(url, rank=1, world_size=2, timeout=timeout)
    finally:
        joined.set()
        await hosting
    if says == "nothing":
        assert caught.value.missing == (0,)
    else:
        assert caught.value.rank == 0


def test_tuning_may_stand_in_the_url(tmp_path: Path) -> None:
    config = resolve(f"memory://x?tuning={tmp_path}/a.json", rank=0, world_size=1, environ={})
    assert config.tuning == f"{tmp_path}/a.json"
    assert resolve("memory://x", rank=0, world_size=1, environ={"RUDA_TUNING": "off"}).tuning == "off"
    assert resolve("memory://x", rank=0, world_size=1, environ=dict(os.environ)).tuning in (None, "off")
