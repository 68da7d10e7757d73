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
from paceline.server.feed import ClientGoneError, Feed
from paceline.server.reply import DONE, PING, Reply, dumps

_log = logging.getLogger("paceline.server")


async def whole(request: Request, feed: Feed, reply: Reply, *, timeout: float | None) -> Response:
    """Wait for all of it, then answer."""
    try:
        with _watched(feed, request.receive, timeout):
            while not reply.complete:
                for prompt, item in await feed.next():
                    if isinstance(item, Exception):
                        raise item
                    if item.completion is not None:
                        _refuse_cut(item)
                        reply.take(prompt, item.completion, item.index)
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
        self._sent = True
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        self._tick()
        try:
            with _watched(self._feed, receive, self._timeout):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._events(send)
        except ClientGoneError:
            return
        except Exception as error:
            event = f"data: {dumps(_failure(error).body())}\n\n{DONE}"
            await _send(send, event.encode(), more=False)
        else:
            await _send(send, b"", more=False)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _events(self, send: Send) -> None:
        while not self._reply.complete:
            items = await self._feed.next()
            events: list[str] = []
            for prompt, item in items:
                if isinstance(item, Exception):
                    raise item
                _refuse_cut(item)
                events.append(self._reply.events(prompt, item))
            text = "".join(events)
            if text or not items:
                self._sent = True
                await _send(send, text.encode() or PING)

    def _tick(self) -> None:
        """Every so often: if nothing was sent since the last time, have a ping sent."""
        if not self._sent:
            self._feed.nudge()
        self._sent = False
        self._timer = asyncio.get_running_loop().call_later(self._ping_s, self._tick)


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


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


def _refuse_cut(chunk: Chunk) -> None:
    if chunk.finish_reason == "abort":
        raise ApiError(503, "the request was ended by the server", code="shutting_down")


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ClientGoneError):
        return client_gone()
    told = from_error(error)
    if told.status_code == 500:
        _log.error("a request failed", exc_info=error)
    return told
