"""The OpenAPI document: what it says is true, and what it allows never breaks the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.server.app import create_app
from paceline.server.settings import Settings
from support.live_server import Live, chat_llm, live_server

DOCUMENT = create_app(Settings(names=("stub",))).openapi()
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.phases.coverage.enabled = (
    False  # hundreds of cases for each route; the random ones find as much
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm(context_limit=64)) as running:
        yield running


_maybe: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 10),
    "logit_bias": st.dictionaries(st.integers(0, 261).map(str), st.floats(-100, 100), max_size=3),
    "stop": st.text(min_size=1, max_size=2) | st.lists(st.text(min_size=1, max_size=2), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 261), max_size=3),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "logprobs": st.integers(0, 20),
    "return_token_sources": st.booleans(),
    "speculation": st.fixed_dictionaries(
        {}, optional={"max_draft": st.integers(0, 64), "drafter": st.sampled_from(["auto", "ngram", "off"])}
    ),
    "guided_regex": st.just("[a-c]{1,5}"),
    "user": st.text(),
}


def test_docs_names_every_route_and_field_and_takes_nothing_from_elsewhere(live: Live) -> None:
    page = live.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path, operations in DOCUMENT["paths"].items():
        for method in operations:
            assert f"<h2>{method.upper()} {path}</h2>" in page.text
    for name, part in DOCUMENT["components"]["schemas"].items():
        rows = page.text.partition(f'<h2 id="{name}">')[2].partition("</table>")[0]
        assert re.findall("<tr><th>(.*?)<td>", rows) == list(part.get("properties", {}))
    assert '<tr><th>messages<td>list of <a href="#Message">Message</a> (required)<td>\n' in page.text
    top_p = (
        "<tr><th>top_p<td>number<td>Keep the likeliest tokens that reach this probability (above 0 to 1)\n"
    )
    assert top_p in page.text
    assert "tool_choice<td>&#x27;none&#x27; or &#x27;auto&#x27; or &#x27;required&#x27; or <a" in page.text
    assert "//" not in page.text.replace("</", "")
    for link in re.findall('href="(/[^"]*)"', page.text):
        assert live.get(link).status_code == 200


@given(
    st.fixed_dictionaries({"seed": st.integers(-(2**63), 2**64 - 4)}, optional=_maybe),
    st.lists(st.text(max_size=8), min_size=1, max_size=2),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_a_random_request_is_answered_alike_streamed_and_whole(
    live: Live, options: dict[str, Any], prompts: list[str]
) -> None:
    body = options | {"prompt": prompts, "max_tokens": 12}
    if "guided_regex" in body:
        body.pop("ignore_eos", None)  # the two contradict each other, and are refused
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    events = live.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    choices = [choice for event in events for choice in event["choices"]]
    for whole in told["choices"]:
        mine = [choice for choice in choices if choice["index"] == whole["index"]]
        assert "".join(choice["text"] for choice in mine) == whole["text"]
        assert mine[-1]["finish_reason"] == whole["finish_reason"]
        if whole["logprobs"] is not None:
            parts = [choice["logprobs"] for choice in mine if choice["logprobs"]]
            for name, values in whole["logprobs"].items():
                assert [value for part in parts for value in part[name]] == values
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][name] for name in counts] == [told["usage"][name] for name in counts]


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_the_document_allows_or_forbids(case: Any, live: Live) -> None:
    case.call_and_validate(base_url=live.url, checks=CHECKS, timeout=60)
