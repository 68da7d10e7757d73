"""A real server on a real port, on a thread of the test's process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from paceline.core import Output, Rows
from paceline.engine import LLM
from paceline.engine.service import ServiceStats
from paceline.planning.pass_time import PassTime
from paceline.server.run import Server, listen
from paceline.server.settings import Settings
from paceline.text.template import ChatTemplate
from support.stub_target import RepetitiveRule, Rule, StubTarget
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


class GatedTarget(StubTarget):
    """A stub target whose passes can be held up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, rows: Rows) -> Output:
        assert self.gate.wait(60)
        return super().forward(rows)


def chat_llm(rule: Rule | None = None, **target: Any) -> LLM:
    """A stub model with a chat template; its target is a `GatedTarget`."""
    stub = GatedTarget(rule or RepetitiveRule(VOCAB_SIZE, peak=4.5), **target)
    template = ChatTemplate(TEMPLATE)
    return LLM.from_target(
        stub, tiny_tokenizer(), chat_template=template, pass_time=PassTime({1: 1e-3, 64: 1.2e-3})
    )


@dataclass
class Live:
    """A running server.

    Attributes:
        url: without a path.
        client: keeps a connection open.
    """

    server: Server
    llm: LLM
    url: str
    port: int
    client: httpx.Client

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer, without [DONE], which must be there."""
        text = self.post(path, body | {"stream": True}).text
        events = [event.removeprefix("data: ") for event in text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return [json.loads(event) for event in events[:-2]]

    def stats(self) -> ServiceStats:
        stats = self.server.backend.metrics.snapshot()
        assert stats is not None
        return stats

    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        stats = self.stats()
        return stats.running == stats.waiting == 0

    def connect(self) -> socket.socket:
        """A bare connection."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(30)
        return connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def raw_post(path: str, body: Any, *headers: str) -> bytes:
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


@contextmanager
def live_server(llm: LLM, **settings: Any) -> Iterator[Live]:
    """Serve `llm` while the body runs; afterwards nothing of it is left."""
    server = Server(Settings(**{"names": ("stub",)} | settings), lambda: (llm, {}))
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{port}"
    client = httpx.Client(base_url=url, timeout=60)
    try:
        live = Live(server, llm, url, port, client)
        until(lambda: live.get("/health").status_code == 200)
        yield live
    finally:
        client.close()
        server.should_exit = True
        server.force_exit = True
        thread.join(30)
        server.backend.close()
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that must come to pass."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.005)
