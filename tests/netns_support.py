"""Several hosts on one machine: network namespaces around a bridge, with links that may be slow or break.

Needs root, iproute2 and the kernel's veth and bridge; `Hosts.made` skips a test where these are not there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECRET = "a secret of the tests alone"

_numbers = itertools.count()


class Hosts:
    """`count` hosts at 10.77.0.1, 10.77.0.2, …, and the switch between them."""

    def __init__(self, count: int) -> None:
        prefix = f"ruda{os.getpid()}x{next(_numbers)}"
        self.switch = f"{prefix}s"
        self.names = [f"{prefix}h{host}" for host in range(count)]
        self.latency = False

    @classmethod
    @contextmanager
    def made(cls, count: int) -> Iterator[Hosts]:
        """The hosts, while the context lasts."""
        if shutil.which("ip") is None:
            pytest.skip("no `ip` here; install iproute2 to test several hosts")
        hosts = cls(count)
        try:
            try:
                hosts._make()
            except subprocess.CalledProcessError as error:
                reason = error.stderr.strip().splitlines()[-1:] or ["no reason given"]
                pytest.skip(f"no network namespaces here ({reason[0]}); run as root, with veth and bridge")
            yield hosts
        finally:
            for name in (*hosts.names, hosts.switch):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _make(self) -> None:
        _ip(f"netns add {self.switch}")
        _ip(f"-n {self.switch} link add br0 type bridge")
        _ip(f"-n {self.switch} link set br0 up")
        for host, name in enumerate(self.names):
            _ip(f"netns add {name}")
            _ip(f"link add port{host} netns {self.switch} type veth peer name eth0 netns {name}")
            _ip(f"-n {self.switch} link set port{host} master br0 up")
            _ip(f"-n {name} addr add {self.address(host)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def shape(self, rate: str, delay: str) -> str:
        """Give every link this rate, and this delay where the kernel has netem; what was done."""
        netem, bucket = f"netem delay {delay} rate {rate}", f"tbf rate {rate} burst 64kb latency 200ms"
        for discipline in (netem, bucket):
            for name in self.names:
                done = subprocess.run(
                    f"tc -n {name} qdisc replace dev eth0 root {discipline}".split(), capture_output=True
                )
                if done.returncode:
                    break
            else:
                return discipline
        pytest.skip("the kernel has neither netem nor tbf; load sch_netem or sch_tbf")

    def cut(self, host: int) -> None:
        """From now on nothing passes between this host and the others, and no interface shows it."""
        _ip(f"-n {self.switch} link set port{host} nomaster")

    def down(self, host: int) -> None:
        """Take this host's interface down."""
        _ip(f"-n {self.names[host]} link set eth0 down")

    def start(self, host: int, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Run ``python tests/netns_rank.py arguments…`` on this host."""
        command = ["ip", "netns", "exec", self.names[host], sys.executable]
        return subprocess.Popen(
            [*command, str(Path(__file__).with_name("netns_rank.py")), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RUDA_SECRET": SECRET, "OMP_NUM_THREADS": "1", **environ},
        )


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


@contextmanager
def ended(ranks: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """See to it that none of `ranks` is left."""
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


def line(rank: subprocess.Popen[str]) -> str:
    """The next line that a rank prints."""
    assert rank.stdout is not None
    return rank.stdout.readline().strip()
