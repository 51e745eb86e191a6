"""Ranks that another engine has started and numbered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_plugins import FakePlugin, Nothing

from ruda_async.config import resolve
from ruda_async.errors import ConfigError
from ruda_async.launch.plan import prepare
from ruda_async.transport.registry import default_plugin, register_plugin, unregister_plugin


class Engine(FakePlugin):
    """A plugin whose engine says where this process is, if it has placed it."""

    place: tuple[int, int] | None = (2, 5)

    def placed(self) -> tuple[int, int] | None:
        return self.place


@pytest.fixture
def engine() -> Iterator[Engine]:
    plugin = Engine("engine", rank_per="engine", parameters=Nothing, preference=10_000)
    register_plugin(plugin)
    yield plugin
    unregister_plugin("engine")


def test_rank_and_world_size_come_from_the_engine(engine: Engine) -> None:
    config = resolve("engine://", environ={})
    assert (config.rank, config.world_size) == (2, 5)
    assert resolve("engine://?world_size=3", environ={}).world_size == 3
    assert resolve("engine://", rank=1, environ={"RUDA_RANK": "4"}).rank == 1
    assert resolve(None, environ={"RUDA_URL": "engine://"}).rank == 2


def test_without_an_engine_they_have_to_be_given(engine: Engine) -> None:
    engine.place = None
    with pytest.raises(ConfigError, match="engine:// needs rank and world_size"):
        resolve("engine://", environ={})
    with pytest.raises(ConfigError, match="no port names no place to meet"):
        resolve("engine://host?rank=0&world_size=2", environ={})


def test_it_is_no_default_and_our_launcher_does_not_start_it(engine: Engine) -> None:
    assert default_plugin().scheme != "engine"
    with (
        pytest.raises(ConfigError, match="another engine starts, such as mpiexec"),
        prepare("engine://127.0.0.1:0", 2),
    ):
        pass
