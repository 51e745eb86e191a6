"""The job secret over ``tcp://``: every way to give it, ranks that differ in it, and that it never shows."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mesh_support import run_each
from support import free_port, fresh_url

import ruda_async
from ruda_async import AsyncCommunicator, AuthenticationError, CollectiveTimeoutError, ConfigError
from ruda_async.config import resolve

SECRET = "kestrel-9f2c7d11a04b"
#: Forms in which a secret might slip into a text.
SHAPES = (SECRET, SECRET[:12], SECRET.encode().hex(), base64.b64encode(SECRET.encode()).decode())


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RUDA_SECRET", "RUDA_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.secret"
    path.write_text(f"{SECRET}\n")
    return path


async def work(comm: AsyncCommunicator) -> float:
    return float((await comm.all_reduce_sum(np.ones(2)))[0])


def assert_hidden(*texts: str) -> None:
    for text in texts:
        for shape in SHAPES:
            assert shape not in text


# ---------------------------------------------------------------------- ways to give it


@pytest.mark.parametrize("how", ["keyword", "bytes", "RUDA_SECRET", "RUDA_SECRET_FILE", "secret_file", "URL"])
async def test_ranks_with_one_secret_meet_and_one_without_does_not(
    how: str, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = fresh_url("tcp"), {}
    match how:
        case "keyword":
            options = {"secret": SECRET}
        case "bytes":
            options = {"secret": SECRET.encode()}
        case "RUDA_SECRET":
            monkeypatch.setenv(how, SECRET)
        case "RUDA_SECRET_FILE":
            monkeypatch.setenv(how, str(secret_file))
        case "secret_file":
            options = {"secret_file": secret_file}
        case "URL":
            url += f"?secret_file={secret_file}"
    # The last rank has another one by keyword, which wins over all else: so the secret is in use.
    assert await run_each([options] * 3, work, url) == [3, 3, 3]
    results = await run_each([options, {"secret": "another"}], work, url, timeout=0.5)
    assert [type(result) for result in results] == [CollectiveTimeoutError, AuthenticationError]


async def test_ranks_may_be_given_it_in_different_ways(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUDA_SECRET", SECRET)
    options = [{"secret": SECRET}, {}, {"secret_file": secret_file}, {"secret": SECRET.encode()}]
    assert await run_each(options, work, fresh_url("tcp")) == [4] * 4


# ---------------------------------------------------------------------- ranks that differ


@pytest.mark.parametrize(
    ("secrets", "here"),
    [
        ((SECRET, SECRET, "wrong"), False),
        ((SECRET, SECRET, None), True),
        ((SECRET, SECRET, SECRET + "\n"), False),
        ((SECRET, SECRET, SECRET[:-1]), False),
    ],
    ids=["wrong", "absent", "with a line end", "cut short"],
)
async def test_a_rank_that_differs_is_told_at_once_and_named_to_the_others(
    secrets: Sequence[str | None], here: bool
) -> None:
    url, ended = fresh_url("tcp"), {}

    async def rank_main(rank: int) -> None:
        try:
            async with ruda_async.connect(url, rank=rank, world_size=3, timeout=1, secret=secrets[rank]):
                pass
        finally:
            ended[rank] = time.monotonic()

    results: list[Any] = await asyncio.gather(*map(rank_main, range(3)), return_exceptions=True)
    *late, refused = results
    assert type(refused) is AuthenticationError
    assert "RUDA_SECRET (or secret_file=) is the same on all ranks" in str(refused)
    assert ("it is not set on this one" in str(refused)) == here
    for error in late:
        assert type(error) is CollectiveTimeoutError
        assert error.missing == (2,)
        assert "did not prove this job's secret" in str(error)
    assert ended[2] < min(ended[0], ended[1]) - 0.5
    assert_hidden(*map(str, results), *map(repr, results))


@pytest.mark.parametrize("secret", [None, "wrong"])
async def test_a_rank_0_that_differs_is_refused_by_all(secret: str | None) -> None:
    options = [{"secret": secret}, {"secret": SECRET}, {"secret": SECRET}]
    late, *refused = await run_each(options, work, fresh_url("tcp"), timeout=0.5)
    assert [type(error) for error in refused] == [AuthenticationError] * 2
    assert type(late) is CollectiveTimeoutError
    assert late.missing == (1, 2)
    # Which end lacks it is said where it is known.
    assert ("it is not set on this one" in str(late)) == (secret is None)
    assert_hidden(str(late), *map(str, refused))


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_network_address_needs_a_secret(rank: int) -> None:
    with pytest.raises(ConfigError, match="RUDA_SECRET"):
        await ruda_async.connect(
            f"tcp://0.0.0.0:{free_port()}/open", rank=rank, world_size=2, timeout=5, bind="127.0.0.1"
        )


async def test_a_network_address_works_with_a_secret() -> None:
    url = f"tcp://0.0.0.0:{free_port()}/open"
    assert await run_each([{"secret": SECRET}] * 2, work, url) == [2, 2]


# ---------------------------------------------------------------------- never shown


async def test_the_secret_is_in_no_description(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUDA_SECRET", SECRET)
    url = f"tcp://127.0.0.1:{free_port()}/hidden"
    for options in ({}, {"secret": SECRET}, {"secret_file": secret_file}, {"secret": SECRET.encode()}):
        config = resolve(url, rank=0, world_size=2, **options)
        assert config.secret.reveal() == SECRET.encode()
        assert_hidden(repr(config), str(config), f"{config}", config.redacted_url, repr(config.parameters))
        assert "Secret(set)" in repr(config)

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        for each in (comm, comm.channel("side")):
            assert_hidden(repr(each), str(each.describe()), str(each.stats()))
        assert_hidden(comm.explain("all_reduce", 1000))

    assert await run_each([{}] * 2, body, url) == [None, None]


async def test_the_secret_is_in_no_log_and_no_error(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = asyncio.get_running_loop()
    # In debug mode asyncio logs every callback that it calls slow, with its arguments' reprs.
    loop.set_debug(True)
    loop.slow_callback_duration = 0
    errors: list[BaseException] = []

    async def body(comm: AsyncCommunicator) -> None:
        await work(comm)
        if comm.rank == 1:
            comm.abort("the test is over")
        try:
            await comm.recv(1 - comm.rank)
        except ruda_async.RudaError as error:
            errors.append(error)

    with caplog.at_level(logging.DEBUG):
        await run_each([{"secret": SECRET}] * 2, body, fresh_url("tcp"))
        for other in (SECRET[::-1], None):
            url = fresh_url("tcp")
            errors += await run_each([{"secret": SECRET}, {"secret": other}], work, url, timeout=0.3)
        refused = (  # a secret where it does not belong
            f"tcp://127.0.0.1:5/x?secret={SECRET}",
            f"tcp://user:{SECRET}@127.0.0.1:5/x",
            f"tcp://127.0.0.1:5/x?Secret={SECRET}&rank=zero",
        )
        for url in refused:
            with pytest.raises(ConfigError) as caught:
                await ruda_async.connect(url, rank=0, world_size=2)
            errors.append(caught.value)
        with pytest.raises(ConfigError) as caught:
            await ruda_async.connect(fresh_url("tcp"), rank=0, world_size=2, secret=[SECRET])
        errors.append(caught.value)
    assert len(errors) == 2 + 4 + 3 + 1
    assert_hidden(*map(str, errors), *map(repr, errors))
    chain = [link for error in errors for link in (error.__cause__, error.__context__) if link is not None]
    assert_hidden(*map(str, chain))
    assert any(record.name == "asyncio" for record in caplog.records)  # debug mode did log
    assert_hidden(caplog.text, *capfd.readouterr())
    assert_hidden(*(repr(record.__dict__) for record in caplog.records))
