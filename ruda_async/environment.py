"""What launchers say about a rank in environment variables: the meaning of ``env://``.

Looked at in this order; the first launcher whose variables are complete is taken:

========  =======================================================================================
torchrun  ``RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_RANK TORCHELASTIC_RUN_ID``
Open MPI  ``OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMIX_NAMESPACE``
MPICH     ``PMI_RANK PMI_SIZE MPI_LOCALRANKID`` (Hydra, and all that descend from it)
Slurm     ``SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_STEP_NODELIST``, inside an ``srun`` step
========  =======================================================================================

``RUDA_RANK``, ``RUDA_WORLD_SIZE`` and ``RUDA_LOCAL_RANK`` win over each of them, and do without any where
``RUDA_URL`` says where ranks meet.

Launchers say who a rank is, but seldom leave a port free for it. So a job has a few *candidate* ports:
rank 0 listens at the first free one, the others try each, and the job's name tells it from its neighbours.
Under torchrun these are the ports after ``MASTER_PORT``, on which torch's own store listens; elsewhere they
follow from the scheduler's job id.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .errors import ConfigError

__all__ = ["EnvJob", "expand_nodelist", "find_job", "from_environment"]

LOOPBACK = "127.0.0.1"
#: How many ports ranks try.
CANDIDATES = 4
#: Derived ports lie here: above what services use, below what the kernel hands out itself.
_FIRST_PORT, _LAST_PORT = 20000, 59999
#: Slurm numbers its special steps (batch script, interactive shell, …) from the top of 32 bits.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
_SEGMENT = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?\Z")


@dataclass(frozen=True, slots=True)
class EnvJob:
    """This process's place in the job that a launcher started.

    Attributes:
        rank, world_size: this rank and how many there are.
        local_rank: its number among the ranks of this host, or None where nothing says.
        host: where rank 0 runs, or None where nothing says.
        ports: candidates to try in turn.
        name: the job's name, the same on all ranks.
        launcher: ``"torchrun"``, ``"Open MPI"``, ``"MPICH"``, ``"Slurm"`` or ``"RUDA_*"``.
        lacks: where `host` is None, what to set so that it is known.
    """

    rank: int
    world_size: int
    local_rank: int | None
    host: str | None
    ports: tuple[int, ...]
    name: str
    launcher: str
    lacks: str = ""


def from_environment(environ: Mapping[str, str] | None = None) -> EnvJob:
    """The job that the variables of a launcher describe.

    Raises:
        ConfigError: no launcher's variables are complete, some are malformed, or neither they nor
            ``RUDA_URL`` say where the ranks meet.
    """
    environ = os.environ if environ is None else environ
    job = find_job(environ)
    if job is None:
        raise ConfigError(
            "env:// found no launcher: looked for RUDA_RANK and RUDA_WORLD_SIZE, RANK and WORLD_SIZE "
            "(torchrun), OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH), SLURM_PROCID in a step (Slurm)"
            f"{_partial(environ)}; start the ranks with `ruda-async run -n 2 script.py`, torchrun, mpiexec "
            "or srun, or give connect() a URL with rank and world_size"
        )
    if job.host is None and not environ.get("RUDA_URL"):
        raise ConfigError(
            f"{job.launcher} says that this is rank {job.rank} of {job.world_size}, but not where the ranks "
            f"meet; {job.lacks}"
        )
    return job


def find_job(environ: Mapping[str, str]) -> EnvJob | None:
    """As `from_environment`, with None where there is no launcher, and `EnvJob.host` None where it is
    not known."""
    rank, world_size = _number(environ, "RUDA_RANK"), _number(environ, "RUDA_WORLD_SIZE")
    local_rank = _number(environ, "RUDA_LOCAL_RANK")
    alone = None
    if rank is not None and world_size is not None:
        lacks = "set RUDA_URL, as in RUDA_URL=scheme://host:port"
        alone = _checked(EnvJob(rank, world_size, local_rank, None, (), "default", "RUDA_*", lacks))
        if environ.get("RUDA_URL"):
            return alone
    job = _torchrun(environ) or _open_mpi(environ) or _mpich(environ) or _slurm(environ)
    if job is None:
        return alone
    return _checked(
        replace(
            job,
            rank=job.rank if rank is None else rank,
            world_size=job.world_size if world_size is None else world_size,
            local_rank=job.local_rank if local_rank is None else local_rank,
        )
    )


# ---------------------------------------------------------------------- launchers


def _torchrun(environ: Mapping[str, str]) -> EnvJob | None:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    # After an elastic restart the former workers may not be gone yet.
    run = environ.get("TORCHELASTIC_RUN_ID", "default")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"torchrun-{run}-{restart}"
    ports = _master_ports(environ)
    host = environ.get("MASTER_ADDR") if ports or world_size == 1 else None
    if host is None and world_size == 1:
        host = LOOPBACK
    lacks = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port there, or set RUDA_URL"
    local_rank = _number(environ, "LOCAL_RANK")
    return EnvJob(rank, world_size, local_rank, host, ports or _derived_ports(name), name, "torchrun", lacks)


def _open_mpi(environ: Mapping[str, str]) -> EnvJob | None:
    rank, world_size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    return _mpi(
        environ,
        "Open MPI",
        rank,
        world_size,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    )


def _mpich(environ: Mapping[str, str]) -> EnvJob | None:
    rank, world_size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    if rank is None or world_size is None:
        return None
    return _mpi(
        environ,
        "MPICH",
        rank,
        world_size,
        _number(environ, "MPI_LOCALRANKID"),
        _number(environ, "MPI_LOCALNRANKS"),
        ("PMI_JOBID", "PMI_KVSNAME"),
    )


def _mpi(
    environ: Mapping[str, str],
    launcher: str,
    rank: int,
    world_size: int,
    local_rank: int | None,
    local_size: int | None,
    ids: tuple[str, ...],
) -> EnvJob:
    """MPI launchers do not say where rank 0 is, unless all ranks are on one host."""
    host = environ.get("MASTER_ADDR")
    if host is None and world_size in (1, local_size):
        host = LOOPBACK
    if host is None and (nodes := _slurm_nodes(environ)) is not None:
        host = next(expand_nodelist(nodes), None)
    schedulers = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
    id = next((environ[key] for key in (*ids, *schedulers) if environ.get(key)), f"user-{os.getuid()}")
    name = f"{launcher.replace(' ', '').lower()}-{id}"
    ports = _master_ports(environ) or _derived_ports(name)
    lacks = (
        "set MASTER_ADDR to the host of rank 0 on all ranks (mpiexec -x MASTER_ADDR=… or "
        "-genv MASTER_ADDR …), or set RUDA_URL"
    )
    return EnvJob(rank, world_size, local_rank, host, ports, name, launcher, lacks)


def _slurm(environ: Mapping[str, str]) -> EnvJob | None:
    rank = _number(environ, "SLURM_PROCID")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if world_size is None:
        world_size = _number(environ, "SLURM_NTASKS")
    if rank is None or world_size is None or not _in_slurm_step(environ):
        return None
    name = f"slurm-{environ.get('SLURM_JOB_ID', '0')}-{_slurm_step(environ)}"
    nodes = _slurm_nodes(environ)
    single = (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")) == "1"
    host = LOOPBACK if single or world_size == 1 else nodes and next(expand_nodelist(nodes), None)
    lacks = "SLURM_STEP_NODELIST is not set: start the ranks with srun, or set RUDA_URL"
    local_rank = _number(environ, "SLURM_LOCALID")
    return EnvJob(rank, world_size, local_rank, host, _derived_ports(name), name, "Slurm", lacks)


def _slurm_step(environ: Mapping[str, str]) -> str | None:
    return environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task.

    A batch script sees ``SLURM_PROCID=0`` and its job's ``SLURM_NTASKS`` too, but runs once: it has no step
    id, or one of the special ones.
    """
    step = _slurm_step(environ)
    return step is not None and step.isdigit() and int(step) < _SLURM_SPECIAL_STEPS


def _slurm_nodes(environ: Mapping[str, str]) -> str | None:
    keys = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((environ[key] for key in keys if environ.get(key)), None)


# ---------------------------------------------------------------------- pieces


def expand_nodelist(text: str) -> Iterator[str]:
    """Slurm's host list, ``n[01-03,7],x5`` → ``n01 n02 n03 n7 x5``, one after another.

    Raises:
        ConfigError: brackets that do not match, an empty name, or a range that is none.
    """
    for item in re.split(r",(?![^\[\]]*\])", text):  # at commas outside brackets
        pieces: list[_Piece] = []
        position = 0
        while position < len(item):
            match = _SEGMENT.match(item, position)
            if match is None or match.end() == position:
                raise _malformed(text)
            pieces.append((match[1], None if match[2] is None else _ranges(match[2], text)))
            position = match.end()
        if not pieces:
            raise _malformed(text)
        yield from _combine(pieces)


#: Text, and the numbers after it: ranges, each with the width to which zeros fill its numbers.
_Piece = tuple[str, "list[tuple[range, int]] | None"]


def _ranges(inside: str, text: str) -> list[tuple[range, int]]:
    """``01-03,7`` → ``[(range(1, 4), 2), (range(7, 8), 1)]``."""
    found = []
    for item in inside.split(","):
        match = _RANGE.match(item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _malformed(text)
        found.append((range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])))
    return found


def _combine(pieces: Sequence[_Piece]) -> Iterator[str]:
    """All names, one at a time: the first of a million nodes costs no more than of one."""
    if not pieces:
        yield ""
        return
    (prefix, ranges), rest = pieces[0], pieces[1:]
    if ranges is None:
        numbers: Iterable[str] = ("",)
    else:
        numbers = (f"{n:0{width}d}" for span, width in ranges for n in span)
    for number in numbers:
        for tail in _combine(rest):
            yield prefix + number + tail


def _malformed(text: str) -> ConfigError:
    return ConfigError(f"the Slurm node list {text!r:.120} is malformed; it should look like n[01-03,7],x5")


def _derived_ports(name: str) -> tuple[int, ...]:
    """Ports that all ranks of the job `name` arrive at without talking."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    start, span = int.from_bytes(digest[:8], "big"), _LAST_PORT - _FIRST_PORT + 1
    return tuple(_FIRST_PORT + (start + i * 7919) % span for i in range(CANDIDATES))


def _master_ports(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The ports beside ``MASTER_PORT``, where that is set: torch's store has it itself."""
    port = _number(environ, "MASTER_PORT")
    if port is None:
        return ()
    if not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} is out of range; a port is from 1 to 65535")
    step = 1 if port + CANDIDATES <= 65535 else -1
    return tuple(port + step * i for i in range(1, CANDIDATES + 1))


def _number(environ: Mapping[str, str], key: str) -> int | None:
    text = environ.get(key)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ConfigError(f"{key}={text!r:.80} is not a whole number from 0 on; fix or unset it")
    return int(text)


def _checked(job: EnvJob) -> EnvJob:
    if job.world_size < 1 or job.rank >= job.world_size:
        raise ConfigError(
            f"the environment ({job.launcher}) says rank {job.rank} of {job.world_size} ranks; ranks count "
            "from 0 to world_size - 1: fix or unset the variables"
        )
    return job


def _partial(environ: Mapping[str, str]) -> str:
    """What is there, where it is not enough."""
    if environ.get("SLURM_PROCID") and not _in_slurm_step(environ):
        return " (this is a Slurm batch script or shell, not a step: start the program with srun)"
    pairs = (
        ("RUDA_RANK", "RUDA_WORLD_SIZE"),
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    )
    for a, b in pairs:
        if bool(environ.get(a)) != bool(environ.get(b)):
            there, missing = (a, b) if environ.get(a) else (b, a)
            return f" ({there} is set, but {missing} is not)"
    return ""
