"""A server on raw sockets that answers POST requests exactly as scripted, byte for byte."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

HANG: Literal["hang"] = "hang"
"""Send nothing more until the client goes away."""

RESET: Literal["reset"] = "reset"
"""Break the connection off."""

Step = bytes | Literal["hang", "reset"]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


@dataclass
class Scripted:
    """Attributes:
    steps: what every POST is answered with.
    asked: path and body of every POST; `gone` is set when a client left during HANG.
    """

    steps: Sequence[Step]
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)


@contextmanager
def scripted_server(*steps: Step) -> Iterator[Scripted]:
    script = Scripted(steps)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=_serve, args=(listener, script))
        thread.start()
        try:
            yield script
        finally:
            with socket.create_connection(listener.getsockname()) as last:
                last.sendall(b"QUIT / HTTP/1.1\r\n\r\n")
            thread.join()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; of no data, the last one."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(*pieces: str, tokens: int, **more: Any) -> list[bytes]:
    """A whole streamed chat answer, one chunk per event."""
    deltas = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}} | more
    events = [event(value) for value in (*deltas, last, usage)]
    return [STREAM, *map(chunk, [*events, b"data: [DONE]\n\n"]), chunk(b"")]


def _serve(listener: socket.socket, script: Scripted) -> None:
    threads = []
    while True:
        connection, _ = listener.accept()
        head, body = _request(connection)
        if head.startswith(b"QUIT"):
            connection.close()
            break
        threads.append(threading.Thread(target=_answer, args=(connection, head, body, script)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _request(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head, body


def _answer(connection: socket.socket, head: bytes, body: bytes, script: Scripted) -> None:
    with connection:
        if head.startswith(b"GET"):
            connection.sendall(JSON + json.dumps({"data": [{"id": "m", "owned_by": "someone"}]}).encode())
            return
        script.asked.append((head.split()[1].decode(), json.loads(body)))
        for step in script.steps:
            if step == HANG:
                while _receive(connection):
                    pass
                script.gone.set()
            elif step == RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                assert isinstance(step, bytes)
                connection.sendall(step)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""
