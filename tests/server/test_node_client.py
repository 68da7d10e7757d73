"""The official JavaScript client, in Node; `npm install --prefix tests/server/node` fetches it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import SamplingParams
from support.live_server import Live, chat_llm, live_server, until

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(
    NODE is None or not (FOLDER / "node_modules" / "openai").is_dir(),
    reason="needs Node and `npm install --prefix tests/server/node`",
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm(context_limit=2**15, pages=2**13), api_key="k") as running:
        running.client.headers["Authorization"] = "Bearer k"
        yield running


def test_a_javascript_program_gets_what_a_python_one_gets(live: Live) -> None:
    assert NODE is not None
    command = [NODE, str(FOLDER / "client.mjs"), live.url + "/v1", "k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    messages = [{"role": "user", "content": "abcabc"}]
    expected = live.llm.generate(messages, SamplingParams(temperature=0, max_tokens=24))
    assert found["whole"] == "".join(found["pieces"]) == expected.text
    assert found["usage"]["completion_tokens"] == len(expected.tokens)
    assert found["streamed_usage"]["completion_tokens"] == len(expected.tokens)
    assert json.loads(found["shaped"]) in ({"ok": True}, {"ok": False})
    assert found["errors"] == {
        "model": ["NotFoundError", 404],
        "field": ["BadRequestError", 400],
        "key": ["AuthenticationError", 401],
    }
    assert found["events"] >= 5
    until(live.idle)
