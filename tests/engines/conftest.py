"""One small Ray cluster for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray itself, with room for a dozen actors on this machine."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'ruda-async[ray]'")
    paths = [str(ROOT / "tests"), str(ROOT), str(ROOT / "transports")]
    for attempt in range(3):
        try:
            ray.init(
                num_cpus=4,
                object_store_memory=100 * 2**20,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
            )
            break
        except Exception as error:  # Ray gives its node 30 s to start, which a busy machine may exceed
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == 2:
                raise
    yield ray
    ray.shutdown()


@pytest.fixture
def start(cluster: Any) -> Iterator[Callable[[str, int], list[Any]]]:
    """Start some actors of a class of `ray_actors`; they end with the test."""
    import ray_actors

    started: list[Any] = []

    def start(name: str, count: int) -> list[Any]:
        remote = cluster.remote(getattr(ray_actors, name)).options(num_cpus=0.25)
        actors = [remote.remote() for _ in range(count)]
        started.extend(actors)
        return actors

    yield start
    for actor in started:
        cluster.kill(actor)
