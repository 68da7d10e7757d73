"""Measure any OpenAI-compatible server, one prompt at a time, the way Paceline measures itself.

Tokens come from the server's `usage`. Decode time comes from llama-server's own `timings` where present,
else from the arrival of the first and the last text; either way decoding made all tokens but the first.
"""

from __future__ import annotations

from paceline.core import SamplingParams
from paceline.tools.peer_client import Answer, Server
from paceline.tools.prompts import Prompt
from paceline.tools.statistics import Sample


class ServerArm:
    """One OpenAI-compatible server as an arm of a benchmark; see `Server` for arguments and errors."""

    def __init__(self, url: str, name: str = "") -> None:
        self._server = Server(url, name)
        self.name = self._server.name
        self.decode_clock = "not measured yet"

    def measure(self, prompt: Prompt, params: SamplingParams, *, chat: bool) -> Sample:
        """Stream one answer and return its sample.

        Raises:
            RequestError: the server refused the request, or did not say how many tokens it made.
        """
        path, asked = prompt.for_server(chat=chat)
        return self._sample(prompt, self._server.ask(path, self._server.body(params) | asked))

    def clear(self) -> None:
        """Nothing to do: requests tell llama-server not to reuse a prompt; other servers are as they are."""

    def _sample(self, prompt: Prompt, answer: Answer) -> Sample:
        first = answer.pieces[0] if answer.pieces else answer.ended
        prefill_s, decode_s, speculation = None, answer.pieces[-1] - first if answer.pieces else 0.0, None
        self.decode_clock = "first to last text received"
        if (timings := answer.timings) and {"prompt_ms", "predicted_ms"} <= timings.keys():
            self.decode_clock = "the server's timings"
            prefill_s = timings["prompt_ms"] / 1e3
            decode_s = timings["predicted_ms"] / 1e3
            speculation = answer.speculation
        return Sample(
            arm=self.name,
            prompt=prompt.name,
            category=prompt.category,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            completion_tokens=answer.completion_tokens,
            prefill_s=prefill_s,
            decode_s=decode_s,
            first_token_s=first - answer.started,
            text=answer.text,
            finish_reason=answer.finish_reason,
            speculation=speculation,
        )
