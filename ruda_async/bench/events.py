"""How rank 0 tells the program that started it what it has measured: lines of JSON on a local socket."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Inbox", "Outbox"]

Event = dict[str, Any]

_PATIENCE = 2.0


class Inbox:
    """Calls `handle` with each event, on a thread of its own. A context manager; its end waits for the rest.

    Attributes:
        address: for `Outbox`; in a folder that only this user can read.
    """

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._folder = tempfile.TemporaryDirectory(prefix="ruda-bench-")
        self.address = str(Path(self._folder.name, "events"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen(1)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="bench events", daemon=True)

    @property
    def folder(self) -> Path:
        """A private folder that lives as long as this."""
        return Path(self._folder.name)

    def __enter__(self) -> Inbox:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(self.address)  # wakes accept() where no rank ever came
        # After a failure, a rank that is a thread of this process may be left behind with its end open.
        self._thread.join(None if error is None else _PATIENCE)
        self._server.close()
        self._folder.cleanup()
        if self._error is not None and error is None:
            raise self._error

    def _main(self) -> None:
        try:
            while True:
                connection, _ = self._server.accept()
                with connection, connection.makefile("r", encoding="utf-8") as lines:
                    for line in lines:
                        self._handle(json.loads(line))
                if self._closing:
                    return
        except BaseException as error:
            self._error = error


class Outbox:
    """Rank 0's end; without an address, what is put in is dropped: the other ranks'."""

    def __init__(self, address: str | None) -> None:
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)

    def put(self, kind: str, **content: Any) -> None:
        """Send one event."""
        if self._socket is not None:
            self._socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def close(self) -> None:
        """Say that this was all."""
        if self._socket is not None:
            self._socket.close()
