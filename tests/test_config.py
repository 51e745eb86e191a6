"""URLs, keyword arguments and the environment, and every mistake that can be made in them."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import DelayParameters, FakePlugin, FakeWrapper, Nothing, Parameters
from hypothesis import given
from hypothesis import strategies as st

import ruda_async
from ruda_async import config
from ruda_async.config import CommonParameters, Config, resolve
from ruda_async.errors import ConfigError, TransportUnavailableError
from ruda_async.transport.job import Secret
from ruda_async.transport.parameters import describe_parameters
from ruda_async.transport.registry import register_plugin, unregister_plugin
from ruda_async.url import redact, split_url

URL = "net://10.0.0.5:29500"


@pytest.fixture(autouse=True, scope="module")
def fakes() -> Iterator[None]:
    """``net`` (with ports, and preferred), ``lab`` (without) and ``slow`` (a wrapper)."""
    known = [
        FakePlugin("net", preference=10_000),
        FakePlugin("lab", rank_per="task", example="lab://example", parameters=Nothing),
        FakeWrapper("slow"),
    ]
    for plugin in known:
        register_plugin(plugin)
    yield
    for plugin in known:
        unregister_plugin(plugin.scheme)


def of(url: str | None = URL, environ: dict[str, str] | None = None, **options: Any) -> Config:
    """`resolve` for rank 1 of 4 where nothing else is said, in an empty environment."""
    return resolve(url, environ=environ or {}, **{"rank": 1, "world_size": 4, **options})


# ---------------------------------------------------------------------- what is understood


def test_everything_in_the_url() -> None:
    found = resolve(
        "net://10.0.0.5:29500/train?rank=3&world_size=8&timeout=90&order=any&algorithm=ring&budget=64k",
        environ={},
    )
    assert (found.scheme, found.plugin.scheme) == ("net", "net")
    assert (found.host, found.port, found.name) == ("10.0.0.5", 29500, "train")
    assert (found.rank, found.world_size, found.timeout) == (3, 8, 90.0)
    assert (found.settings.order, found.settings.algorithm) == ("any", "ring")
    assert found.parameters == Parameters(budget=65536)
    assert not found.secret
    assert found.ports == ()
    assert found.listen_fd is None


@pytest.mark.parametrize(
    ("url", "host", "port", "name"),
    [
        ("lab://team", "team", None, "team"),
        ("lab://", None, None, "default"),
        ("lab:///x", None, None, "x"),
        ("lab://team/run 7", "team", None, "team/run 7"),
        ("net://h:1", "h", 1, "default"),
        ("net://h:1/", "h", 1, "default"),
        ("net://[::1]:29500/a%20b", "::1", 29500, "a b"),
        ("net://[fe80::1]:5?retries=1", "fe80::1", 5, "default"),
        ("NET://h:65535", "h", 65535, "default"),
        ("net://:7", None, 7, "default"),
        ("slow+net://h:1/j?delay_ms=5&retries=2", "h", 1, "j"),
    ],
)
def test_place_and_name(url: str, host: str | None, port: int | None, name: str) -> None:
    found = of(url)
    assert (found.host, found.port, found.name) == (host, port, name)


def test_wrapped_parameters_reach_both_layers() -> None:
    found = of("slow+net://h:1?delay_ms=5&retries=2", heartbeat=1)
    assert (found.parameters.delay_ms, found.parameters.retries, found.parameters.heartbeat) == (5, 2, 1.0)
    assert isinstance(found.plugin, FakePlugin)
    assert DelayParameters().delay_ms == 0


def test_defaults() -> None:
    found = of()
    assert found.timeout == 300
    assert (found.settings.order, found.settings.algorithm, found.settings.max_bytes) == ("exact", None, None)
    assert found.parameters == Parameters()


def test_keywords_win_over_the_url_and_the_url_over_the_environment() -> None:
    environ = {"RUDA_RANK": "0", "RUDA_WORLD_SIZE": "2", "RUDA_TIMEOUT": "10"}
    assert (resolve(URL, environ=environ).rank, resolve(URL, environ=environ).timeout) == (0, 10.0)
    found = resolve(f"{URL}?world_size=4&timeout=20", environ=environ)
    assert (found.rank, found.world_size, found.timeout) == (0, 4, 20.0)
    found = resolve(
        f"{URL}?world_size=4&timeout=20&retries=1", timeout=30, rank=2, retries=5, environ=environ
    )
    assert (found.rank, found.world_size, found.timeout, found.parameters.retries) == (2, 4, 30.0, 5)


def test_other_keywords_are_the_transports() -> None:
    assert of(heartbeat=2).parameters.heartbeat == 2.0


def test_common_parameters_are_described_like_a_plugins() -> None:
    rows = {row.name: row for row in describe_parameters(CommonParameters)}
    assert set(rows) == {
        *("rank", "world_size", "timeout", "algorithm", "order", "secret_file", "join", "trace_dir", "tuning")
    }
    assert rows["timeout"].default == "300"


# ---------------------------------------------------------------------- the environment


def test_url_from_the_environment() -> None:
    environ = {"RUDA_URL": "net://h:5/j?retries=1", "RUDA_RANK": "1", "RUDA_WORLD_SIZE": "2"}
    for url in (None, "env://"):
        found = resolve(url, environ=environ)
        assert (found.host, found.port, found.name, found.rank) == ("h", 5, "j", 1)
    found = resolve("env:///other?retries=2&heartbeat=1", environ=environ)
    assert (found.name, found.parameters.retries, found.parameters.heartbeat) == ("other", 2, 1.0)
    # RUDA_URL=env:// is what is meant by no URL at all.
    with pytest.raises(ConfigError, match="not where the ranks meet"):
        resolve(environ=environ | {"RUDA_URL": "env://"})


def test_url_from_the_environment_with_ranks_from_a_launcher() -> None:
    found = resolve(environ={"RUDA_URL": "net://h:5", "PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (found.rank, found.world_size) == (1, 2)


def test_an_explicit_url_does_not_look_at_launchers() -> None:
    with pytest.raises(ConfigError, match="needs rank and world_size"):
        resolve(URL, environ={"RANK": "0", "WORLD_SIZE": "2"})


def test_launcher() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    found = resolve(environ=environ)
    assert (found.scheme, found.host, found.port) == ("net", "h", None)
    assert found.ports == (29501, 29502, 29503, 29504)
    assert found.name == "torchrun-default-0"
    assert resolve("env:///mine?timeout=5", environ=environ).name == "mine"
    assert resolve("env:///mine?timeout=5", environ=environ).timeout == 5
    assert resolve("env://", rank=0, environ=environ).rank == 0


def test_the_listening_socket_is_for_rank_0_of_the_launchers_own_url() -> None:
    environ = {"RUDA_URL": "net://h:5", "RUDA_RANK": "0", "RUDA_WORLD_SIZE": "2", "RUDA_LISTEN_FD": "7"}
    assert resolve(environ=environ).listen_fd == 7
    assert resolve(environ=environ | {"RUDA_RANK": "1"}).listen_fd is None
    assert resolve(environ=environ | {"RUDA_LISTEN_FD": ""}).listen_fd is None
    assert resolve("net://h:6", environ=environ).listen_fd is None
    with pytest.raises(ConfigError, match="RUDA_LISTEN_FD='x' is not a file descriptor"):
        resolve(environ=environ | {"RUDA_LISTEN_FD": "x"})


def test_an_overlay_stands_before_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUDA_RANK", "0")
    monkeypatch.setenv("RUDA_WORLD_SIZE", "9")
    with config.environment({"RUDA_RANK": "3"}):
        found = resolve(URL)
        assert (found.rank, found.world_size) == (3, 9)
    assert resolve(URL).rank == 0


# ---------------------------------------------------------------------- the secret


def test_secret_precedence(tmp_path: Path) -> None:
    (file := tmp_path / "a").write_bytes(b"from file\n")
    (other := tmp_path / "b").write_bytes(b"from other file\r\n")
    environ = {"RUDA_SECRET_FILE": str(other)}
    assert of(environ=environ).secret.reveal() == b"from other file"
    environ["RUDA_SECRET"] = "from variable"
    assert of(environ=environ).secret.reveal() == b"from variable"
    assert of(f"{URL}?secret_file={file}", environ=environ).secret.reveal() == b"from file"
    assert of(environ=environ, secret_file=file).secret.reveal() == b"from file"
    assert of(environ=environ, secret_file=file, secret="wörd").secret.reveal() == "wörd".encode()
    assert of(secret=b"\x00\xff").secret.reveal() == b"\x00\xff"
    assert of(secret=Secret(b"x")).secret.reveal() == b"x"


def test_the_secret_never_prints() -> None:
    found = of(secret="hush-hush")
    for text in (repr(found), str(found), found.redacted_url, f"{found.secret}"):
        assert "hush" not in text
    assert "Secret(set)" in repr(found)


def test_redacted_url() -> None:
    found = of("net://[::1]:5/a b?retries=1&order=any", timeout=7)
    assert found.redacted_url == "net://[::1]:5/a%20b?rank=1&world_size=4&timeout=7&order=any&retries=1"
    assert of("lab://team").redacted_url == "lab://team?rank=1&world_size=4&timeout=300"
    again = resolve(found.redacted_url, environ={})
    assert again.redacted_url == found.redacted_url


# ---------------------------------------------------------------------- mistakes

MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [
    # the scheme
    ("10.0.0.5:29500", {}, ["'10.0.0.5:29500' names no transport", "did you mean net://10.0.0.5:29500?", "lab://"]),
    ("[::1]:29500", {}, ["did you mean net://[::1]:29500?"]),
    ("net:10.0.0.5:29500", {}, ["did you mean net://10.0.0.5:29500?"]),
    ("team", {}, ["'team' names no transport", "env://", "lab://", "net://"]),
    ("", {}, ["'' names no transport"]),
    ("://h:1", {}, ["names no transport"]),
    ("nett://h:1", {}, ["unknown scheme 'nett'", "did you mean 'net'?", "lab"]),
    ("slow+nett://h:1", {}, ["unknown scheme 'nett'"]),
    ("slow://h:1", {}, ["slow+"]),
    ("torch+glo://h:1", {}, ["unknown scheme 'torch+glo'", "did you mean 'torch+gloo'?"]),
    # host and port
    ("net://h:99999", {}, ["port 99999", "1 to 65535"]),
    ("net://h:" + "9" * 5000, {}, ["out of range"]),
    ("net://h:http", {}, ["'http'", "no number", "1 to 65535"]),
    ("net://h:", {}, ["port ''", "no number"]),
    ("net://h:-1", {}, ["'-1'", "no number"]),
    ("net://h", {}, ["no port", "net://h:29500", "ruda-async run"]),
    ("net://h:0", {}, ["port 0", "net://h:29500", "ruda-async run"]),
    ("net://::1:5", {}, ["several colons", "[::1]:29500"]),
    ("net://[::1:5", {}, ["brackets", "[::1]:29500"]),
    ("lab://team:5", {}, ["lab://team:5", "has a port", "write lab://team"]),
    ("env://h:5", {}, ["env:// takes no host", "env:///h"]),
    # what does not belong in a URL
    ("net://user:s3cret@h:1", {}, ["***@h:1", "user or password", "RUDA_SECRET"]),
    ("net://user:s3/cr?et@h:1", {}, ["***@h:1", "user or password"]),
    ("net://h:1?secret=s3cret", {}, ["a secret in a URL", "RUDA_SECRET", "secret_file="]),
    ("net://h:1?Password=s3cret", {}, ["a password in a URL"]),
    ("net://h:x?secret=s3cret", {}, ["secret=***"]),
    ("net://h:1/a\nb", {}, ["control characters"]),
    ("net://h:1/a%0Ab", {}, ["job name 'a%0Ab'", "control characters"]),
    ("net://h:1?bind=%00", {}, ["bind '%00'", "control characters"]),
    ("net://h:1/%FF", {}, ["job name '%FF'", "UTF-8"]),
    ("net://h:1/j#part", {}, ["'#'", "%23"]),
    # parameters
    ("net://h:1?heartbeet=2", {}, ["no parameter 'heartbeet'", "mean 'heartbeat'?", "budget", "timeout"]),
    ("net://h:1?timeot=2", {}, ["no parameter 'timeot'", "did you mean 'timeout'?"]),
    ("lab://x?heartbeat=2", {}, ["lab:// has no parameter 'heartbeat'", "rank"]),
    ("net://h:1?retries=1&retries=2", {}, ["'retries' twice", "keep one"]),
    ("net://h:1?retries", {}, ["'retries' without a value", "retries=value"]),
    ("net://h:1?retries=many", {}, ["retries='many'", "whole number"]),
    ("net://h:1", {"heartbeet": 2}, ["did you mean 'heartbeat'?"]),
    ("net://h:1", {"retries": "many"}, ["retries='many'", "whole number"]),
    ("net://h:1?order=anny", {}, ["order='anny'", "did you mean 'any'?", "exact, any"]),
    # rank, world size, timeout
    ("net://h:1?rank=x", {"rank": None}, ["rank='x'", "whole number"]),
    ("net://h:1", {"rank": -1}, ["rank=-1", "from 0"]),
    ("net://h:1", {"rank": 4}, ["rank=4", "world_size=4", "from 0 to 3"]),
    ("net://h:1", {"rank": True}, ["rank=True", "whole number"]),
    ("net://h:1", {"world_size": 0}, ["world_size=0", "from 1"]),
    ("net://h:1", {"rank": None}, ["needs rank:", "connect(rank=…)", "?rank=0", "RUDA_RANK"]),
    ("net://h:1", {"world_size": None}, ["connect(world_size=…)", "?world_size=2", "RUDA_WORLD_SIZE"]),
    ("net://h:1", {"rank": None, "world_size": None}, ["needs rank and world_size", "rank=0&world_size=2"]),
    ("net://h:1?timeout=0", {}, ["timeout='0'", "out of range", "s"]),
    ("net://h:1", {"timeout": -5}, ["timeout=-5", "out of range"]),
    ("net://h:1", {"timeout": float("nan")}, ["timeout=nan", "number of seconds"]),
    ("net://h:1?timeout=long", {}, ["timeout='long'", "number of seconds"]),
    ("net://h:1", {"world_size": 99999999999}, ["world_size=99999999999", "from 1 to 65536"]),
    ("net://h:1?budget=99999999999999999999", {}, ["budget='99999999999999999999'", "below 2**63"]),
    ("net://h:1", {"trace_dir": "/dev/null/x"}, ["trace_dir='/dev/null/x'", "name a folder"]),
    # the environment
    (URL, {"rank": None, "environ": {"RUDA_RANK": "one"}}, ["RUDA_RANK='one'", "whole number"]),
    (URL, {"environ": {"RUDA_TIMEOUT": "soon"}}, ["RUDA_TIMEOUT='soon'", "number of seconds"]),
    # the secret
    (URL, {"secret": 5}, ["secret= is text or bytes", "int"]),
    (URL, {"secret_file": "/nowhere/at/all"}, ["'/nowhere/at/all'", "No such file", "check the path"]),
    (URL, {"environ": {"RUDA_SECRET_FILE": "/nowhere"}}, ["RUDA_SECRET_FILE='/nowhere'", "No such file"]),
    (URL, {"secret_file": "/dev/null"}, ["secret_file='/dev/null'", "empty"]),
    (URL, {"secret_file": "/dev/zero"}, ["secret_file='/dev/zero'", "larger than"]),
]  # fmt: skip


@pytest.mark.parametrize(("url", "options", "parts"), MISTAKES, ids=[f"{m[0][:40]} {m[1]}" for m in MISTAKES])
def test_mistakes_name_the_value_and_the_remedy(url: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        of(url, **options)
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in text
    assert len(text) < 600
    assert "s3" not in text
    for part in parts:
        assert part in text


def test_a_url_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match=r"a URL is text such as .*, not int"):
        of(5)  # type: ignore[arg-type]


def test_no_url_and_no_launcher() -> None:
    with pytest.raises(ConfigError, match=r"env:// found no launcher: .*ruda-async run"):
        resolve(environ={})


def test_no_transport_for_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ruda_async.transport.registry.plugins", dict)
    with pytest.raises(TransportUnavailableError, match="none is installed"):
        resolve(environ={"PMI_RANK": "0", "PMI_SIZE": "1"})


def test_one_rank_needs_no_port() -> None:
    assert of("net://h", rank=0, world_size=1).port is None


# ---------------------------------------------------------------------- any text at all

hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,10}[a-z0-9])?", fullmatch=True)
job_names = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/"), min_size=1, max_size=10
)


@given(hosts, st.integers(1, 65535), job_names, st.text(string.printable[:95], max_size=10))
def test_what_is_quoted_comes_back(host: str, port: int, name: str, bind: str) -> None:
    from urllib.parse import quote

    parts = split_url(f"net://{host}:{port}/{quote(name)}?bind={quote(bind, safe='')}")
    assert (parts.host, parts.port, parts.path, parts.query) == (host, port, name, {"bind": bind})


@given(st.text(max_size=40))
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    for url in (text, f"net://{text}", f"net://h:1?{text}"):
        message = ""
        try:
            of(url)
        except ConfigError as error:
            message = str(error)
        assert "\n" not in message


@given(st.text(string.ascii_letters + string.digits + ":/?#&=%", min_size=4, max_size=20))
def test_a_password_is_never_shown(password: str) -> None:
    marked = f"hush{password}hush"
    assert marked not in redact(f"net://user:{marked}@h:1")
    with pytest.raises(ConfigError) as caught:
        of(f"net://user:{marked}@h:1")
    assert "hush" not in str(caught.value)


# ---------------------------------------------------------------------- what connect() returns


def test_a_forgotten_await_is_said() -> None:
    comm: Any = ruda_async.connect("memory://forgotten", rank=0, world_size=1)
    with pytest.raises(
        AttributeError, match=r"not awaited, so there is no 'barrier' yet: write `comm = await"
    ):
        comm.barrier()
    with (
        pytest.raises(TypeError, match=r"takes `async with`; for a plain `with` there is ruda_async\.sync"),
        comm,
    ):
        pass


async def test_a_plugin_that_returns_no_transport_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(self: FakePlugin, job: Any) -> None: ...

    monkeypatch.setattr(FakePlugin, "connect", connect)
    with pytest.raises(
        TypeError, match=r"connect\(\) of the plugin 'lab' returned NoneType.*no capabilities"
    ):
        await ruda_async.connect("lab://empty", rank=0, world_size=1)
