"""Whether speculation would pay, from three numbers: the textbook model, for advice before anything runs.

Source: the analysis of Leviathan et al. (arXiv 2211.17192): each draft token is accepted with the same
chance, independent of the others.
"""

from __future__ import annotations

from dataclasses import dataclass


def mean_acceptance_length(acceptance: float, length: int) -> float:
    """Tokens per pass, bonus included, with drafts of `length` tokens accepted at rate `acceptance`."""
    return sum(acceptance**i for i in range(length + 1))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What drafts of one length would do; costs are in units of one plain step.

    Attributes:
        acceptance: chance of each draft token to be accepted.
        length: draft tokens per pass.
        draft_cost: cost of drafting one token.
        verify_cost: cost of a pass that checks them all.
    """

    acceptance: float
    length: int
    draft_cost: float
    verify_cost: float

    @property
    def speedup(self) -> float:
        step = self.length * self.draft_cost + self.verify_cost
        return mean_acceptance_length(self.acceptance, self.length) / step

    @property
    def pays(self) -> bool:
        return self.speedup > 1.0
