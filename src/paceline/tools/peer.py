"""Measure any OpenAI-compatible server the way Paceline measures itself.

Tokens come from the server's `usage`. Decode time comes from llama-server's own `timings` where present,
else from the arrival of the first and the last text; either way decoding made all tokens but the first.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from paceline.core import SamplingParams, SpeculationStats
from paceline.errors import RequestError, ResourceError, UsageError
from paceline.tools.prompts import Prompt
from paceline.tools.statistics import Sample

TIMEOUT_S = 900.0
_OURS = ("n", "verification", "max_tokens", "logprobs", "logit_bias")


@dataclass(slots=True)
class _Stream:
    """What one streamed answer told."""

    started: float
    first: float | None = None
    last: float = 0.0
    text: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            raise RequestError(f"the server answered {str(event['error'])[:300]}", "see the server's log")
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if piece:
                self.first = now if self.first is None else self.first
                self.last = now
                self.text.append(piece)


class ServerArm:
    """One OpenAI-compatible server as an arm of a benchmark.

    Args:
        url: `http://host:port`, with or without `/v1`; the key is read from OPENAI_API_KEY.
        name: how reports call it.

    Raises:
        UsageError: the URL is not one.
        ResourceError: nothing answers there.
    """

    def __init__(self, url: str, name: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not an http URL", "write it as http://127.0.0.1:8080")
        self.url = url
        self.name = name or parts.netloc
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        models = self._get("/models")
        first: dict[str, Any] = next(iter(models.get("data") or ()), {})
        self.model = str(first.get("id", ""))
        self.llama = first.get("owned_by") == "llamacpp"
        self.decode_clock = "not measured yet"

    def measure(self, prompt: Prompt, params: SamplingParams, *, chat: bool) -> Sample:
        """Stream one answer and return its sample.

        Raises:
            RequestError: the server refused the request, or did not say how many tokens it made.
        """
        body = self._body(params)
        body |= {"messages": prompt.as_messages()} if chat else {"prompt": prompt.text}
        stream = _Stream(time.perf_counter())
        for event in self._post("/chat/completions" if chat else "/completions", body):
            stream.take(event, time.perf_counter())
        return self._sample(prompt, stream)

    def clear(self) -> None:
        """Nothing to do: requests tell llama-server not to reuse a prompt; other servers are as they are."""

    def _body(self, params: SamplingParams) -> dict[str, Any]:
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

    def _sample(self, prompt: Prompt, stream: _Stream) -> Sample:
        usage = stream.usage
        if usage is None or not isinstance(usage.get("completion_tokens"), int):
            raise RequestError(
                f"{self.name} sent no usage, so its tokens cannot be counted",
                "use a server that honours stream_options.include_usage",
            )
        tokens = usage["completion_tokens"]
        first = stream.first if stream.first is not None else time.perf_counter()
        details = usage.get("prompt_tokens_details") or {}
        prefill_s, decode_s, speculation = None, max(stream.last - first, 0.0), None
        self.decode_clock = "first to last text received"
        if (timings := stream.timings) and {"prompt_ms", "predicted_ms"} <= timings.keys():
            self.decode_clock = "llama-server timings"
            prefill_s = timings["prompt_ms"] / 1e3
            decode_s = timings["predicted_ms"] / 1e3
            speculation = _speculation(tokens, timings)
        return Sample(
            arm=self.name,
            prompt=prompt.name,
            category=prompt.category,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            completion_tokens=tokens,
            prefill_s=prefill_s,
            decode_s=decode_s,
            first_token_s=first - stream.started,
            text="".join(stream.text),
            finish_reason=stream.finish_reason,
            speculation=speculation,
        )

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def _get(self, path: str) -> dict[str, Any]:
        connection = self._connect()
        try:
            connection.request("GET", self._base + path, headers=self._headers())
            response = connection.getresponse()
            value = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ResourceError(
                f"no OpenAI-compatible server at {self.url}: {error}", "start it, or check the address"
            ) from None
        finally:
            connection.close()
        if response.status != 200 or not isinstance(value, dict):
            raise ResourceError(
                f"{self.url}{path} answered {response.status}", "check the address and the key"
            )
        return value

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = self._connect()
        try:
            connection.request("POST", self._base + path, json.dumps(body), self._headers())
            response = connection.getresponse()
            if response.status != 200:
                reason = response.read(2000).decode("utf-8", "replace")
                raise RequestError(
                    f"{self.name} answered {response.status}: {reason}", "see the server's log"
                )
            yield from _events(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"{self.name} broke off: {error}", "see the server's log") from None
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Decode server-sent events: one JSON object per `data:` line, until `[DONE]`."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def _speculation(tokens: int, timings: dict[str, Any]) -> SpeculationStats | None:
    """What llama-server tells of its drafts; a pass commits one token beside the accepted ones."""
    if "draft_n" not in timings:
        return None
    accepted = timings.get("draft_n_accepted", 0)
    decoded = max(tokens - 1, 0)
    return SpeculationStats(
        passes=max(decoded - accepted, 0), drafted=timings["draft_n"], accepted=accepted, committed=decoded
    )
