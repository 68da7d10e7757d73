"""The sampler's distributions against transformers' own logits processors, computed here and now."""

from __future__ import annotations

import numpy as np
import pytest

from oracles.sampling_references import CASES, OUTPUT, PROMPT, STOPS, logits, probabilities
from paceline.core import SamplingParams
from paceline.sampling import Sampler

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", CASES)
def test_distribution_equals_transformers(name: str) -> None:
    row = np.array(logits(), np.float32)
    sampler = Sampler(SamplingParams(**CASES[name]), PROMPT, STOPS, len(row), seed=0)
    for token in OUTPUT:
        sampler.advance(token)
    np.testing.assert_allclose(sampler.distribution(row), probabilities(CASES[name]), atol=1e-6)
