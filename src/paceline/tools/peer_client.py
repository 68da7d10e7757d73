"""Ask an OpenAI-compatible server over HTTP, streamed or not, and note when every piece of text came.

http.client in the caller's thread, one connection per request: a load generator shares the machine with what
it measures, and this takes a third of the processor time per piece that an asynchronous client takes.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from paceline.core import SamplingParams, SpeculationStats
from paceline.errors import RequestError, ResourceError, UsageError

TIMEOUT_S = 900.0
_OURS = ("n", "verification", "max_tokens", "logprobs", "logit_bias")
_DONE = b"[DONE]"
_PIECE_BYTES = 1 << 16
_REASON_BYTES = 2000

Kind = Literal["not reached", "timed out", "broken off", "refused", "error event", "odd answer", "no usage"]


class PeerError(RequestError):
    """A server that did not answer as asked; `kind` is what to count it under, `status` its HTTP status."""

    def __init__(self, kind: Kind, message: str, hint: str = "see the server's log", status: int = 0) -> None:
        super().__init__(message, hint)
        self.kind = f"HTTP {status}" if kind == "refused" else kind


@dataclass(slots=True)
class Answer:
    """What one request brought. Times are `time.perf_counter` seconds.

    Attributes:
        started: when it was sent; `ended` when its last byte came.
        pieces: when each piece of text came; a piece is any number of tokens.
        texts: one text per choice.
        usage: as the server counts tokens; `timings` as llama-server and Paceline tell them.
    """

    started: float
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def finish_reason(self) -> str:
        return self.finish_reasons.get(0, "")

    @property
    def prompt_tokens(self) -> int:
        return int((self.usage or {}).get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        return int(((self.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def completion_tokens(self) -> int:
        """Raises PeerError when the server did not tell: then nothing can be counted."""
        count = (self.usage or {}).get("completion_tokens")
        if not isinstance(count, int):
            raise PeerError(
                "no usage",
                "the server sent no usage, so its tokens cannot be counted",
                "use a server that honours stream_options.include_usage",
            )
        return count

    @property
    def speculation(self) -> SpeculationStats | None:
        """What `timings` tell of drafts; a pass commits one token beside the accepted ones."""
        timings = self.timings or {}
        if "draft_n" not in timings:
            return None
        accepted = timings.get("draft_n_accepted", 0)
        decoded = max(self.completion_tokens - 1, 0)
        passes = max(decoded - accepted, 0)
        return SpeculationStats(
            passes=passes, drafted=timings["draft_n"], accepted=accepted, committed=decoded
        )

    def take(self, value: dict[str, Any], now: float) -> None:
        """Add an event of a stream, or a whole answer."""
        if value.get("error"):
            raise PeerError("error event", f"the server answered {str(value['error'])[:300]}")
        self.usage = value.get("usage") or self.usage
        self.timings = value.get("timings") or self.timings
        for choice in value.get("choices") or ():
            index = choice.get("index") or 0
            said = choice.get("delta") or choice.get("message") or {}
            piece = choice.get("text") or said.get("content")
            piece = piece or said.get("reasoning") or said.get("reasoning_content")
            if reason := choice.get("finish_reason"):
                self.finish_reasons[index] = reason
            if piece:
                self.pieces.append(now)
                self.texts[index] = self.texts.get(index, "") + piece


class EventParser:
    """Server-sent events from bytes that are split anywhere (WHATWG HTML, section 9.2.6).

    Comments and fields other than `data` are passed over; lines may end in CR LF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of every event that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                yield from self._event()

    def close(self) -> Iterator[bytes]:
        """Yield what a server that ends without an empty line left."""
        yield from self.feed(b"\n\n")

    def _event(self) -> Iterator[bytes]:
        if self._data:
            yield b"\n".join(self._data)
            self._data = []


class Server:
    """One OpenAI-compatible server. Threads may share one.

    Args:
        url: `http://host:port`, with or without `/v1`; the key is read from OPENAI_API_KEY.
        name: how reports call it.

    Raises:
        UsageError: the URL is not one.
        ResourceError: nothing answers there.
    """

    def __init__(self, url: str, name: str = "") -> None:
        self._parts = parts = _http_url(url)
        self.url = url
        self.name = name or parts.netloc
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        models = self._models()
        first: dict[str, Any] = next(iter(models.get("data") or ()), {})
        self.model = str(first.get("id", ""))
        self.llama = first.get("owned_by") == "llamacpp"

    def body(self, params: SamplingParams) -> dict[str, Any]:
        """A streaming request without its prompt: what differs from the defaults, and no cached prompt."""
        default = SamplingParams()
        body: dict[str, Any] = {
            name: value
            for name in params.__dataclass_fields__
            if name not in _OURS and (value := getattr(params, name)) != getattr(default, name)
        }
        body |= {
            "model": self.model,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.llama:
            body["cache_prompt"] = False
        return body

    def ask(self, path: str, body: dict[str, Any], *, timeout: float = TIMEOUT_S) -> Answer:
        """Send one request and return its whole answer.

        Args:
            path: below `/v1`, as in "/completions".
            timeout: seconds for all of it; then the connection is closed, which cancels the request.

        Raises:
            PeerError: there is no whole answer.
        """
        answer = Answer(time.perf_counter())
        end = answer.started + timeout
        try:
            with _Exchange(self, "POST", f"{self._root}/v1{path}", json.dumps(body), end) as exchange:
                _read(exchange, answer)
        except TimeoutError:
            raise PeerError("timed out", f"{self.name} took more than {timeout:g} seconds") from None
        except ConnectionRefusedError as error:
            raise PeerError("not reached", f"{self.name} is not there: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise PeerError("broken off", f"{self.name} broke off: {error!r}") from None
        answer.ended = time.perf_counter()
        return answer

    def get(self, path: str, *, timeout: float = 10.0) -> bytes:
        """Return what `path`, from the server's root, holds. Raises OSError, HTTPException or PeerError."""
        end = time.perf_counter() + timeout
        with _Exchange(self, "GET", self._root + path, None, end) as exchange:
            return b"".join(exchange.pieces())

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=timeout)

    def _models(self) -> dict[str, Any]:
        try:
            value = json.loads(self.get("/v1/models", timeout=TIMEOUT_S))
        except PeerError as error:
            raise ResourceError(
                f"{self.url}/models answered {error.kind}", "check the address and the key"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ResourceError(
                f"no OpenAI-compatible server at {self.url}: {error}", "start it, or check the address"
            ) from None
        if not isinstance(value, dict):
            raise ResourceError(f"{self.url} lists no models", "check the address")
        return value


class _Exchange:
    """One request on a connection of its own, closed with the block.

    Raises:
        TimeoutError: `end`, in `time.perf_counter` seconds, came first.
        PeerError: the server answered another status than 200.
    """

    def __init__(self, server: Server, method: str, path: str, body: str | None, end: float) -> None:
        self._end = end
        self._connection = server.connect(self._left())
        try:
            self._connection.connect()
            assert self._connection.sock is not None
            self._socket: socket.socket = self._connection.sock
            self._connection.request(method, path, body, _headers())
            self._socket.settimeout(self._left())
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                self._refuse(server.name)
        except BaseException:
            self._connection.close()
            raise
        self.streamed = "event-stream" in (self._response.getheader("Content-Type") or "event-stream")

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes."""
        while True:
            self._socket.settimeout(self._left())
            piece = self._response.read1(_PIECE_BYTES)
            if not piece:
                return
            yield piece

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()

    def _left(self) -> float:
        left = self._end - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        return left

    def _refuse(self, name: str) -> None:
        status = self._response.status
        reason = self._response.read(_REASON_BYTES).decode("utf-8", "replace")
        raise PeerError("refused", f"{name} answered {status}: {reason}", status=status)


def _http_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise UsageError(f"{url!r} is not an http URL", "write it as http://127.0.0.1:8080")
    return parts


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _read(exchange: _Exchange, answer: Answer) -> None:
    """Note when each piece came, and look into them afterwards: who measures a server leaves it the cores."""
    if not exchange.streamed:
        _take(answer, b"".join(exchange.pieces()), time.perf_counter())
        return
    arrived, broken = _arrived(exchange)
    parser = EventParser()
    now = answer.started
    for now, piece in arrived:
        for data in parser.feed(piece):
            if data == _DONE:
                return
            _take(answer, data, now)
    for data in parser.close():
        if data != _DONE:
            _take(answer, data, now)
    if broken is not None:  # after what came before it, which may tell why
        raise broken


def _arrived(exchange: _Exchange) -> tuple[list[tuple[float, bytes]], Exception | None]:
    """When each piece of a stream came, and what broke it off."""
    arrived: list[tuple[float, bytes]] = []
    try:
        for piece in exchange.pieces():
            arrived.append((time.perf_counter(), piece))
            if piece.rstrip().endswith(_DONE):
                break
    except (OSError, http.client.HTTPException) as error:
        return arrived, error
    return arrived, None


def _take(answer: Answer, data: bytes, now: float) -> None:
    try:
        answer.take(json.loads(data), now)
    except (ValueError, RecursionError, AttributeError, TypeError):
        raise PeerError("odd answer", f"the server sent {data[:100]!r}, which is no OpenAI answer") from None
