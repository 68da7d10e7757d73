"""Reading answers: from bytes split anywhere, streamed or whole, and every way in which there is none."""

from __future__ import annotations

import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.tools.peer_client import Answer, EventParser, PeerError, Server
from support.scripted_server import HANG, JSON, RESET, STREAM, answer, chunk, event, scripted_server

STREAMED = (
    b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 7\n\ndata:{\ndata:}\n\ndata: \xc3\xa9\n\ndata: [DONE]\n'
)
EVENTS = [b'{"a": 1}', b"{\n}", "é".encode(), b"[DONE]"]
BODY = {"messages": [], "stream": True}


@given(st.lists(st.integers(0, len(STREAMED)), max_size=12))
def test_events_do_not_depend_on_where_bytes_are_split(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAMED)]
    parser = EventParser()
    found = []
    for start, end in itertools.pairwise(places):
        found += parser.feed(STREAMED[start:end])
    assert found + list(parser.close()) == EVENTS


def ask(*steps: bytes | str, timeout: float = 60.0) -> Answer:
    with scripted_server(*steps) as script:  # type: ignore[arg-type]
        return Server(script.url, "peer").ask("/chat/completions", BODY, timeout=timeout)


@given(st.lists(st.integers(1, 400), max_size=6))
def test_an_answer_does_not_depend_on_how_it_is_sent(cuts: list[int]) -> None:
    whole = b"".join(answer("Hé", "llo 😀", tokens=4))
    places = [0, *sorted(cuts), len(whole)]
    found = ask(*(whole[start:end] for start, end in itertools.pairwise(places)))
    assert (found.text, found.finish_reason) == ("Héllo 😀", "stop")
    assert (found.prompt_tokens, found.completion_tokens, len(found.pieces)) == (5, 4, 2)
    assert found.started <= found.pieces[0] <= found.pieces[1] <= found.ended


def test_whole_answers_and_several_choices_are_read_too() -> None:
    choices = (
        b'{"choices": [{"index": 1, "message": {"content": "b"}, "finish_reason": "length"},'
        b' {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}],'
        b' "usage": {"prompt_tokens": 3, "completion_tokens": 2,'
        b' "prompt_tokens_details": {"cached_tokens": 1}}}'
    )
    found = ask(JSON + choices)
    assert found.texts == {0: "a", 1: "b"}
    assert found.finish_reasons == {0: "stop", 1: "length"}
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (3, 1, 2)
    assert found.speculation is None


def test_tokens_of_an_answer_without_text_are_counted() -> None:
    found = ask(*answer(tokens=1))
    assert (found.text, found.pieces, found.completion_tokens) == ("", [], 1)


def test_drafts_are_read_from_timings() -> None:
    found = ask(*answer("x", tokens=9, timings={"draft_n": 10, "draft_n_accepted": 5})).speculation
    assert found is not None
    assert (found.passes, found.drafted, found.accepted, found.committed) == (3, 10, 5, 8)


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"], "HTTP 429"),
        ([b"HTTP/1.1 500 Oh\r\n\r\n"], "HTTP 500"),
        ([STREAM, chunk(event({"error": {"message": "no memory"}}))], "error event"),
        ([STREAM, chunk(b"data: {nonsense\n\n"), chunk(b"")], "odd answer"),
        ([STREAM, chunk(event([1])), chunk(b"")], "odd answer"),
        ([STREAM, chunk(event({"choices": [3]})), chunk(b"")], "odd answer"),
        ([STREAM, chunk(event({"choices": []}))[:-4]], "broken off"),
        ([STREAM, chunk(event({"choices": []}))], "broken off"),
        ([STREAM, RESET], "broken off"),
        ([RESET], "broken off"),
        ([], "broken off"),
        ([b"nonsense\r\n\r\n"], "broken off"),
    ],
)
def test_every_failure_has_its_kind(steps: list[bytes | str], kind: str) -> None:
    with pytest.raises(PeerError) as found:
        ask(*steps)
    assert found.value.kind == kind


def test_an_answer_without_usage_cannot_be_counted() -> None:
    found = ask(STREAM, chunk(b"data: [DONE]\n\n"), chunk(b""))
    with pytest.raises(PeerError, match="sent no usage") as error:
        found.completion_tokens  # noqa: B018
    assert error.value.kind == "no usage"


@pytest.mark.parametrize("steps", [[], [STREAM], [STREAM, chunk(event({"choices": []}))]])
def test_a_request_that_is_given_up_is_closed(steps: list[bytes]) -> None:
    with scripted_server(*steps, HANG) as script:
        with pytest.raises(PeerError) as found:
            Server(script.url).ask("/completions", BODY, timeout=0.05)
        assert script.gone.wait(30)
    assert found.value.kind == "timed out"


def test_a_server_that_went_away_is_not_reached() -> None:
    with scripted_server() as script:
        server = Server(script.url)
    with pytest.raises(PeerError) as found:
        server.ask("/completions", BODY)
    assert found.value.kind == "not reached"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://[x", "http://x:0"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not an http URL"):
        Server(url)


def test_the_request_goes_where_the_address_says() -> None:
    with scripted_server(*answer("x", tokens=1)) as script:
        for url in (script.url, f"{script.url}/", f"{script.url}/v1", f"{script.url}/v1/"):
            server = Server(url)
            server.ask(
                "/chat/completions", server.body(SamplingParams(temperature=0.5, seed=3, max_tokens=7))
            )
    assert [path for path, _ in script.asked] == ["/v1/chat/completions"] * 4
    assert script.asked[0][1] == {
        "model": "m",
        "seed": 3,
        "temperature": 0.5,
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.name == script.url.removeprefix("http://")


def test_no_socket_is_left_open() -> None:
    before = open_sockets()
    for _ in range(3):
        ask(*answer("x", tokens=1))
        with pytest.raises(PeerError):
            ask(RESET)
    assert open_sockets() == before


def open_sockets() -> int:
    import gc

    gc.collect()
    return sum(isinstance(o, socket.socket) and o.fileno() >= 0 for o in gc.get_objects())
