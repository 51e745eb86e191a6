"""What is measured: operations × sizes × worlds × transports × modes × calls in flight, beside peers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..transport.registry import get_plugin, is_network
from ..url import HIDDEN, split_url

__all__ = [
    "MODES",
    "OPERATIONS",
    "PEERS",
    "Group",
    "Plan",
    "Subject",
    "format_size",
    "parse_size",
    "parse_sizes",
]

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "send",
)
MODES = ("async", "uvloop", "sync")
PEERS = ("gloo", "ucc", "mpi", "raw", "numpy")
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """``"64k"`` → 65536. Units are powers of 1024: k, m, g, also as ``kib`` or ``kb``.

    Raises:
        ConfigError
    """
    word = text.strip().lower()
    number = word.rstrip("kmgib")
    unit = word[len(number) :].removesuffix("ib").removesuffix("b")
    if not number.isascii() or not number.isdigit() or unit not in _UNITS or int(number) < 1:
        raise ConfigError(f"{text!r} is not a size; write a number of bytes from 1 on, such as 8, 64k or 4m")
    return int(number) * _UNITS[unit]


def parse_sizes(text: str) -> tuple[int, ...]:
    """``"8,64k,4m"``, or ``"8:256m:4"``: from 8 bytes, times 4 each, up to 256 MiB.

    Raises:
        ConfigError
    """
    if ":" not in text:
        return tuple(parse_size(part) for part in text.split(","))
    first, _, rest = text.partition(":")
    last, _, step = rest.partition(":")
    size, stop, factor = parse_size(first), parse_size(last), parse_size(step or "2")
    if factor < 2 or stop < size:
        raise ConfigError(f"{text!r} is not a range of sizes; write first:last:factor, such as 8:256m:4")
    sizes = []
    while size <= stop:
        sizes.append(size)
        size *= factor
    return tuple(sizes)


def format_size(nbytes: int) -> str:
    """``65536`` → ``"64 KiB"``; sizes between units keep their bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing that is measured: this library over one URL in one mode, or a peer.

    Attributes:
        name: ``"ruda"``, or the peer's name.
        transport: the URL's scheme and parameters; empty for peers.
        mode: one of `MODES`; empty for peers.
        in_flight: calls at once, each on a channel of its own.
        url: where ranks meet. Not part of results.
    """

    name: str
    transport: str = ""
    mode: str = ""
    in_flight: int = 1
    url: str = ""

    @property
    def label(self) -> str:
        """For people: ``"tcp async"``, ``"tcp async x8"``, ``"gloo"``."""
        if self.name != "ruda":
            return self.name
        times = f" x{self.in_flight}" if self.in_flight > 1 else ""
        return f"{self.transport} {self.mode}{times}"


@dataclass(frozen=True, slots=True)
class Group:
    """What is measured in one set of ranks, alternating.

    Attributes:
        world: the number of ranks.
        placement: ``"processes"``; or, for transports inside one process, ``"tasks"`` of one event loop
            or ``"threads"``.
        subjects: in the order in which their blocks alternate.
    """

    world: int
    placement: str
    subjects: tuple[Subject, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run.

    Attributes:
        operations: of `OPERATIONS`.
        sizes: bytes per rank, as nccl-tests counts them: of the whole result for all_gather, of the whole
            input for all else. Rounded up to whole elements for each rank.
        worlds: numbers of ranks.
        urls: where this library's ranks meet; port 0 and job names are made unique.
        modes: of `MODES`.
        dtype: of `DTYPES`.
        in_flight: numbers of concurrent calls.
        peers: of `PEERS`.
        rounds: blocks of calls of each subject.
        block: seconds that a block should take.
        reuse: this library's results go to the same memory (``out=``) again and again.
        empty: inputs and reused results lie in memory that ``comm.empty`` gave.
        row: elements in a row of all_to_all_v, fewer where the size has not that many for each rank.
        timeout: seconds that any call may take.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
    worlds: tuple[int, ...] = (2,)
    urls: tuple[str, ...] = ("tcp://127.0.0.1:0",)
    modes: tuple[str, ...] = ("async",)
    dtype: str = "float32"
    in_flight: tuple[int, ...] = (1,)
    peers: tuple[str, ...] = ("gloo", "raw", "numpy")
    rounds: int = 7
    block: float = 0.05
    reuse: bool = False
    empty: bool = False
    row: int = 4096
    timeout: float = 120.0

    def __post_init__(self) -> None:
        _check_names("operation", self.operations, OPERATIONS)
        _check_names("mode", self.modes, MODES)
        _check_names("peer", self.peers, PEERS, may_be_empty=True)
        _check_names("dtype", (self.dtype,), DTYPES)
        for name, values in (
            ("sizes", self.sizes),
            ("world", self.worlds),
            ("in_flight", self.in_flight),
            ("rounds", (self.rounds,)),
            ("row", (self.row,)),
        ):
            least = 2 if name == "world" else 1  # one rank has nobody to send to
            if not values or min(values) < least:
                raise ConfigError(f"{name}={_listed(values)} is out of range; give numbers from {least} on")
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}={_listed(values)} names one twice; give each once")
        if not self.urls:
            raise ConfigError("there is no URL to measure; give one, such as tcp://127.0.0.1:0")
        for name, seconds in (("block", self.block), ("timeout", self.timeout)):
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name}={seconds:g} s is out of range; give seconds above 0")

    @property
    def cases(self) -> Iterator[tuple[str, int]]:
        """Operations and sizes; a barrier has no size."""
        for operation in self.operations:
            for nbytes in (0,) if operation == "barrier" else self.sizes:
                yield operation, nbytes

    def groups(self) -> list[Group]:
        """Every set of ranks that has to be started.

        Raises:
            ConfigError, TransportUnavailableError: a URL is wrong or cannot be used here.
        """
        groups = []
        for world in self.worlds:
            placed: dict[str, list[Subject]] = {"processes": [], "tasks": [], "threads": []}
            for url in self.urls:
                parts = split_url(url)
                if "rank" in parts.query or "world_size" in parts.query:
                    raise ConfigError(
                        f"the URL {parts.text!r} names a rank or world_size; leave them out, the benchmark "
                        "starts the ranks"
                    )
                plugin = get_plugin(parts.scheme)
                if is_network(plugin) and parts.port:
                    raise ConfigError(
                        f"the URL {parts.text!r} names a port, but several communicators may be made; "
                        "write port 0"
                    )
                query = "&".join(
                    f"{k}={v}" for k, v in parts.query.items() if k not in HIDDEN and k != "secret_file"
                )
                transport = f"{parts.scheme}?{query}" if query else parts.scheme
                for mode in self.modes:
                    inside = "threads" if mode == "sync" else "tasks"
                    placement = inside if plugin.rank_per == "task" else "processes"
                    placed[placement] += [
                        Subject("ruda", transport, mode, number, url) for number in self.in_flight
                    ]
            for placement, subjects in placed.items():
                if subjects:
                    peers = [p for p in self.peers if p == "numpy" or placement == "processes"]
                    groups.append(Group(world, placement, (*subjects, *map(Subject, peers))))
        return groups


def _check_names(what: str, given: Sequence[str], known: Sequence[str], may_be_empty: bool = False) -> None:
    wrong = [name for name in given if name not in known]
    if wrong or not (given or may_be_empty):
        problem = f"unknown {what} {wrong[0]!r}" if wrong else f"no {what} is given"
        raise ConfigError(f"{problem}; there are {', '.join(known)}")
    if len(set(given)) < len(given):
        raise ConfigError(f"the {what}s {_listed(given)} name one twice; give each once")


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values)) or "nothing"
