"""How often a head's guesses are taken, by the engine itself, on prompts it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core import SamplingParams
from paceline.engine.llm import LLM, Prompt


@dataclass(frozen=True, slots=True)
class Trial:
    """Attributes:
    passes: in which the head drafted.
    kept: how many of these kept their first, second, ... token.
    """

    passes: int
    kept: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """Of the passes: how many kept so many tokens."""
        return [count / max(1, self.passes) for count in self.kept]

    @property
    def length(self) -> float:
        """Mean number of drafted tokens that are kept."""
        return sum(self.shares)


def trial(
    llm: LLM, kind: str, folder: Path, prompts: Sequence[Prompt], params: SamplingParams, *, drafts: int = 4
) -> Trial:
    """Let the target answer prompts with chains of so many tokens from the head in the folder.

    Raises:
        ModelFileError, UnsupportedModelError: the head does not fit the target.
    """
    spec = {"method": kind, "model": str(folder), "num_speculative_tokens": drafts}
    passes, kept = 0, [0] * drafts
    for prompt in prompts:
        done = llm.generate(prompt, params, speculate=spec).speculation
        passes += done.drafts
        for i, count in enumerate(done.accepted_per_position):
            kept[i] += count
    return Trial(passes, tuple(kept))
