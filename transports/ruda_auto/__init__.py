"""``auto://``: for each pair of ranks the best link that both ends have.

Ranks on one host (`ruda_async.transport.host_identity`) take the most preferred transport that links ranks
of one host, the others the most preferred one over a network. Which there are is asked of the registry: every
plugin that states its ``reach`` can take part, and none is known here by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ruda_async.transport import Job, Transport, composable_plugins, param

__all__ = ["PLUGIN", "AutoParameters", "AutoPlugin"]


@dataclass(frozen=True, slots=True)
class AutoParameters:
    """Parameters of ``auto://`` itself; those of the transports that it may take are added to them."""

    without: str = param("", doc="transports not to take on this rank, by scheme, with commas between")
    island: str = param(
        "", doc="ranks that give different names here are linked as if on different hosts, wherever they are"
    )


class AutoPlugin:
    """The plugin object that the entry point names."""

    scheme = "auto"
    summary = "the best link that each pair of ranks has: within a host, or over the network"
    rank_per = "process"
    example = "auto://127.0.0.1:0"
    #: Above the transports over a network that it is made of, below those of one host.
    preference = 19

    @property
    def parameters(self) -> type[Any]:
        """`AutoParameters` and the parameters of every transport that may be taken, each name once."""
        from .plugins import joined

        classes = [AutoParameters, *(plugin.parameters for plugin in composable_plugins())]
        return joined(tuple(classes))

    def unavailable(self) -> str | None:
        """None where at least one transport over a network can be taken."""
        from .plugins import why_not

        reasons = []
        for plugin in composable_plugins():
            if getattr(plugin, "reach", "") == "network":
                reason = why_not(plugin)
                if reason is None:
                    return None
                reasons.append(f"{plugin.scheme}: {reason}")
        listed = "; ".join(reasons) or "none is installed"
        return f"no transport over a network is usable ({listed}); install one"

    async def connect(self, job: Job) -> Transport:
        """Meet the other ranks at the URL's address, settle who is linked how, and link up."""
        from .links import open_links
        from .router import AutoTransport

        links, plan = await open_links(job)
        transport = AutoTransport(job, links, plan)
        try:
            await transport.agree(job)
        except BaseException:
            transport.abort("its ranks did not come to an agreement")
            raise
        return transport


PLUGIN = AutoPlugin()
