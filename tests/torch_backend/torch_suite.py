"""Runs torch's own distributed tests, which its wheel ships, on this library's backend or on Gloo.

torch starts fresh processes for each test, most of whose time goes into importing torch. Here each rank is
one process that runs test after test, with a process group of its own for each; after a test that fails or
hangs, new processes go on with the next. Many of torch's tests branch on the backend's name and do nothing
sensible for one that they have not heard of; here they take the branches of Gloo, whatever they run on.

By hand, ``torch_suite.py BACKEND [pattern [world size]]`` prints what became of each test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Outcome", "run", "test_names"]


class Outcome(NamedTuple):
    """What became of one test.

    Attributes:
        kind: ``"passed"``, ``"skipped"``, ``"failed"`` or ``"hung"``.
        text: the reason, or the traceback of the rank that failed first.
    """

    kind: str
    text: str = ""


# ---------------------------------------------------------------------- in the process that asks


def test_names() -> list[str]:
    """All tests that torch's class has."""
    return [name for name in dir(_test_class()) if name.startswith("test_")]


def run(
    backend: str,
    names: Sequence[str],
    *,
    world_size: int = 4,
    environ: Mapping[str, str] = {},
    limit: float = 180,
    report: Callable[[str, Outcome], object] = lambda name, outcome: None,
) -> dict[str, Outcome]:
    """Run `names` on `world_size` ranks; torch skips those that need another number.

    Args:
        backend: torch's name of it.
        names: the tests, run in this order.
        environ: further variables for the ranks, such as ``RUDA_URL``.
        limit: seconds after which one test has hung.
        report: called with each test's name and outcome when it is known.
    """
    outcomes: dict[str, Outcome] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for name, outcome in _round(
                backend, left, Path(folder), {"WORLD_SIZE": str(world_size), **environ}, limit
            ):
                outcomes[name] = outcome
                report(name, outcome)
        left = [name for name in names if name not in outcomes]
    return outcomes


def _round(
    backend: str, names: Sequence[str], folder: Path, environ: Mapping[str, str], limit: float
) -> Iterator[tuple[str, Outcome]]:
    """The outcomes up to the first test that fails or hangs."""
    (folder / "names").write_text("\n".join(names))
    variables = {
        **os.environ,
        "BACKEND": "gloo",
        "TESTED_BACKEND": backend,
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TEMP_DIR": str(folder),
        **environ,
    }
    world_size = int(variables["WORLD_SIZE"])
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(folder)],
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"stderr{rank}").open("w"),
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    try:
        yield from _follow(ranks, names, folder, limit)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _follow(
    ranks: Sequence[subprocess.Popen[bytes]], names: Sequence[str], folder: Path, limit: float
) -> Iterator[tuple[str, Outcome]]:
    for name in names:
        outcome = _outcome(ranks, name, folder, limit)
        yield name, outcome
        if outcome.kind in ("failed", "hung"):
            return


def _outcome(ranks: Sequence[subprocess.Popen[bytes]], name: str, folder: Path, limit: float) -> Outcome:
    until = time.monotonic() + limit
    while True:
        dead = [i for i, rank in enumerate(ranks) if rank.poll() is not None]
        said = [_said(folder, rank, name) for rank in range(len(ranks))]
        for outcome in said:
            if outcome and outcome.kind == "failed":
                return outcome
        if all(said):
            return next((o for o in said if o and o.kind == "skipped"), Outcome("passed"))
        for rank in dead:
            if not said[rank]:
                errors = (folder / f"stderr{rank}").read_text()[-2000:]
                return Outcome("failed", f"rank {rank} ended: {errors}")
        if time.monotonic() > until:
            return Outcome("hung", f"ranks {[i for i, outcome in enumerate(said) if not outcome]} wait")
        time.sleep(0.02)


def _said(folder: Path, rank: int, name: str) -> Outcome | None:
    try:
        return Outcome(*json.loads((folder / f"{name}.{rank}").read_text()))
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------------- on a rank


def _test_class() -> Any:
    for name, value in (("BACKEND", "gloo"), ("WORLD_SIZE", "4"), ("TEMP_DIR", tempfile.gettempdir())):
        os.environ.setdefault(name, value)
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    import ruda_async.torch_backend  # noqa: F401

    class TestOfTorch(TestDistBackend, DistributedTest._DistTestBase):
        pass

    return TestOfTorch


def _rank_main(rank: int, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    cases = _test_class()
    for name in (folder / "names").read_text().split():
        if os.getppid() == 1:
            return  # whoever asked is gone
        outcome = _one(cases, rank, name, folder)
        written = folder / f"{name}.{rank}.part"
        written.write_text(json.dumps(outcome))
        written.rename(folder / f"{name}.{rank}")
        if outcome.kind == "failed":
            time.sleep(60)  # keep the connections up: the others' own account of it is of no interest


def _one(cases: Any, rank: int, name: str, folder: Path) -> Outcome:
    """One test on this rank, as `TestDistBackend._run` does it."""
    import unittest

    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    place = folder / f"{name}.d"
    for part in ("barrier", "test_dir", "init_dir"):
        (place / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(place)
    distributed_test.INIT_METHOD = f"file://{place / 'another_store'}"
    distributed_test.Barrier.barrier_id = 0
    case = cases(name)
    case.rank = rank
    case.file_name = str(place / "store")
    seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, 60)
    try:
        dist.init_process_group(
            init_method=case.init_method,
            backend=os.environ["TESTED_BACKEND"],
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        case._barrier(timeout=60)
        common_utils.set_rng_seed()
        getattr(case, name)()
        outcome = Outcome("passed")
    except unittest.SkipTest as reason:
        outcome = Outcome("skipped", str(reason))
    except SystemExit as reason:
        outcome = Outcome("skipped" if reason.code else "passed", f"exit code {reason.code}")
    except BaseException:
        return Outcome("failed", traceback.format_exc()[-4000:])
    try:
        case._barrier(timeout=60)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        return Outcome("failed", traceback.format_exc()[-4000:])
    return outcome


def main(arguments: Sequence[str]) -> None:
    """By hand: every test whose name matches, one line each, and the tracebacks of those that fail."""
    backend = arguments[0]
    pattern = arguments[1] if len(arguments) > 1 else ""
    world_size = int(arguments[2]) if len(arguments) > 2 else 4
    names = [name for name in test_names() if re.search(pattern, name)]

    def report(name: str, outcome: Outcome) -> None:
        print(f"{outcome.kind:8} {name}  {'' if outcome.kind == 'passed' else outcome.text}", flush=True)

    run(backend, names, world_size=world_size, report=report)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _rank_main(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
