from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from support import SCHEMES, fresh_url

settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell ignores Ctrl-C for what it runs in the background, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collecting garbage, which many tests do, need not look at what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest) -> str:
    """A fresh URL of each transport whose ranks may be tasks."""
    return fresh_url(request.param)


@pytest.fixture
def new_url() -> Callable[[str], str]:
    """`fresh_url`, for tests that need several."""
    return fresh_url


@pytest.fixture(autouse=True, scope="session")
def _no_tuning_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ``ruda-async tune`` has measured here must not decide what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
