"""Measure arms against each other on real prompts, and check that they write the same tokens.

Arms take turns within every prompt, and the order turns too, so that a machine that warms up or slows down
does so for all of them. Arms start every prompt cold: no cached prompt, nothing learnt from earlier answers.
With `warm`, drafters keep what they learnt from other prompts; the prompt cache is emptied all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from paceline.core import Completion, SamplingParams
from paceline.drafters import registry
from paceline.engine import LLM
from paceline.errors import RequestError, UsageError
from paceline.tools.prompts import Prompt
from paceline.tools.statistics import (
    Difference,
    Failure,
    Sample,
    Summary,
    answered_by_all,
    first_difference,
    summarize,
)

SCHEMA = 1
WARM_UP_TOKENS = 8


class Arm(Protocol):
    """One way of answering prompts."""

    name: str
    decode_clock: str

    def measure(self, prompt: Prompt, params: SamplingParams, *, chat: bool) -> Sample:
        """Answer and time one prompt. Raises RequestError when it cannot."""
        ...

    def clear(self) -> None:
        """Forget what a rule of fairness says must not carry over from prompt to prompt."""
        ...


class EngineArm:
    """This process's own engine with one way of speculating. Arms may share an `LLM`."""

    decode_clock = "engine"

    def __init__(self, llm: LLM, speculate: str, *, warm: bool = False) -> None:
        self.name = speculate
        self._llm = llm
        self._warm = warm
        self._speculate = parse_speculation(speculate)

    def measure(self, prompt: Prompt, params: SamplingParams, *, chat: bool) -> Sample:
        asked = prompt.as_messages() if chat else prompt.text
        return from_completion(
            self.name, prompt, self._llm.generate(asked, params, speculate=self._speculate)
        )

    def clear(self) -> None:
        if self._warm:
            self._llm.engine.clear_cache()
        else:
            self._llm.clear()


@dataclass(slots=True)
class Report:
    """What a benchmark found.

    Attributes:
        overall, categories: over the prompts that every arm answered.
        differences: outputs of our own arms that were not those of the first arm. Always empty, unless
            Paceline is broken or verification is "rejection".
        peer_differences: the same for other servers, whose arithmetic is their own.
    """

    arms: list[str]
    decode_clocks: dict[str, str]
    overall: Summary
    categories: dict[str, Summary]
    samples: list[Sample]
    failures: list[Failure] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    peer_differences: list[Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"paceline_bench": SCHEMA} | asdict(self)


def parse_speculation(name: str) -> str | list[str]:
    """What an arm's name means: `+` joins drafters, because commas part arms. Raises UsageError."""
    speculate = name.split("+") if "+" in name else name
    registry.configure(speculate, vocab_size=1)
    return speculate


def from_completion(arm: str, prompt: Prompt, completion: Completion) -> Sample:
    timings = completion.timings
    return Sample(
        arm=arm,
        prompt=prompt.name,
        category=prompt.category,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        completion_tokens=len(completion.tokens),
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
        first_token_s=timings.time_to_first_token_s,
        tokens=tuple(completion.tokens),
        text=completion.text,
        finish_reason=completion.finish_reason,
        speculation=completion.speculation,
    )


def run(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    chat: bool,
    repeat: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> Report:
    """Run every arm on every prompt, `repeat` times, and sum up. `progress` is called after each answer.

    A few tokens by each arm, not counted, come first: they touch the weights and measure pass times.
    """
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise UsageError(f"arms {', '.join(names)} are not all different", "name each arm once")
    for arm in arms:
        with suppress(RequestError):  # it will fail again, and be counted, in its turn
            arm.measure(prompts[0], replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0), chat=chat)
    samples: list[Sample] = []
    failures: list[Failure] = []
    turn = 0
    for _ in range(repeat):
        for prompt in prompts:
            for arm in _rotated(arms, turn):
                arm.clear()
                try:
                    samples.append(arm.measure(prompt, params, chat=chat))
                except RequestError as error:
                    failures.append(Failure(arm.name, prompt.name, prompt.category, error.message))
                progress()
            turn += 1
    return report(arms, samples, failures)


def report(arms: Sequence[Arm], samples: list[Sample], failures: list[Failure]) -> Report:
    """Sum up samples; figures cover the prompts that all arms answered."""
    names = [arm.name for arm in arms]
    common = answered_by_all(samples, names)
    categories = dict.fromkeys(s.category for s in common)
    own = [s for s in samples if s.tokens is not None]
    others = [s for s in samples if s.tokens is None]
    reference = {s.prompt: s for s in reversed(own) if s.arm == names[0]}
    return Report(
        arms=names,
        decode_clocks={arm.name: arm.decode_clock for arm in arms},
        overall=summarize(common, names),
        categories={c: summarize([s for s in common if s.category == c], names) for c in categories},
        samples=samples,
        failures=failures,
        differences=_differences(reference, own),
        peer_differences=_differences(reference, others),
    )


def _differences(reference: dict[str, Sample], samples: Sequence[Sample]) -> list[Difference]:
    pairs = ((reference[s.prompt], s) for s in samples if s.prompt in reference)
    return [found for first, other in pairs if (found := first_difference(first, other))]


def _rotated(arms: Sequence[Arm], turn: int) -> list[Arm]:
    start = turn % len(arms)
    return [*arms[start:], *arms[:start]]
