"""``ruda-async tune``, on real transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_plugins import FakePlugin
from support import SCHEMES

from ruda_async import ConfigError
from ruda_async.cli import main
from ruda_async.transport import registry
from ruda_async.transport.registry import register_plugin, unregister_plugin
from ruda_async.tuning import measure as measuring
from ruda_async.tuning import read_tuning
from ruda_async.tuning.measure import measure
from ruda_async.tuning.numbers import Numbers


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_transport_is_measured(scheme: str) -> None:
    numbers = measure(f"{scheme}://?early_bytes=1m", rounds=20)
    assert 1e-7 < numbers.latency < 1
    assert 0 <= numbers.overhead < 1
    assert 1e5 < numbers.bandwidth < 1e12
    assert 1e6 < numbers.reduction < 1e13


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="names no transport"):
        measure("lab")
    with pytest.raises(ConfigError, match="unknown scheme 'nope'"):
        measure("nope://")


@pytest.mark.timeout(120)
def test_the_command_writes_and_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["tune", "--url", "memory://", "--rounds", "20"]) == 0
    said = capfd.readouterr().out.splitlines()
    (path,) = tmp_path.glob("ruda-async/tuning-*.json")
    assert said[-1] == f"written to {path}"
    assert said[0].startswith("memory: latency ")
    assert main(["tune", "--show"]) == 0
    assert capfd.readouterr().out.splitlines() == said[:1]
    assert list(read_tuning(path)) == ["memory"]
    assert main(["tune", "--show", "--output", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capfd.readouterr().err
    assert main(["tune", "--url", "nope://"]) == 2


class TestOfAllThatWorkHere:
    """``tune`` without ``--url``, where some transports cannot be measured of themselves."""

    @pytest.fixture(autouse=True)
    def transports(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(registry, "_entry_points", dict)
        lacking = FakePlugin("lacking")
        lacking.needs = "certificates"  # type: ignore[attr-defined]
        fakes = [FakePlugin("placed", rank_per="engine"), lacking, FakePlugin("works")]
        for plugin in fakes:
            register_plugin(plugin)
        yield
        for plugin in fakes:
            unregister_plugin(plugin.scheme)

    def test_those_that_want_more_are_left_out_and_that_is_no_failure(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measuring, "measure", lambda *_: Numbers(1e-6, 1e-6, 1e9, 1e9))
        path = tmp_path / "missing" / "file.json"
        assert main(["tune", "--output", str(path)]) == 0
        assert list(read_tuning(path)) == ["works"]
        said, told = capsys.readouterr()
        assert said.splitlines()[-1] == f"written to {path}"
        assert "placed:// is not measured: another engine starts its ranks" in told
        assert "lacking:// is not measured: it needs certificates; give them by --url 'lacking://?" in told

    def test_one_that_fails_is_a_failure(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["tune", "--output", str(tmp_path / "file.json")]) == 1
        assert "works:// was not measured: " in capfd.readouterr().err
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("place", ["file/tuning.json", "."])
    def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("measured for nothing"))
        (tmp_path / "file").touch()
        assert main(["tune", "--output", str(tmp_path / place)]) == 2
        assert "cannot be written" in capsys.readouterr().err
