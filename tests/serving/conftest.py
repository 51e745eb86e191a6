from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
_NEEDED = ("torch", "starlette", "uvicorn", "aiohttp", "prometheus_client")
missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
sys.path[:0] = [str(_EXAMPLES), str(Path(__file__).parent)]

if not missing:
    from serving_support import Oracle, write_model

    @pytest.fixture(scope="session")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("model") / "digits.npz"
        write_model(path)
        return path

    @pytest.fixture(scope="session")
    def oracle(model: Path) -> Oracle:
        return Oracle(model)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if missing and collection_path.name.startswith("test_") else None


def pytest_report_header() -> str | None:
    if missing:
        return f"tests/serving are left out without {', '.join(missing)}: pip install '.[serve]'"
    return None
