"""Starts the ranks of each group, and collects what they find."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, RudaError
from ..installing import how_to_install
from ..launch import spawn
from ..transport.registry import get_plugin
from ..url import split_url
from .cases import numpy_dtype
from .events import Inbox
from .loops import LoopThread
from .peers import find_mpiexec, why_missing
from .plan import Group, Plan, Subject
from .progress import Progress
from .results import Report, Row, this_machine
from .worker import Job, rank_main

__all__ = ["run_plan"]

#: Numerical libraries must not start threads: every rank has one core at most.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OTHER_JOB = ("RUDA_URL", "RUDA_RANK", "RUDA_WORLD_SIZE")
#: Lines of a failed mpiexec's output to show.
_TAIL = 12


def run_plan(plan: Plan, progress: Progress | None = None) -> Report:
    """Measure everything in `plan`.

    Blocks for as long as that takes. What cannot be measured here is said in `Report.notes`.

    Raises:
        ConfigError, TransportUnavailableError: the plan cannot be run here.
        SpawnError, RudaError: a rank failed.
    """
    progress = progress or Progress()
    report = Report(this_machine())

    def note(text: str) -> None:
        if text not in report.notes:
            report.notes.append(text)
            progress.note(text)

    def handle(event: dict[str, Any]) -> None:
        if event["kind"] == "row":
            row = Row(**event["row"])
            report.rows.append(row)
            progress.row(row)
        elif event["kind"] == "note":
            note(event["text"])
        else:
            progress.step(event["operation"], event["nbytes"])

    numpy_dtype(plan.dtype)
    groups = []
    for group in plan.groups():
        subjects, reasons = [], []
        for subject in group.subjects:
            reason = _why_missing_own(subject, group) if subject.name == "ruda" else why_missing(subject.name)
            if reason is None:
                subjects.append(subject)
            else:
                reasons.append(f"left out: {reason}")
        for text in reasons:
            note(text)
        if any(subject.name == "ruda" for subject in subjects):
            groups.append(replace(group, subjects=tuple(subjects)))
    if not groups:
        raise ConfigError(f"nothing is left to measure ({'; '.join(report.notes)})")
    progress.begin(len(groups) * len(list(plan.cases)))
    with progress, _environment():
        for group in groups:
            progress.group(group)
            _run_group(plan, group, handle)
    return report


def _why_missing_own(subject: Subject, group: Group) -> str | None:
    if subject.mode == "uvloop" and importlib.util.find_spec("uvloop") is None:
        return f"mode uvloop needs uvloop; {how_to_install('uvloop')}"
    if _is_engines(subject) and _engine_command(subject, group.world) is None:
        return f"{subject.transport}:// is for ranks that another engine starts, and none is here"
    return None


def _is_engines(subject: Subject) -> bool:
    """Whether an engine has to start the ranks."""
    return subject.name == "ruda" and get_plugin(split_url(subject.url).scheme).rank_per == "engine"


def _engine_command(subject: Subject, world: int) -> list[str] | None:
    """What starts Python on all ranks of `subject`."""
    plugin = get_plugin(split_url(subject.url).scheme)
    command: list[str] | None = plugin.command(world) if hasattr(plugin, "command") else None
    return command


def _run_group(plan: Plan, group: Group, handle: Any) -> None:
    with Inbox(handle) as inbox, contextlib.ExitStack() as stack:
        job = Job(plan, group, inbox.address)
        if group.placement == "processes":
            engines = next(filter(_is_engines, group.subjects), None)
            if engines is not None:
                _run_by(_engine_command(engines, group.world) or [], job, inbox)
            elif any(subject.name == "mpi" for subject in group.subjects):
                # mpi4py's runner aborts the job when a rank raises, where the others would wait for ever.
                program = [str(find_mpiexec()), "-n", str(group.world), sys.executable, "-m", "mpi4py"]
                _run_by(program, job, inbox)
            else:
                spawn(rank_main, group.world, args=(job,))
            return
        if group.placement == "tasks":
            for mode in sorted({s.mode for s in group.subjects if s.mode}):
                job.loops[mode] = LoopThread(mode)
                stack.callback(job.loops[mode].stop)
        spawn(rank_main, group.world, args=(job,), threads=True)


def _run_by(engine: list[str], job: Job, inbox: Inbox) -> None:
    """The group's ranks under mpiexec, which MPI's own need; this library's join from them.

    Raises:
        RudaError: a rank failed.
    """
    path = inbox.folder / "job.json"
    path.write_text(job.to_json(), encoding="utf-8")
    command = [*engine, "-m", "ruda_async.bench.worker", str(path)]
    # Open MPI otherwise refuses more ranks than cores.
    more = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()[-_TAIL:]
        raise RudaError(f"{engine[0]} ended with code {done.returncode}:\n" + "\n".join(said))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What ranks inherit: one thread each, and nothing of a job that this process is told to join."""
    names = (*_ONE_THREAD, *_OTHER_JOB)
    former = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in former.items() if value is not None})
