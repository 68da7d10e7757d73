"""A server from start to end: the port opens at once, the model loads behind it, signals drain it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn

from paceline.engine import LLM
from paceline.errors import ResourceError
from paceline.server.app import create_app
from paceline.server.backend import Backend
from paceline.server.guard import PatientProtocol
from paceline.server.metrics import Activity
from paceline.server.settings import Settings
from paceline.text import grammar

_log = logging.getLogger("paceline.server")

Load = Callable[[], tuple[LLM, Mapping[str, Any]]]
"""Loads the model; returns it and the metadata of its file."""

_REPORT_S = 5.0


def serve(settings: Settings, load: Load, *, host: str, port: int, log_level: str = "info") -> bool:
    """Serve until a signal ends it: the first lets running requests finish, the second does not.

    Args:
        port: 0 takes a free one.

    Returns:
        Whether all requests were finished.

    Raises:
        ResourceError: the address cannot be had.
        PacelineError: what `load` raised.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel("DEBUG" if log_level == "debug" else "WARNING")
    listener = listen(host, port)
    server = Server(settings, load, access_log=log_level == "debug")
    _log.info("listening on %s; loading %s", url(host, listener), settings.names[0])
    try:
        server.run([listener])
    finally:
        server.backend.close()
    if server.failure is not None:
        raise server.failure
    return not server.force_exit


def listen(host: str, port: int) -> socket.socket:
    """Open the port. Raises ResourceError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another --port or --host"
        ) from None
    # Connections inherit it. asyncio sets it only where the listener was made with IPPROTO_TCP, and this was
    # not; without it every answer waits 40 ms for the client to acknowledge its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def url(host: str, listener: socket.socket) -> str:
    """Where the server is, as a browser wants it."""
    port = listener.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, with a model behind it.

    Attributes:
        backend: holds the model.
        failure: what kept it from loading.
    """

    def __init__(self, settings: Settings, load: Load, *, access_log: bool = False) -> None:
        app = create_app(settings)
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=access_log,
                server_header=False,
                timeout_keep_alive=60,
            )
        )
        self.backend: Backend = app.state.backend
        self._load = load
        self._activity = Activity()
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        threading.Thread(target=self._bring, name="paceline-load", daemon=True).start()
        self._reports = asyncio.create_task(self._report())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.backend.end()
        self._reports.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # none are left, unless it was forced
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains, the second kills."""
        if self.should_exit:
            self.force_exit = True
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # or each request leaves a trace
        else:
            self.should_exit = True
            _log.info("finishing what runs; once more ends it at once")

    def _bring(self) -> None:
        try:
            llm, metadata = self._load()
            self.backend.serve(llm, metadata)
            _log.info("ready")
            grammar.prepare(llm.tokenizer)
        except Exception as error:
            self.failure = error
            self.should_exit = True

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            stats = self.backend.metrics.snapshot()
            if stats is not None and (line := self._activity.line(stats)):
                _log.info(line)
