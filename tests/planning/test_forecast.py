"""The textbook cost model and the field's own metrics, with numbers known beforehand."""

from __future__ import annotations

import pytest

from paceline.core import SpeculationStats
from paceline.planning.forecast import Forecast, mean_acceptance_length


@pytest.mark.parametrize(
    ("acceptance", "length", "draft_cost", "verify_cost", "speedup"),
    [
        (0.6, 4, 0.1, 1.2, 1.441),
        (0.8, 4, 0.05, 1.1, 2.586),
        (0.9, 1, 0.05, 2.2, 0.844),
        (0.4, 8, 0.1, 1.5, 0.724),
    ],
)
def test_speedup_and_advice(acceptance, length, draft_cost, verify_cost, speedup):
    forecast = Forecast(acceptance, length, draft_cost, verify_cost)
    assert forecast.speedup == pytest.approx(speedup, abs=5e-4)
    assert forecast.pays == (speedup > 1)


@pytest.mark.parametrize(("acceptance", "length", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 2, 1.75)])
def test_mean_acceptance_length_counts_the_bonus(acceptance, length, tokens):
    assert mean_acceptance_length(acceptance, length) == tokens


def test_metrics_of_a_known_histogram():
    """Ten passes of three draft tokens; 5, 2, 0 and 3 of them accepted 0, 1, 2 and 3."""
    accepted = 2 * 1 + 3 * 3
    stats = SpeculationStats(
        passes=10,
        drafts=10,
        drafted=30,
        accepted=accepted,
        accepted_per_position=[5, 3, 3],
        committed=accepted + 10,
    )
    assert stats.acceptance_rate == pytest.approx(0.3667, abs=5e-5)
    assert stats.mean_acceptance_length == 2.1
