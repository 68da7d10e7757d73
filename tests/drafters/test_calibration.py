"""Claimed chances against what comes true."""

from __future__ import annotations

import random

import pytest

from paceline.core import ROOT
from paceline.drafters.calibration import LENGTH_CLASSES, Calibration, Luck, QuickLuck, length_class
from paceline.drafters.offer import Offer


@pytest.mark.parametrize("start", [-2.0, 0.0, 2.0])
def test_claims_meet_the_truth_within_a_few_percent(start):
    """Guesses of twelve kinds, from additive log-odds: after two thousand, each kind is claimed rightly."""
    rng = random.Random(7)
    truth = Calibration([-1.5, 0.0, 1.0, -1.0, 0.0, 0.6, 1.5])
    learner = Calibration([start] * 7)
    claimed: dict[tuple[int, ...], list[float]] = {}
    for i in range(12_000):
        features = (rng.randrange(3), 3 + rng.randrange(4))
        chance = learner.chance(features)
        if i >= 2_000:
            claimed.setdefault(features, []).append(chance)
        learner.record(features, chance, rng.random() < truth.chance(features))
    for features, chances in claimed.items():
        assert sum(chances) / len(chances) == pytest.approx(truth.chance(features), abs=0.05)


def test_follows_when_the_traffic_changes():
    rng = random.Random(1)
    learner = Calibration([0.0])
    for rate in (0.9, 0.2):
        for _ in range(3_000):
            learner.record((0,), learner.chance((0,)), rng.random() < rate)
        assert learner.chance((0,)) == pytest.approx(rate, abs=0.07)


@pytest.mark.parametrize(("hit", "beyond"), [(False, lambda c: c < 0.25), (True, lambda c: c > 0.75)])
def test_a_request_out_of_the_ordinary_is_recognised_in_three_dozen_guesses(hit, beyond):
    shared, luck = Calibration([0.0]), Luck()
    for _ in range(36):
        luck.record(shared.chance((0,), luck.log_odds), hit)
    assert beyond(shared.chance((0,), luck.log_odds))


def test_luck_is_bounded():
    luck = Luck()
    for _ in range(1_000):
        luck.record(1.0, False)
    assert luck.log_odds == -Luck.LIMIT


def test_length_classes_rise_and_end():
    classes = [length_class(n) for n in range(200)]
    assert classes == sorted(classes)
    assert set(classes) == set(range(LENGTH_CLASSES))


def chances_after(written: list[int]) -> list[float]:
    """Guesses with features 0 to 3: at the root 10 or else 11; after 10, 20; after 20, 30."""
    offer, shared = Offer(), Calibration([0.0] * 4)
    offer.guesses[ROOT] = [(10, 0.5, (0,)), (11, 0.5, (1,))]
    first = offer.add(ROOT, 10, 0.5)
    offer.guesses[first] = [(20, 0.5, (2,))]
    second = offer.add(first, 20, 0.5)
    offer.guesses[second] = [(30, 0.5, (3,))]
    offer.learn(written, shared, Luck())
    return [round(shared.chance((f,)) - 0.5, 6) for f in range(4)]


def signs(written: list[int]) -> list[int]:
    return [(x > 0) - (x < 0) for x in chances_after(written)]


def test_only_what_the_text_decided_is_learnt():
    assert signs([]) == [0, 0, 0, 0]
    assert signs([10]) == [1, 0, 0, 0], "what was only to be tried after a miss was not tried"
    assert signs([11]) == [-1, 1, 0, 0], "nothing is known behind a wrong guess"
    assert signs([12, 20, 30]) == [-1, -1, 0, 0]
    assert signs([10, 20]) == [1, 0, 1, 0]
    assert signs([10, 20, 31]) == [1, 0, 1, -1], "guesses count though no node was made of them"


def test_quick_luck_believes_the_first_guesses_most() -> None:
    quick, plain = QuickLuck(), Luck()
    for _ in range(3):
        quick.record(0.5, False)
        plain.record(0.5, False)
    assert quick.log_odds < 2.5 * plain.log_odds < 0.0
    for _ in range(200):
        quick.record(0.5, True)
        quick.record(0.5, False)
    before = quick.log_odds
    quick.record(0.5, True)
    assert abs(quick.log_odds - before - Luck.RATE / 2) < 1e-12
    for _ in range(500):
        quick.record(0.5, True)
    assert quick.log_odds == Luck.LIMIT
