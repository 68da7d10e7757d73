"""Texts that a target wrote, with what its drafters would have heard of them.

The texts come out of the engine as any answer does, and the states by the call that hands them to drafters.
What a head is fitted to is what it will be given; a state taken at the wrong place is wrong in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core import Context, Draft, Floats, Ids, Outcome, SamplingParams
from paceline.engine.llm import LLM, Prompt, Stream

Report = Callable[[str], None]
"""Takes lines that tell people how far things are."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One text.

    Attributes:
        tokens: [n] the prompt and what was written behind it.
        written: the first token that the target wrote itself.
        states: [n - 1, width] by layer: what entered that layer at every token but the last.
    """

    tokens: Ids
    written: int
    states: Mapping[int, Floats]

    def __len__(self) -> int:
        return len(self.tokens)


def write(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    layers: Sequence[int],
    report: Report = lambda _: None,
) -> list[Transcript]:
    """Let a target answer prompts.

    Args:
        params: of each prompt.
        layers: whose inputs are kept: 0 is the embedding, the number of layers what the final norm is given.

    Raises:
        RequestError: a prompt or parameter that cannot be served.
    """
    recorder = _Recorder(layers)
    requests = []
    for prompt, its in zip(prompts, params, strict=True):
        requests += llm.requests(prompt, its, speculate="off")
    for request in requests:
        request.planner, request.whole = recorder, True
    llm.enqueue(requests)
    done = tokens = 0
    with Stream(llm, requests) as stream:
        for chunk in stream:
            tokens += len(chunk.tokens)
            if chunk.completion is not None:
                done += 1
                report(f"text {done} of {len(requests)}: {tokens} tokens written")
    return [recorder.transcript(request.context) for request in requests]


@dataclass(slots=True)
class _Heard:
    """Of one text: how many tokens, and their states by layer."""

    count: int = 0
    parts: dict[int, list[Floats]] = field(default_factory=dict)


class _Recorder:
    """Drafts nothing and keeps all it hears; implements `engine.request.Planner`."""

    speculates = False

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = frozenset(layers)
        self._heard: dict[int, _Heard] = {}

    def plan(self, contexts: Sequence[Context], *_: Any, **__: Any) -> list[Draft]:
        return [Draft.empty()] * len(contexts)

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        its = self._heard.setdefault(context.request, _Heard())
        for layer in self.layers:  # one that was sent back is computed, and heard of, again
            its.parts.setdefault(layer, []).append(hidden[layer][its.count - start :].copy())
        its.count = max(its.count, start + len(hidden[min(self.layers)]))

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        """Nothing to learn."""

    def forget(self, context: Context) -> None:
        """The text is wanted after its request is over."""

    def off_reason(self, _: Context) -> str | None:
        return "its text is recorded"

    def transcript(self, context: Context) -> Transcript:
        parts = self._heard.pop(context.request).parts
        states = {layer: np.concatenate(some) for layer, some in parts.items()}
        return Transcript(np.array(context.tokens, np.int32), context.prompt_length, states)
