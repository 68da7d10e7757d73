"""How answers leave: whole, or as events. Either way a client that goes away cancels its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from paceline.engine import Chunk
from paceline.server.failures import ApiError, client_gone, from_error
from paceline.server.feed import ClientGoneError, Feed, Item
from paceline.server.guard import WRITE, Write
from paceline.server.reply import DONE, PING, Reply, dumps

_log = logging.getLogger("paceline.server")


async def whole(request: Request, feed: Feed, reply: Reply, *, timeout: float | None) -> Response:
    """Wait for all of it, then answer."""

    def take(items: list[Item]) -> bool:
        for prompt, item in items:
            chunk = _usable(item)
            if chunk.completion is not None:
                reply.take(prompt, chunk.completion, chunk.index)
        return reply.complete

    try:
        with _watched(feed, request.receive, timeout):
            await feed.run(take)
    except Exception as error:
        return _failure(error).response()
    headers = {"x-tokens-per-second": f"{reply.rate():.2f}"}
    return Response(dumps(reply.document()).encode(), headers=headers, media_type="application/json")


class EventStream(Response):
    """Sends events as they come; ends with an error event when something fails under way.

    Args:
        ping_s: seconds of silence after which a comment shows that the stream lives.
    """

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, reply: Reply, *, timeout: float | None, ping_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed
        self._reply = reply
        self._timeout = timeout
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ping: asyncio.TimerHandle | None = None
        write: Write = scope["state"][WRITE]
        sent = True

        def take(items: list[Item]) -> bool:
            nonlocal sent
            text = "".join([self._reply.events(prompt, _usable(item)) for prompt, item in items])
            if text:
                sent = True
                write(text.encode())
            return self._reply.complete

        def tick() -> None:
            nonlocal sent, ping
            if not sent:
                write(PING)
            sent = False
            ping = asyncio.get_running_loop().call_later(self._ping_s, tick)

        last = b""
        try:
            with _watched(self._feed, receive, self._timeout):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                tick()
                await self._feed.run(take)
        except ClientGoneError:
            return
        except Exception as error:
            last = f"data: {dumps(_failure(error).body())}\n\n{DONE}".encode()
        finally:
            if ping is not None:
                ping.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})


@contextmanager
def _watched(feed: Feed, receive: Receive, timeout: float | None) -> Iterator[None]:
    """While the body runs, end the feed when the client goes away or the time is over; at its end, cancel."""
    watch = asyncio.create_task(_disconnect(feed, receive))
    timer = None
    if timeout is not None:
        timer = asyncio.get_running_loop().call_later(timeout, feed.fail, _late(timeout))
    try:
        yield
    finally:
        watch.cancel()
        if timer is not None:
            timer.cancel()
        feed.cancel()


async def _disconnect(feed: Feed, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    feed.fail(ClientGoneError())


def _late(timeout: float) -> ApiError:
    # OpenAI's clients repeat a request that timed out, unless they are told not to.
    headers = {"x-should-retry": "false"}
    text = f"the request took more than {timeout:g} seconds; ask for fewer tokens, or raise the timeout"
    return ApiError(408, text, code="request_timeout", headers=headers)


def _usable(item: Chunk | Exception) -> Chunk:
    if isinstance(item, Exception):
        raise item
    if item.finish_reason == "abort":
        raise ApiError(503, "the request was ended by the server", code="shutting_down")
    return item


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ClientGoneError):
        return client_gone()
    told = from_error(error)
    if told.status_code == 500:
        _log.error("a request failed", exc_info=error)
    return told
