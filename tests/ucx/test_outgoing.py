"""The sending half of a UCX link against an engine in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ruda_async.transport import Terms, wire

pytest.importorskip("ucxx", reason="pip install 'ruda-async[ucx]'")

from ruda_ucx.outgoing import COUNT, PULL, Outgoing


@pytest.mark.parametrize("let_go_first", [False, True])
async def test_a_send_taken_back_is_told_of_once(let_go_first: bool) -> None:
    """UCX may let go of the last part before or after the loop has told of the cancellation."""
    frames: list[bytes] = []
    parts: list[Callable[[int], None]] = []

    def send(peer: int, endpoint: Any, data: Any, tag: Any, done: Any = None) -> None:
        if done is None:
            frames.append(bytes(data))
        else:
            parts.append(done)

    engine: Any = SimpleNamespace(send=send, tag=lambda value: value, look=lambda future: None)
    outgoing = Outgoing(1, engine, None, 0, Terms(64, 4096), SimpleNamespace(), lambda status: None)  # type: ignore[arg-type]
    waiting = outgoing.send(7, (memoryview(bytes(1000)),), b"")
    sending = asyncio.ensure_future(asyncio.wait_for(waiting, 10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    offer = wire.decode_prefix(memoryview(frames.pop()))
    outgoing.on_pull(offer.ident, 99, PULL.pack(0, 500))
    sending.cancel()
    await asyncio.sleep(0)
    outgoing.fail(7, RuntimeError("the call is over"))
    if not let_go_first:
        await asyncio.sleep(0)
    parts.pop()(0)
    await asyncio.wait((sending,))
    (told,) = frames
    drop = wire.decode_prefix(memoryview(told))
    assert (drop.kind, drop.ident) == (wire.DROP, offer.ident)
    assert COUNT.unpack(told[wire.PREFIX_BYTES :]) == (1,)
    assert outgoing.settling(asyncio.get_running_loop().create_future()) is None
