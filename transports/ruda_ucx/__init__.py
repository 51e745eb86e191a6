"""``ucx://``: messages over UCX, which picks shared memory, InfiniBand, NVLink or TCP for each pair of ranks.

Ranks meet as for any transport and exchange the addresses of their UCX workers there. Small messages are
tagged UCX messages that carry their envelope; large ones are announced, and the receiver then pulls them
in parts, each a tagged message of its own from the sender's memory into the receiver's. So what has not
been pulled can be withdrawn, on either side, without a trace.

Every pair of ranks holds an authenticated TCP connection on which nothing travels, and whose end tells that
the peer is gone. UCX's own error handling is on as well: without it UCX ends the process when an operation
with a dead peer fails.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from ruda_async.transport import FramedParameters, Job, Transport, how_to_install, param

__all__ = ["PLUGIN", "UcxParameters", "UcxPlugin"]


@dataclass(frozen=True, slots=True)
class UcxParameters(FramedParameters):
    """Parameters of ``ucx://``."""

    progress: str = param(
        "blocking",
        doc="how UCX is driven: `blocking` sleeps until UCX has an event, `polling` never sleeps and takes a "
        "core, `thread` drives it from a thread, so that copies go on while the loop is busy",
        choices=("blocking", "polling", "thread"),
    )
    tls: str = param("", doc="UCX's transports, such as `posix,cma,tcp` (UCX_TLS); by default all it finds")
    net_devices: str = param("", doc="network devices, such as `mlx5_0:1,eth0` (UCX_NET_DEVICES)")
    rndv_scheme: str = param(
        "",
        doc="how large parts move: `get_zcopy`, `put_zcopy`… (UCX_RNDV_SCHEME); by default UCX chooses",
    )
    rndv_thresh: str = param(
        "",
        doc="what is large, such as `64k` (UCX_RNDV_THRESH); by default just above the eager messages",
    )
    chunk_bytes: int = param(
        4 * 1024 * 1024,
        doc="the parts in which large payloads are pulled; two are under way at a time",
        unit="bytes",
        minimum=4096,
    )
    spin: float = param(
        -1.0,
        doc="how long a waiting rank looks for a message before it sleeps; -1 takes 20 µs, and in blocking "
        "calls 100 µs, where every rank can have a core of its own, else 0",
        unit="s",
        minimum=-1,
        maximum=0.001,
    )
    error_handling: bool = param(
        True,
        doc="UCX lives on when a peer dies; without this, it may end this process too, but copies large "
        "messages of one host directly (`cma`)",
        alike=True,
    )
    listen: bool = param(
        False,
        doc="make the UCX endpoints over a UCX listener (sockaddr) instead of exchanged worker addresses",
        alike=True,
    )
    bind: str = param(
        "", doc="the local address to listen on for other ranks; by default the one that reaches rank 0"
    )


class UcxPlugin:
    """The plugin object that the entry point names."""

    scheme = "ucx"
    summary = "UCX between processes and machines: shared memory, InfiniBand, NVLink or TCP, as it finds them"
    parameters = UcxParameters
    rank_per = "process"
    example = "ucx://127.0.0.1:0"
    preference = 12
    reach = "network"

    def unavailable(self) -> str | None:
        """None where ucxx is installed, else how to install it."""
        if not sys.platform.startswith("linux"):
            return "needs Linux, as UCX does; use tcp instead"
        if importlib.util.find_spec("ucxx") is None:
            return f"needs ucxx, which is not installed; {how_to_install('ucx')}"
        return None

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks at the URL's address and link up with each."""
        from .joining import join

        return await join(job)


PLUGIN = UcxPlugin()
