"""``ucx://`` itself on a real device: run by ``tox -e gpu``. Collectives are in `tests/test_gpu.py`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from ucx_support import run_transports

from ruda_async.transport import Transport

torch = pytest.importorskip("torch", reason="pip install 'ruda-async[torch]'")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("nbytes", [1000, 9_000_001])
async def test_device_memory_goes_down_as_it_is(nbytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """The transport itself, between two buffers on the device, ordered with the current stream."""

    async def body(t: Transport) -> bool:
        peer = 1 - t.rank
        source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 2048
        source += t.rank + 1  # queued behind all that

        class Device:
            def __init__(self, tensor: Any) -> None:
                self.tensor = tensor
                self.nbytes = nbytes
                self.__cuda_array_interface__ = tensor.__cuda_array_interface__

        receive = t.recv_into(peer, 1, (Device(target),))
        sending = t.send(peer, 1, (Device(source),))
        await receive
        await sending
        assert np.array_equal(target.cpu().numpy(), np.full(nbytes, peer + 1, np.uint8))
        return t.capabilities.device_memory

    with caplog.at_level(logging.INFO, "ruda_async.ucx"):
        native = await run_transports(body)
    assert ("staged" in caplog.text) is not all(native)
