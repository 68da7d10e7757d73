"""The OpenAPI document: what it says is true, and what it allows never breaks the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
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
schema.config.phases.coverage.enabled = False  # hundreds of cases for each route; the random ones find as much


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm(context_limit=64)) as running:
        yield running


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_the_document_allows_or_forbids(case: Any, live: Live) -> None:
    case.call_and_validate(base_url=live.url, checks=CHECKS, timeout=60)
