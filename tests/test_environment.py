"""What launchers say, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.environment import EnvJob, expand_nodelist, find_job, from_environment
from ruda_async.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NODELIST": "cpu1,gpu[07-09]",
}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "local_rank", "host", "name", "launcher"),
    [
        (TORCHRUN, 3, 8, 1, "node1", "torchrun-abc-2", "torchrun"),
        (OPEN_MPI, 1, 4, 1, "127.0.0.1", "openmpi-prterun-host-17@1", "Open MPI"),
        (MPICH | {"PBS_JOBID": "9.srv"}, 2, 3, 2, "127.0.0.1", "mpich-9.srv", "MPICH"),
        (SLURM, 5, 6, 1, "gpu07", "slurm-4711-0", "Slurm"),
    ],
    ids=["torchrun", "openmpi", "mpich", "slurm"],
)
def test_each_launcher(
    environ: dict[str, str], rank: int, world_size: int, local_rank: int, host: str, name: str, launcher: str
) -> None:
    job = from_environment(environ)
    assert (job.rank, job.world_size, job.local_rank) == (rank, world_size, local_rank)
    assert (job.host, job.name, job.launcher) == (host, name, launcher)
    assert len(set(job.ports)) == 4
    assert all(1024 < port <= 65535 for port in job.ports)


def test_torchrun_leaves_the_port_of_the_store_alone() -> None:
    assert from_environment(TORCHRUN).ports == (29501, 29502, 29503, 29504)
    assert from_environment(TORCHRUN | {"MASTER_PORT": "65534"}).ports == (65533, 65532, 65531, 65530)


def test_derived_ports_are_the_same_on_all_ranks_and_differ_between_jobs() -> None:
    def ports(**change: str) -> tuple[int, ...]:
        return from_environment(SLURM | change).ports

    assert ports(SLURM_PROCID="0") == ports(SLURM_PROCID="5")
    assert ports() != ports(SLURM_JOB_ID="4712")
    assert ports() != ports(SLURM_STEP_ID="1")
    assert all(20000 <= port <= 59999 for port in ports())


ORDER = [
    ("torchrun", TORCHRUN),
    ("Open MPI", OPEN_MPI),
    ("MPICH", MPICH),
    ("Slurm", SLURM),
]


@pytest.mark.parametrize("first", range(4))
def test_precedence(first: int) -> None:
    environ: dict[str, str] = {}
    for _, variables in ORDER[first:]:
        environ |= variables
    assert from_environment(environ).launcher == ORDER[first][0]


def test_own_variables_win_over_each_launcher() -> None:
    own = {"RUDA_RANK": "0", "RUDA_WORLD_SIZE": "2", "RUDA_LOCAL_RANK": "0"}
    job = from_environment(TORCHRUN | own)
    assert (job.rank, job.world_size, job.local_rank) == (0, 2, 0)
    assert (job.host, job.launcher) == ("node1", "torchrun")
    # With a URL nothing else is asked, not even what would be malformed.
    job = from_environment({"RANK": "x", "RUDA_URL": "net://h:1"} | own)
    assert (job.rank, job.world_size, job.host, job.launcher) == (0, 2, None, "RUDA_*")


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "h0"}, "h0"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_JOB_NODELIST": "n[3-4]"}, "n3"),
        (MPICH | {"MPI_LOCALNRANKS": "1", "SLURM_JOB_NODELIST": "n[3-4]"}, "n3"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, "cpu1"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "127.0.0.1"),
    ],
)
def test_where_rank_0_is(environ: dict[str, str], host: str) -> None:
    assert from_environment(environ).host == host


def test_the_ports_beside_a_master_port_serve_mpi_too() -> None:
    assert from_environment(OPEN_MPI | {"MASTER_PORT": "100"}).ports == (101, 102, 103, 104)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_slurm_batch_script_is_no_rank(step: str | None) -> None:
    environ = SLURM | {"SLURM_PROCID": "0"}
    del environ["SLURM_STEP_ID"]
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert find_job(environ) is None
    with pytest.raises(ConfigError, match=r"batch script or shell, not a step: start the program with srun"):
        from_environment(environ)


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({}, ["RUDA_RANK", "torchrun", "Open MPI", "MPICH", "Slurm", "ruda-async run", "URL"]),
        ({"RANK": "1"}, ["RANK is set, but WORLD_SIZE is not"]),
        ({"RUDA_WORLD_SIZE": "2"}, ["RUDA_WORLD_SIZE is set, but RUDA_RANK is not"]),
        ({"RUDA_RANK": "0", "RUDA_WORLD_SIZE": "2"}, ["rank 0 of 2", "set RUDA_URL"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["rank 0 of 2", "MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["MASTER_PORT"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["Open MPI", "MASTER_ADDR", "mpiexec -x"]),
        (MPICH | {"MPI_LOCALNRANKS": "2"}, ["MPICH", "MASTER_ADDR", "-genv"]),
        (TORCHRUN | {"RANK": "x"}, ["RANK='x'", "whole number"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK='-1'", "from 0 on"]),
        (TORCHRUN | {"RANK": "9" * 5000}, ["RANK=", "whole number"]),
        (TORCHRUN | {"RANK": "8"}, ["torchrun", "rank 8 of 8", "world_size - 1"]),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, ["rank 0 of 0"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1 to 65535"]),
        (TORCHRUN | {"MASTER_PORT": "ssh"}, ["MASTER_PORT='ssh'"]),
        (SLURM | {"SLURM_STEP_NODELIST": "n[3-1]"}, ["'n[3-1]'", "n[01-03,7],x5"]),
        (
            {k: v for k, v in SLURM.items() if "NODELIST" not in k},
            ["Slurm", "SLURM_STEP_NODELIST is not set", "srun", "RUDA_URL"],
        ),
    ],
)
def test_mistakes_name_variable_and_remedy(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment(environ)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    for part in parts:
        assert part in text


def test_without_a_launcher_there_is_no_job() -> None:
    assert find_job({"PATH": "/bin", "RANK": ""}) is None


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RUDA_RANK", "RUDA_WORLD_SIZE", "RUDA_LOCAL_RANK", "RUDA_URL"):
        monkeypatch.delenv(key, raising=False)
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    assert isinstance(from_environment(), EnvJob)


# ---------------------------------------------------------------------- node lists


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-03,7],x5", ["n01", "n02", "n03", "n7", "x5"]),
        ("alone", ["alone"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[5]", ["n5"]),
        ("n[098-102]", ["n098", "n099", "n100", "n101", "n102"]),
    ],
)
def test_nodelists(text: str, hosts: list[str]) -> None:
    assert list(expand_nodelist(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", ",a", "a,,b", "n[", "n]", "n[1", "n[]", "n[1-]", "n[a-b]", "n[2-1]", "n[1][", "n[[1]]"]
)
def test_malformed_nodelists(text: str) -> None:
    with pytest.raises(ConfigError, match=r"node list .* is malformed"):
        list(expand_nodelist(text))


def test_the_first_of_very_many_nodes_is_quick() -> None:
    assert next(expand_nodelist("n[1-99999999]")) == "n1"


names = st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4))


@st.composite
def nodelists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list and the hosts it stands for, built side by side."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix, suffix = draw(names), draw(st.sampled_from(["", "-ib"]))
        pieces: list[Any] = draw(st.lists(ranges, max_size=3))
        if not pieces:
            texts.append(prefix + suffix)
            hosts.append(prefix + suffix)
            continue
        shown = []
        for low, count, width in pieces:
            low_text = str(low).zfill(width)
            shown.append(f"{low_text}-{low + count}" if count else low_text)
            hosts += [f"{prefix}{str(n).zfill(len(low_text))}{suffix}" for n in range(low, low + count + 1)]
        texts.append(f"{prefix}[{','.join(shown)}]{suffix}")
    return ",".join(texts), hosts


@given(nodelists())
def test_nodelists_round_trip(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert list(expand_nodelist(text)) == hosts


@given(st.text(alphabet="an[]-,019", max_size=15))
def test_any_nodelist_is_hosts_or_a_config_error(text: str) -> None:
    try:
        found = [host for host, _ in zip(expand_nodelist(text), range(100), strict=False)]
    except ConfigError:
        return
    assert found
    assert not any(set(host) & set("[],") for host in found)
