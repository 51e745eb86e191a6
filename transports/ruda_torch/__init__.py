"""``torch+gloo://`` and ``torch+nccl://``: this library's own links, torch's collectives for large tensors.

Control messages, small calls and all that torch has no operation for go over the links of ``tcp://``; large
collectives run in process groups of torch.distributed. Where the program has called
``torch.distributed.init_process_group`` already, rank, world size and meeting place come from there.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruda_async.transport import Job, Transport, get_plugin, how_to_install, merge_parameters, param

__all__ = ["GLOO", "NCCL", "TorchParameters", "TorchPlugin"]

#: The transport whose links carry everything but native collectives.
_LINKS = "tcp"


@dataclass(frozen=True, slots=True)
class TorchParameters:
    """Parameters of ``torch+…://``, beside those of the links."""

    native_bytes: int = param(
        256 * 1024,
        doc="collectives of at least this input run in torch.distributed where the rules allow it",
        unit="bytes",
        minimum=0,
        alike=True,
    )


class TorchPlugin:
    """The plugin object that an entry point names.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        preference: as `ruda_async.transport.Plugin` has it.
    """

    rank_per = "process"

    def __init__(self, backend: str, preference: int) -> None:
        self.backend = backend
        self.scheme = f"torch+{backend}"
        self.summary = f"TCP links, with large collectives run by torch.distributed's {backend}"
        self.example = f"{self.scheme}://127.0.0.1:0"
        self.preference = preference
        self.provider_names = (backend,)

    @cached_property
    def parameters(self) -> type[Any]:
        """The links' parameters, and `TorchParameters`."""
        merged: type[Any] = merge_parameters(
            "TorchParameters", TorchParameters, get_plugin(_LINKS).parameters
        )
        return merged

    def unavailable(self) -> str | None:
        """None where torch is installed, with torch.distributed and this backend."""
        if importlib.util.find_spec("torch") is None:
            return f"torch is not installed; {how_to_install('torch')}"
        if self.backend == "nccl" and not Path("/dev/nvidiactl").exists():
            return "there is no NVIDIA GPU (or no driver for it) here; use torch+gloo, or tcp"
        if "torch" in sys.modules:
            from .groups import missing

            return missing(self.backend)
        return None

    def placed(self) -> tuple[int, int] | None:
        """Rank and world size of the default process group, where the program has one."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return distributed.get_rank(), distributed.get_world_size()

    async def connect(self, job: Job) -> Transport:
        """Link up over ``tcp://``; process groups are made when they are first used."""
        from .transport import open_transport

        return await open_transport(job, self.backend, get_plugin(_LINKS), placed=self.placed() is not None)


GLOO = TorchPlugin("gloo", -20)
NCCL = TorchPlugin("nccl", -30)
