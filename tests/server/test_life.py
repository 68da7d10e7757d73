"""What becomes of a request when its client goes, when it takes too long, and when the server ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paceline import SamplingParams
from paceline.engine import LLM
from paceline.errors import ModelFileError
from paceline.server.run import Server, listen
from paceline.server.settings import Settings
from support.live_server import GatedTarget, Live, chat_llm, live_server, raw_post, read_all, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "abcabc", "max_tokens": 10**6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = chat_llm(context_limit=2**15, pages=2**13, max_rows=16)
    with live_server(llm, max_num_seqs=2, max_queue=2) as running:
        yield running


@pytest.fixture
def gate(live: Live) -> Iterator[threading.Event]:
    """Closed: no pass runs before the test lets it."""
    target = live.llm.engine.target
    assert isinstance(target, GatedTarget)
    target.gate.clear()
    yield target.gate
    target.gate.set()
    until(live.idle)


def passes(live: Live) -> int:
    return live.stats().passes


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_decoding_frees_its_slot(live: Live, stream: bool) -> None:
    for _ in range(3):
        with live.connect() as connection:
            connection.sendall(raw_post(TEXT, LONG | {"stream": stream}))
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
            until(lambda: live.stats().generated_tokens > 0 and live.stats().running == 1)
        until(live.idle)
    assert live.stats().kv_used == 0.0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_prompt_is_read(
    live: Live, stream: bool, gate: threading.Event
) -> None:
    with live.connect() as connection:
        connection.sendall(raw_post(TEXT, LONG | {"prompt": "ab" * 4000, "stream": stream}))
        until(lambda: live.stats().running == 1)
    before = passes(live)
    until(lambda: len(live.llm._cancelled) > 0)
    gate.set()
    until(live.idle)
    assert passes(live) <= before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_disturbs_nobody(
    live: Live, stream: bool, gate: threading.Event
) -> None:
    expected = live_reference(live, gate)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(live.post, TEXT, SHORT) for _ in range(2)]
        until(lambda: live.stats().running + live.stats().waiting == 2)
        with live.connect() as connection:
            connection.sendall(raw_post(TEXT, LONG | {"stream": stream}))
            until(lambda: live.stats().waiting >= 1 and sum(counts(live)) == 3)
        until(lambda: len(live.llm._cancelled) > 0)
        gate.set()
        for other in others:
            assert other.result().json()["choices"][0]["text"] == expected
    until(live.idle)


SHORT = {"prompt": "xyz", "max_tokens": 30, "temperature": 0}


def counts(live: Live) -> tuple[int, int]:
    stats = live.stats()
    return stats.running, stats.waiting


def live_reference(live: Live, gate: threading.Event) -> str:
    gate.set()
    text: str = live.post(TEXT, SHORT).json()["choices"][0]["text"]
    until(live.idle)
    gate.clear()
    return text


def test_a_full_queue_is_a_429(live: Live, gate: threading.Event) -> None:
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(live.post, TEXT, SHORT) for _ in range(4)]
        until(lambda: sum(counts(live)) == 4)
        for body in (SHORT, SHORT | {"stream": True}, SHORT | {"prompt": ["a"] * 4}):
            refused = live.post(TEXT, body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "the limit is 2" in error["message"]
        gate.set()
        assert {answer.result().status_code for answer in waiting} == {200}
    until(live.idle)
    never = live.post(TEXT, SHORT | {"prompt": ["a"] * 5})
    assert never.status_code == 400  # it could be asked for ever again
    assert "5 texts are asked for at once; the limit is 4" in never.json()["error"]["message"]
    assert live.post(TEXT, SHORT | {"prompt": ["a"] * 4}).status_code == 200


def test_a_request_that_takes_too_long_ends(live: Live, gate: threading.Event) -> None:
    refused = live.post(TEXT, SHORT | {"timeout": 0.05})
    assert refused.status_code == 408
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["code"] == "request_timeout"
    assert "0.05 seconds" in refused.json()["error"]["message"]
    (event,) = live.stream(TEXT, SHORT | {"timeout": 0.05})
    assert event["error"]["code"] == "request_timeout"
    until(lambda: len(live.llm._cancelled) == 0 or gate.set() is None)


def test_the_server_bounds_every_request() -> None:
    llm = chat_llm(context_limit=2**15, pages=2**13)
    with live_server(llm, request_timeout_s=0.2) as live:
        assert "0.2 seconds" in live.post(TEXT, LONG | {"timeout": 100}).json()["error"]["message"]
        assert "0.1 seconds" in live.post(TEXT, LONG | {"timeout": 0.1}).json()["error"]["message"]
        events = live.stream(TEXT, LONG)
        assert events[-1]["error"]["code"] == "request_timeout"
        assert len(events) > 1
        until(live.idle)


def test_a_silent_stream_shows_that_it_lives(live: Live, gate: threading.Event) -> None:
    object.__setattr__(live.server.backend.settings, "ping_s", 0.02)
    with live.connect() as connection:
        connection.sendall(raw_post(TEXT, SHORT | {"stream": True}, "Connection: close"))
        data = b""
        while data.count(b": ping\n\n") < 3:
            data += connection.recv(4096)
        gate.set()
        data += read_all(connection)
    object.__setattr__(live.server.backend.settings, "ping_s", 15.0)
    assert b"data: [DONE]\n\n" in data


def test_half_closed_connections_count_as_gone(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(raw_post(TEXT, LONG))
        until(lambda: live.stats().running == 1)
        connection.shutdown(socket.SHUT_WR)
        until(live.idle)


def test_a_client_that_leaves_amid_its_body_is_no_failure(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    for ending in (socket.SHUT_WR, socket.SHUT_RDWR):
        with live.connect() as connection:
            connection.sendall(raw_post(TEXT, SHORT)[:-5])
            connection.shutdown(ending)
            assert read_all(connection) == b""
    assert live.post(TEXT, SHORT).status_code == 200
    assert caplog.records == []


def test_clients_that_dawdle_are_cut_off() -> None:
    server_settings = {"body_timeout_s": 0.2}
    with live_server(chat_llm(), **server_settings) as live:
        with live.connect() as connection:
            connection.sendall(raw_post(TEXT, SHORT)[:-5])
            assert b"408" in connection.recv(4096)
        for start in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
            with live.connect() as connection:
                connection.sendall(start)
                assert read_all(connection) == b""
        with live.connect() as connection:  # one whole request, then half of another
            connection.sendall(raw_post(TEXT, SHORT) + b"POST /v1")
            assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off() -> None:
    llm = chat_llm(context_limit=2**15, pages=2**13)
    with live_server(llm, body_timeout_s=0.5) as live:
        live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with live.connect() as connection:
            connection.sendall(raw_post(TEXT, LONG | {"stream": True, "logprobs": 20}))
            until(lambda: live.stats().running == 1)
            until(live.idle)
        assert live.stats().generated_tokens < 2**15 - 8


def test_memory_of_cancelled_requests_does_not_pile_up() -> None:
    llm = chat_llm(context_limit=2**15, pages=2**13)
    with live_server(
        llm, max_num_seqs=2, max_queue=64
    ) as live:  # none is refused, however late clients are missed
        for i in range(30):
            with live.connect() as connection:
                connection.sendall(raw_post(TEXT, LONG | {"stream": bool(i % 2)}))
                if i % 3:
                    until(lambda: live.stats().running > 0)
        until(live.idle)
        assert llm.engine.idle
        llm.engine.cache.check_integrity()
        assert not live.server.backend.model.service._live


def run_server(load: Any, **settings: Any) -> tuple[Server, threading.Thread, str]:
    server = Server(Settings(**{"names": ("stub",)} | settings), load)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    return server, thread, url


def test_while_loading_only_some_routes_answer() -> None:
    loaded = threading.Event()

    def load() -> tuple[LLM, dict[str, Any]]:
        assert loaded.wait(30)
        return chat_llm(), {}

    server, thread, url = run_server(load)
    try:
        for path in ("/health", "/v1/health", "/v1/models"):
            answer = httpx.get(url + path)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert answer.headers["retry-after"] == "1"
        assert httpx.post(url + TEXT, json=SHORT).status_code == 503
        for path in ("/version", "/metrics", "/openapi.json", "/docs"):
            assert httpx.get(url + path).status_code == 200
        loaded.set()
        until(lambda: httpx.get(url + "/health").json() == {"status": "ok"})
        assert httpx.post(url + TEXT, json=SHORT).status_code == 200
    finally:
        loaded.set()
        server.should_exit = True
        thread.join(30)
        server.backend.close()


def test_a_model_that_does_not_load_ends_the_server() -> None:
    def load() -> tuple[LLM, dict[str, Any]]:
        raise ModelFileError("no such model", "give another")

    server, thread, _ = run_server(load)
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(server.failure, ModelFileError)


def test_the_first_signal_drains_and_the_second_kills() -> None:
    llm = chat_llm(context_limit=2**15, pages=2**13)
    expected = llm.generate("abcabc", SamplingParams(temperature=0, max_tokens=300)).text
    server, thread, url = run_server(lambda: (llm, {}))
    until(lambda: httpx.get(url + "/health").status_code == 200)
    target = llm.engine.target
    assert isinstance(target, GatedTarget)
    with ThreadPoolExecutor(1) as pool:
        target.gate.clear()
        asked = LONG | {"max_tokens": 300}
        answer = pool.submit(httpx.post, url + TEXT, json=asked, timeout=60)
        until(lambda: server.backend.metrics.snapshot().running == 1)  # type: ignore[union-attr]
        server.handle_exit(15, None)
        until(lambda: not accepts(url))
        target.gate.set()
        assert answer.result().json()["choices"][0]["text"] == expected
    thread.join(30)
    assert not thread.is_alive()
    assert not server.force_exit
    server.backend.close()


def test_the_second_signal_ends_what_runs() -> None:
    llm = chat_llm(context_limit=2**15, pages=2**13)
    server, thread, url = run_server(lambda: (llm, {}))
    until(lambda: httpx.get(url + "/health").status_code == 200)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, url + TEXT, json=LONG, timeout=60)
        until(lambda: server.backend.metrics.snapshot().running == 1)  # type: ignore[union-attr]
        server.handle_exit(2, None)
        server.handle_exit(2, None)
        thread.join(30)
        assert not thread.is_alive()
        server.backend.close()
        assert llm.engine.idle
        with pytest.raises(httpx.HTTPError):
            answer.result()


def accepts(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_key_is_asked_for_everywhere_but_on_the_doorstep() -> None:
    with live_server(chat_llm(), api_key="sesame") as live:
        assert live.get("/health").status_code == 200
        assert live.get("/v1/health").status_code == 200
        assert live.client.head("/health").status_code == live.client.head("/v1/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json"):
            refused = live.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for given in ("sesame", "Bearer", "Bearer sesam", "Bearer sesame2", "Basic sesame", "Bearer \xe9"):
            refused = live.post(TEXT, SHORT, headers={"Authorization": given.encode("latin-1")})  # type: ignore[arg-type]
            assert refused.status_code == 401
        assert live.post(TEXT, SHORT, headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_cors_is_off_unless_asked_for() -> None:
    origin = {"Origin": "https://example.org"}
    preflight = origin | {"Access-Control-Request-Method": "POST"}
    with live_server(chat_llm()) as live:
        assert "access-control-allow-origin" not in live.get("/health", headers=origin).headers
        assert live.client.options(TEXT, headers=preflight).status_code == 405
    with live_server(chat_llm(), cors_origins=("https://example.org",), api_key="k") as live:
        allowed = live.client.options(TEXT, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        refused = live.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://example.org"
        other = live.get("/health", headers={"Origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers
