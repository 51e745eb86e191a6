"""``ruda-async tune``, on real transports."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import SCHEMES

from ruda_async import ConfigError
from ruda_async.cli import main
from ruda_async.tuning import read_tuning
from ruda_async.tuning.measure import measure


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
