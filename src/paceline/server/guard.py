"""What stands before the routes: the key, and the clock for clients that dawdle."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.server.failures import ApiError
from paceline.server.settings import Settings

OPEN_PATHS = frozenset({"/health", "/v1/health", "/"})
"""Need no key: whoever watches the server has none, and the page at / asks for it."""


class KeyGuard:
    """Refuses requests that do not carry the key, before anything of them is read."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _open(scope["path"]):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._expected):
                await _unauthorized(bool(given)).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/page/")


def _unauthorized(given: bool) -> ApiError:
    what = "this key is not the server's" if given else "no key was sent"
    return ApiError(
        401,
        f"{what}; send the header `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


_HEAD_LIMIT = 64 * 1024
"""Bytes of a request before its body, at most."""


WRITE = "paceline.write"
"""What a request's state calls the way by which a begun answer of unknown length gets its next part."""

Write = Callable[[bytes], None]
"""Hands a part, not empty, to the connection at once.

`send` would pass it through a coroutine of each layer between a route and the connection, which costs more
than all else that a token's event needs. A client that does not read is not waited for: what it leaves is
kept, and after a while its connection is cut.
"""


class PatientProtocol(HttpToolsProtocol):
    """HTTP/1.1 that waits only so long for a request's headers, and for a client that does not read.

    uvicorn limits how long a connection may idle between requests, not how long one may take to begin, nor
    how much of it there may be.
    """

    def __init__(self, config: Config, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        settings: Settings = config.app.state.settings  # type: ignore[union-attr]
        self._patience_s = settings.body_timeout_s

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._head: int | None = None  # bytes so far of the request whose headers are being read
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > _HEAD_LIMIT and not self.transport.is_closing():
                self.send_400_response(f"The headers have more than {_HEAD_LIMIT} bytes.")
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()
        self.cycle.scope["state"][WRITE] = partial(_write, self.cycle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Run the timer exactly while no request is being read or answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._patience_s, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _write(cycle: RequestResponseCycle, body: bytes) -> None:
    assert cycle.chunked_encoding
    assert body  # an empty chunk would be the end
    if not cycle.disconnected and not cycle.response_complete:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
