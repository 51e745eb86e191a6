"""Files of measured costs: whose they are, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ruda_async import ConfigError
from ruda_async.collectives.costs import case_of
from ruda_async.errors import ProtocolError
from ruda_async.transport.base import Capabilities
from ruda_async.tuning import (
    Numbers,
    default_path,
    find_numbers,
    fingerprint,
    machine,
    numbers_of,
    read_tuning,
    with_numbers,
    write_tuning,
)
from ruda_async.tuning.store import check_place

NUMBERS = Numbers(1e-5, 2e-6, 3e9, 4e9)
OTHER = Numbers(5e-5, 0.0, 6e8, 7e9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "tuning.json"


def test_what_is_written_is_read(path: Path) -> None:
    write_tuning(path, {"net": NUMBERS})
    assert read_tuning(path) == {"net": NUMBERS}
    write_tuning(path, {"ring": OTHER})  # keeps what was measured before
    assert read_tuning(path) == {"net": NUMBERS, "ring": OTHER}
    write_tuning(path, {"net": OTHER})
    assert read_tuning(path) == {"net": OTHER, "ring": OTHER}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_is_no_plain_file_stays_what_it_is(tmp_path: Path) -> None:
    """Run as root, ``tune --output /dev/stdout`` would else put a file in the device's place."""
    link, place = tmp_path / "link.json", tmp_path / "place.json"
    link.symlink_to(place)
    write_tuning(link, {"net": NUMBERS})
    assert link.is_symlink()
    assert read_tuning(place) == {"net": NUMBERS}

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_place(pipe)
        write_tuning(pipe, {"net": NUMBERS})
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert "net" in json.loads(os.read(reader, 1 << 16))["transports"]
    finally:
        os.close(reader)


def test_a_named_file_has_to_serve(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*ruda-async tune --output"):
        find_numbers(str(path), "net")
    write_tuning(path, {"net": NUMBERS})
    assert find_numbers(str(path), "net") == NUMBERS
    with pytest.raises(ConfigError, match=r"nothing about ring:// \(it has net\).*tune --url ring://"):
        find_numbers(str(path), "ring")
    assert find_numbers("off", "net") is None


def test_another_machine_is_refused_by_what_differs(path: Path) -> None:
    write_tuning(path, {"net": NUMBERS})
    content = json.loads(path.read_text())
    content["machine"] |= {"cores": 4096, "processor": "abacus"}
    path.write_text(json.dumps(content))
    text = r"measured on another machine \(processor 'abacus', here .*, cores 4096, here \d+\); run `"
    with pytest.raises(ConfigError, match=text):
        find_numbers(str(path), "net")


def test_this_machines_own_file_is_found_and_a_broken_one_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = default_path(environ)
    assert path == tmp_path / "ruda-async" / f"tuning-{fingerprint(machine())}.json"
    assert default_path({"HOME": str(tmp_path)}).parent == tmp_path / ".cache" / "ruda-async"
    assert default_path({"XDG_CACHE_HOME": "relative", "HOME": "/h"}).parts[:3] == ("/", "h", ".cache")
    assert find_numbers(None, "net", environ) is None
    write_tuning(path, {"net": NUMBERS})
    assert find_numbers(None, "net", environ) == NUMBERS
    assert find_numbers(None, "ring", environ) is None
    path.write_text("{")
    with caplog.at_level(logging.WARNING, "ruda_async"):
        assert find_numbers(None, "net", environ) is None
    assert "is malformed" in caplog.text


def test_the_fingerprint_depends_on_every_fact() -> None:
    ours = machine()
    changed = [fingerprint(ours | {key: "other"}) for key in ours]
    assert len({fingerprint(ours), *changed}) == len(ours) + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ruda_async_tuning": 2}, "its format is 2, not 1"),
        ({"transports": {"net": {"latency": 1e-5}}}, "missing 3 required"),
        ({"transports": {"net": NUMBERS._asdict() | {"latency": 0}}}, "latency=0.0 is no cost"),
        ({"transports": {"net": NUMBERS._asdict() | {"bandwidth": -1}}}, "bandwidth=-1.0 is no cost"),
        (
            {"transports": {"net": NUMBERS._asdict() | {"reduction": float("inf")}}},
            "reduction=inf is no cost",
        ),
        ({"transports": {"net": NUMBERS._asdict() | {"latency": "fast"}}}, "could not convert"),
        ({"transports": {"net": NUMBERS._asdict() | {"speed": 1}}}, "unexpected keyword"),
        ({"transports": 3}, "AttributeError"),
        (None, "TypeError"),
    ],
)
def test_malformed_files(path: Path, change: Any, text: str) -> None:
    write_tuning(path, {"net": NUMBERS})
    content = None if change is None else json.loads(path.read_text()) | change
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"tuning.json' is malformed.*{text}.*ruda-async tune"):
        read_tuning(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*--output"):
        write_tuning(tmp_path / "file" / "tuning.json", {"net": NUMBERS})


def test_numbers_replace_what_a_transport_declares() -> None:
    declared = Capabilities(latency=1e-5, bandwidth=1e9, max_message=77)
    assert numbers_of(declared) == Numbers(1e-5, 0.4 * 1e-5, 1e9, 8e9)
    agreed = with_numbers(declared, OTHER, 4096)
    assert numbers_of(agreed) == OTHER
    assert (agreed.segment_bytes, agreed.max_message) == (4096, 77)
    case = case_of(10, 4, agreed, True, True)
    plain = case_of(10, 4, with_numbers(declared, OTHER._replace(latency=1e-5), 4096), True, True)
    assert case.alpha - plain.alpha == pytest.approx(4e-5)
    assert (case.overhead, case.beta, case.gamma) == (plain.overhead, 1 / 6e8, 1 / 7e9)
    assert (case.nbytes, case.wide) == (10, 20)


@pytest.mark.parametrize(
    ("numbers", "segment"),
    [
        (NUMBERS, 0),
        (NUMBERS, 1 << 62),
        (OTHER._replace(bandwidth=float("nan")), 1),
        (OTHER._replace(latency=0.0), 1),
    ],
)
def test_costs_from_the_network_are_checked(numbers: Numbers, segment: int) -> None:
    with pytest.raises(ProtocolError, match="rank 0 sent costs that are none"):
        with_numbers(Capabilities(), numbers, segment)
