"""HTTP: the routes, streams, errors, and the server's start and end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .batching import RefusedError, Work
from .front import Front
from .options import Options

__all__ = ["application", "serving"]


R = TypeVar("R")

_PIXELS = 64
#: Bytes of JSON that are read on the event loop; more go to a thread.
_INLINE_BYTES = 16 * 1024
#: Bytes of JSON that one row may take.
_ROW_BYTES = 2048


def application(front: Front, options: Options) -> Starlette:
    """The ASGI application over `front`."""

    async def page(request: Request) -> Response:
        return FileResponse(Path(__file__).with_name("page.html"))

    async def alive(request: Request) -> Response:
        return JSONResponse({"alive": True})

    async def readiness(request: Request) -> Response:
        state = {"ready": front.ready, "draining": front.draining}
        return JSONResponse(state, 200 if front.ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(front.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(request: Request) -> Response:
        return JSONResponse(front.metrics.snapshot())

    async def classify(request: Request) -> Response:
        started = monotonic()
        try:
            pixels, stream = await _read(request, options)
            work = front.submit(pixels)
        except RefusedError as error:
            front.metrics.request(error.code, 0.0)
            return _refusal(error)
        except ClientDisconnect:
            front.metrics.request("disconnected", 0.0)
            return Response(status_code=499)
        if stream:
            kind = "text/event-stream" if _wants_events(request) else "application/x-ndjson"
            return _Streamed(front, work, kind)
        return await _whole(front, work, request, started)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/healthz", alive),
            Route("/readyz", readiness),
            Route("/metrics", metrics),
            Route("/stats", stats),
            Route("/v1/classify", classify, methods=["POST"]),
        ]
    )


# ---------------------------------------------------------------------- questions


def _wants_events(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "").lower()


async def _read(request: Request, options: Options) -> tuple[np.ndarray, bool]:
    """The rows ``[n, 64]`` of a request, and whether it wants a stream.

    Raises:
        RefusedError: it is too large, comes too slowly, or is not what it should be.
        ClientDisconnect: the client has gone.
    """
    binary = request.headers.get("content-type", "").lower().startswith("application/octet-stream")
    most = options.max_request * (4 * _PIXELS if binary else _ROW_BYTES) + 1024
    body = bytearray()
    try:
        async with asyncio.timeout(options.request_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    text = f"more than {most} bytes; send at most {options.max_request} rows at once"
                    raise RefusedError(413, "too_large", text)
    except TimeoutError:
        raise RefusedError(408, "slow_request", "the request did not come in time") from None
    if binary:
        stream = request.query_params.get("stream") == "1" or _wants_events(request)
        if len(body) % (4 * _PIXELS):
            raise RefusedError(400, "bad_request", "the body is float32, 64 numbers a row")
        pixels = np.frombuffer(body, dtype="<f4").reshape(-1, _PIXELS)
    elif len(body) > _INLINE_BYTES:
        pixels, stream = await asyncio.to_thread(_parse, bytes(body))
    else:
        pixels, stream = _parse(bytes(body))
    if not len(pixels) or not ((pixels >= 0) & (pixels <= 16)).all():  # nor NaN
        raise RefusedError(400, "bad_request", "images are one row or more of 64 numbers from 0 to 16")
    if len(pixels) > options.max_request:
        text = f"{len(pixels)} rows; send at most {options.max_request} at once"
        raise RefusedError(413, "too_large", text)
    return pixels, stream or _wants_events(request)


def _parse(body: bytes) -> tuple[np.ndarray, bool]:
    try:
        told = json.loads(body)
        images = np.array(told["images"])
        stream = told.get("stream", False)
        if images.ndim != 2 or images.shape[1] != _PIXELS or images.dtype.kind not in "iuf":
            raise ValueError
        if type(stream) is not bool:
            raise ValueError
        with np.errstate(over="ignore"):  # what is out of range is told to the client, not to the log
            pixels = images.astype(np.float32)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        text = '{"images": [[64 numbers from 0 to 16], …], "stream": false} is what a request looks like'
        raise RefusedError(400, "bad_request", text) from None
    return pixels, stream


# ---------------------------------------------------------------------- answers


def _refusal(error: RefusedError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(_as_json(error), error.status, headers)


def _as_json(error: RefusedError) -> dict[str, Any]:
    return {"error": error.code, "message": str(error)}


def _results(start: int, scores: np.ndarray) -> list[dict[str, Any]]:
    best = scores.argmax(axis=1).tolist()
    rows = enumerate(zip(best, scores.tolist(), strict=True), start)
    return [{"row": row, "class": guess, "scores": values} for row, (guess, values) in rows]


async def _unless_gone(receive: Receive, waiting: Coroutine[Any, Any, R]) -> R:
    """What `waiting` returns or raises.

    Raises:
        ClientDisconnect: the client went away before.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(waiting), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()


async def _whole(front: Front, work: Work, request: Request, started: float) -> Response:
    """All rows in one answer. A client that goes meanwhile ends its work."""

    async def collect() -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        async for start, scores in work.parts():
            results += _results(start, scores)
        return sorted(results, key=lambda result: result["row"])

    code = "disconnected"
    try:
        results = await _unless_gone(request.receive, collect())
        code = "ok"
        return JSONResponse({"results": results})
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except RefusedError as error:
        code = error.code
        return _refusal(error)
    finally:
        front.finish(work)
        front.metrics.request(code, monotonic() - started)


class _Streamed(StreamingResponse):
    """Rows as they come: a line of JSON each, or an event each.

    An error after the first row is the last line, with ``error`` and ``message``; before it, the status
    says it.
    """

    def __init__(self, front: Front, work: Work, kind: str) -> None:
        super().__init__(self._lines(), media_type=kind, headers={"Cache-Control": "no-store"})
        self._front = front
        self._work = work
        self._events = kind == "text/event-stream"
        self._code = "disconnected"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._parts = self._work.parts()

        async def first() -> tuple[int, np.ndarray]:
            return await anext(parts)

        try:
            self._first = await _unless_gone(receive, first())
            await super().__call__(scope, receive, send)
        except RefusedError as error:
            self._code = error.code
            await _refusal(error)(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._front.finish(self._work)
            self._front.metrics.request(self._code, monotonic() - self._work.started)

    async def _lines(self) -> AsyncIterator[str]:
        try:
            yield self._text(_results(*self._first))
            async for part in self._parts:
                yield self._text(_results(*part))
            self._code = "ok"
        except RefusedError as error:
            self._code = error.code
            yield self._text([_as_json(error)])

    def _text(self, lines: list[dict[str, Any]]) -> str:
        before, after = ("data: ", "\n\n") if self._events else ("", "\n")
        return "".join(f"{before}{json.dumps(line)}{after}" for line in lines)


# ---------------------------------------------------------------------- start and end


class _Server(uvicorn.Server):
    """Leaves signals alone: the front drains first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send at once.

    asyncio sees to that only where a socket knows its protocol, which those that Python accepts do not. The
    body of an answer, which comes after its head, then waits for the client to acknowledge the head: 40 ms.

    Raises:
        OSError: the address cannot be listened on.
    """
    listener = socket.create_server((host, port), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # they inherit it
    return listener


@asynccontextmanager
async def serving(front: Front, options: Options) -> AsyncIterator[None]:
    """Listen and answer, until the block ends; SIGTERM and SIGINT drain, a second one ends at once.

    Raises:
        OSError: the address cannot be listened on.
    """
    listener = listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        application(front, options), log_level="warning", access_log=False, timeout_graceful_shutdown=2
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve([listener]))
    print(f"serving on http://{host}:{port}", flush=True)
    loop = asyncio.get_running_loop()
    draining: set[asyncio.Task[None]] = set()

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)  # not KeyboardInterrupt, with a traceback of every open request
        if not front.draining:
            draining.add(asyncio.ensure_future(front.drain()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()
