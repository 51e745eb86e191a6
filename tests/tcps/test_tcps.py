"""``tcps://``: every promise over TLS, and every way in which ranks may not trust each other."""

from __future__ import annotations

import asyncio
import datetime
import re
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure_support import rank_processes
from mesh_support import run_each
from support import free_port, fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    AuthenticationError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProtocolError,
)
from ruda_async.config import resolve
from ruda_async.transport.conformance import SCENARIOS, run_scenario, run_scenarios

trustme = pytest.importorskip("trustme", reason="pip install trustme")

NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass
class Certificates:
    """Paths of a good certificate and of bad ones."""

    folder: Path
    ca: Path
    good: Path
    #: Signed by another authority, which `other_ca` is.
    foreign: Path
    other_ca: Path
    expired: Path
    #: For a host that no rank is on.
    elsewhere: Path

    def options(self, cert: Path | None = None, ca: Path | None = None, **more: Any) -> dict[str, Any]:
        return {"cert": cert or self.good, "ca": ca or self.ca, **more}


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ours, other = trustme.CA(), trustme.CA()

    def issue(name: str, ca: Any, *names: str, **more: Any) -> Path:
        path = folder / f"{name}.pem"
        ca.issue_cert(*names, **more).private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    for name, ca in (("ca", ours), ("other-ca", other)):
        ca.cert_pem.write_to_path(str(folder / f"{name}.pem"))
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    return Certificates(
        folder,
        ca=folder / "ca.pem",
        other_ca=folder / "other-ca.pem",
        good=issue("good", ours, *NAMES),
        foreign=issue("foreign", other, *NAMES),
        expired=issue("expired", ours, *NAMES, not_before=past, not_after=past + datetime.timedelta(1)),
        elsewhere=issue("elsewhere", ours, "elsewhere.example"),
    )


def tls_url(certs: Certificates | None = None, query: str = "") -> str:
    url = fresh_url("tcp").replace("tcp://", "tcps://")
    if certs is not None:
        query = f"cert={certs.good}&ca={certs.ca}" + (f"&{query}" if query else "")
    return f"{url}?{query}" if query else url


async def add_up(comm: AsyncCommunicator) -> float:
    await comm.barrier()
    for size in (1, 70_000, 1_000_000):
        total = await comm.all_reduce_sum(np.arange(size) + float(comm.rank))
        ranks = comm.world_size
        assert (total == np.arange(size) * ranks + ranks * (ranks - 1) / 2).all()
    return float((await comm.all_reduce_sum(np.ones(1)))[0])


# ---------------------------------------------------------------------- promises


@pytest.mark.parametrize("ranks", ["loop", "threads"])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_conformance(certs: Certificates, name: str, ranks: str) -> None:
    run_scenario(name, tls_url(certs), ranks=ranks)


def test_conformance_between_processes(certs: Certificates) -> None:
    names = ["sizes", "goodbye", "aborted_peer", "flood_of_early_messages"]
    run_scenarios(names, tls_url(certs), ranks="processes")


@pytest.mark.parametrize("name", ["sizes", "order_within_a_tag", "everyone_to_everyone"])
def test_conformance_under_faults(certs: Certificates, name: str) -> None:
    run_scenario(
        name, f"faults+{tls_url(certs, 'jitter_ms=3&reorder=true&duplicate=true&socket_bytes=65536')}"
    )


async def test_five_ranks_and_what_they_say_of_themselves(certs: Certificates) -> None:
    async def body(comm: AsyncCommunicator) -> float:
        facts = comm.describe()
        assert "TLSv1.3" in str(facts)
        assert comm._node.capabilities.secure
        assert "PRIVATE" not in str(facts)
        return await add_up(comm)

    assert await run_ranks(5, body, url=tls_url(certs), limit=50) == [5] * 5


async def test_the_bytes_on_the_wire_are_encrypted(
    certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither meeting nor links ever carry the job's name or a payload in the clear."""
    seen = bytearray()
    send = socket.socket.send

    def listening(self: socket.socket, data: Any, *rest: Any) -> int:
        seen.extend(data)
        return send(self, data, *rest)

    monkeypatch.setattr(socket.socket, "send", listening)

    async def body(comm: AsyncCommunicator) -> None:
        await comm.broadcast(np.frombuffer(b"a payload to be seen" * 100, np.uint8), 0)

    url = f"tcps://127.0.0.1:{free_port()}/a-name-to-be-seen?cert={certs.good}&ca={certs.ca}"
    await run_ranks(2, body, url=url)
    assert len(seen) > 2000
    assert b"to be seen" not in seen
    assert b"to-be-seen" not in seen


async def test_a_key_file_of_its_own(certs: Certificates, tmp_path: Path) -> None:
    text = certs.good.read_text()
    at = text.index("-----BEGIN CERTIFICATE")
    (tmp_path / "key.pem").write_text(text[:at])
    (tmp_path / "cert.pem").write_text(text[at:])
    options = certs.options(tmp_path / "cert.pem", key=tmp_path / "key.pem")
    assert await run_each([options] * 2, add_up, tls_url()) == [2, 2]


async def test_one_name_for_all_certificates(certs: Certificates) -> None:
    options = certs.options(certs.elsewhere, server_name="elsewhere.example")
    assert await run_each([options] * 3, add_up, tls_url()) == [3] * 3


def test_a_killed_rank_is_noticed(certs: Certificates) -> None:
    with rank_processes(tls_url(certs), 4) as ranks:
        ranks[1].kill()
        for number in (0, 2, 3):
            assert ranks[number].words()[:2] == ["lost", "1"]
            assert ranks[number].words()[:1] == ["shrunk"]


async def test_damaged_records_are_a_lost_peer(certs: Certificates) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            await comm.send(np.zeros(1), 1)
        else:
            await comm.recv(0)  # nothing else is under way now
            stream = comm._node.transport._links[0].stream  # type: ignore[attr-defined]
            stream._sock.send(b"\x17\x03\x03\x00\x20" + bytes(32))
        error = await outcome(comm.recv(1 - comm.rank))
        assert isinstance(error, PeerLostError)
        if comm.rank == 0:
            assert "TLS records are damaged" in str(error)

    await run_ranks(2, body, url=tls_url(certs))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cert": None, "ca": None}, r"rank 1: tcps:// needs cert= and ca="),
        ({"cert": None}, r"needs cert=:"),
        ({"cert": "/no/such.pem"}, r"cert='/no/such.pem' cannot be used: No such file"),
        ({"ca": "/no/such.pem"}, r"ca='/no/such.pem' cannot be used: No such file"),
        ({"key": "CA"}, r"key='.*ca.pem' cannot be used"),
        ({"ca": "TEXT"}, r"ca='.*text.pem' cannot be used"),
        ({"cert": "LOCKED"}, r"the key is encrypted; give one without a password"),
    ],
)
async def test_files_that_cannot_be_used_are_named(
    certs: Certificates, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    named: dict[str, Any] = {"CA": certs.ca, "TEXT": tmp_path / "text.pem", "LOCKED": tmp_path / "locked.pem"}
    if "LOCKED" in fields.values():
        serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
        pem = certs.good.read_bytes()
        key = serialization.load_pem_private_key(pem, None)
        locked = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"sesame"),
        )
        named["LOCKED"].write_bytes(locked + pem[pem.index(b"-----BEGIN CERTIFICATE") :])
    options = certs.options() | {name: named.get(value, value) for name, value in fields.items()}
    with pytest.raises(ConfigError, match=text) as caught:
        await ruda_async.connect(tls_url(), rank=1, world_size=2, timeout=5, **options)
    assert "PRIVATE" not in str(caught.value)


def test_texts_show_paths_and_nothing_of_the_files(certs: Certificates) -> None:
    config = resolve(tls_url(certs), rank=0, world_size=2)
    inside = certs.good.read_text().splitlines()[1][:30]
    for text in (repr(config), config.redacted_url, repr(config.parameters)):
        assert str(certs.good) in text
        assert inside not in text


# ---------------------------------------------------------------------- no trust


async def ends(options: list[dict[str, Any]], urls: list[str], timeout: float = 1.0) -> list[Any]:
    """How each rank's set-up ends: its error, and when; in rank order."""

    async def one(rank: int) -> Any:
        began = time.monotonic()
        known = {"rank": rank, "world_size": len(urls), "timeout": timeout} | options[rank]
        error = await outcome(ruda_async.connect(urls[rank], **known))
        assert isinstance(error, Exception), f"rank {rank} got in"
        return error, time.monotonic() - began

    return list(await asyncio.gather(*map(one, range(len(urls)))))


@pytest.mark.parametrize(
    ("culprit", "kind", "text"),
    [
        ("foreign", AuthenticationError, "does not accept this rank's certificate"),
        ("expired", AuthenticationError, "does not accept this rank's certificate"),
        ("other_ca", AuthenticationError, "unable to get local issuer|self.signed"),
    ],
)
async def test_a_rank_that_is_not_trusted_is_told_and_the_others_learn_why(
    certs: Certificates, culprit: str, kind: type[Exception], text: str
) -> None:
    path = getattr(certs, culprit)
    bad = certs.options(ca=path) if culprit == "other_ca" else certs.options(cert=path)
    url = tls_url()
    first, second, (error, when) = await ends([certs.options(), certs.options(), bad], [url] * 3)
    assert type(error) is kind
    assert re.search(text, str(error)), error
    for late, until in (first, second):
        assert type(late) is CollectiveTimeoutError
        assert late.missing == (2,)
        assert when < until
    assert "certificate" in str(first[0])  # rank 0 saw it


@pytest.mark.parametrize(
    ("culprit", "text"),
    [("foreign", "certificate of .* is not accepted here"), ("expired", "certificate has expired"),
     ("elsewhere", r"asked for '127.0.0.1'.*server_name=")],
)  # fmt: skip
async def test_a_rank_0_that_is_not_trusted(certs: Certificates, culprit: str, text: str) -> None:
    bad = certs.options(cert=getattr(certs, culprit))
    (late, _), *others = await ends([bad, certs.options(), certs.options()], [tls_url()] * 3)
    assert type(late) is CollectiveTimeoutError
    assert late.missing == (1, 2)
    assert "certificate" in str(late)
    for error, _ in others:
        with pytest.raises(AuthenticationError, match=text):
            raise error


async def test_no_certificate_at_all(certs: Certificates) -> None:
    """A client that speaks TLS and shows none."""
    url = tls_url()
    port = int(url.split(":")[2].split("/")[0])
    task = asyncio.ensure_future(
        outcome(ruda_async.connect(url, rank=0, world_size=2, timeout=1, **certs.options()))
    )
    context = ssl.create_default_context(cafile=certs.ca)
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
    writer.write(b"RUDA")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await reader.readexactly(1)
    writer.close()
    error = await task
    assert type(error) is CollectiveTimeoutError
    assert "has no certificate" in str(error)


async def test_a_plain_rank_at_a_tls_port(certs: Certificates) -> None:
    url = tls_url()
    plain = url.replace("tcps", "tcp")
    (late, _), (error, _) = await ends([certs.options(), {}], [url, plain])
    assert type(error) is ProtocolError
    assert "speaks TLS, and this rank does not" in str(error)
    assert type(late) is CollectiveTimeoutError
    assert "does not speak TLS" in str(late)


async def test_a_tls_rank_at_a_plain_port(certs: Certificates) -> None:
    url = tls_url()
    plain = url.replace("tcps", "tcp")
    (late, _), (error, _) = await ends([{}, certs.options()], [plain, url])
    assert type(error) is ProtocolError
    assert "does not speak TLS as this rank does" in str(error)
    assert type(late) is CollectiveTimeoutError
    assert "speaks TLS, and this rank does not" in str(late)


async def test_the_secret_is_asked_for_inside_tls_too(certs: Certificates) -> None:
    options = [certs.options(secret="one"), certs.options(secret="two")]
    (late, _), (error, _) = await ends(options, [tls_url()] * 2)
    assert type(error) is AuthenticationError
    assert "RUDA_SECRET" in str(error)
    assert type(late) is CollectiveTimeoutError


async def test_silent_strangers_at_a_tls_port_hold_nothing_up(certs: Certificates) -> None:
    url = tls_url()
    port = int(url.split(":")[2].split("/")[0])
    said = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x16\x03\x01\xff\xff",
    )
    rank_0 = asyncio.ensure_future(run_each([certs.options()] * 2, add_up, url, 20))
    socks = []
    while len(socks) < len(said):
        try:
            sock = socket.create_connection(("127.0.0.1", port), 0.5)
        except ConnectionRefusedError:
            if rank_0.done():
                break
            await asyncio.sleep(0)
            continue
        sock.send(said[len(socks)])
        socks.append(sock)
    assert await rank_0 == [2, 2]
    for sock in socks:
        sock.close()
