"""The example of a plugin: installed apart, found by its entry point, and held to every promise."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "unix_transport"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unix:// is for Linux")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program that has the package: its module and its metadata on the path.

    As an installer leaves them, without one: the entry points come from the package's own pyproject.toml.
    """
    target = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    for name in project["entry-points"]["ruda_async.transports"].values():
        module = name.partition(":")[0]
        (target / f"{module}.py").write_text((EXAMPLE / f"{module}.py").read_text())
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    own = {key: value for key, value in os.environ.items() if not key.startswith("RUDA_")}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))}


def run(environ: dict[str, str], *args: str, code: int = 0, limit: float = 150) -> str:
    done = subprocess.run(
        [sys.executable, *args], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_it_is_short_and_sees_one_module_alone() -> None:
    text = (EXAMPLE / "ruda_unix.py").read_text()
    assert len(text.splitlines()) < 100
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for name in imported if name.startswith("ruda")} == {"ruda_async.transport"}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", ["loop", "processes"])
def test_the_conformance_suite_passes(installed: dict[str, str], ranks: str) -> None:
    from ruda_async.transport.conformance import SCENARIOS

    said = run(
        installed,
        *("-m", "pytest", "--pyargs", "ruda_async.transport.conformance", "-q", "-p", "no:cacheprovider"),
        *("--ruda-url", f"unix://kit-{os.getpid()}", "--ruda-ranks", ranks, "--timeout", "120"),
        limit=390,
    )
    assert f"{len(SCENARIOS)} passed" in said
    assert "skipped" not in said


PROGRAM = """
import numpy as np
import ruda_async
with ruda_async.sync.connect(timeout=60) as comm:
    total = comm.all_reduce_sum(np.arange(3) * (comm.rank + 1))
    print(total.tolist(), comm.describe()["transport"]["scheme"])
"""


@pytest.mark.timeout(180)
def test_programs_use_it_by_its_url_alone(installed: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = run(installed, "-m", "ruda_async", "run", "-n", "3", "--url", "unix://lab", str(program))
    assert sorted(said.splitlines()) == [f"[rank {rank}] [0, 6, 12] unix" for rank in range(3)]
    table = run(installed, "-c", "from ruda_async.transport.registry import plugins; print(*plugins())")
    assert "unix" in table.split()
