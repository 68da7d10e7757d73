"""What a checked draft adds to the numbers."""

from __future__ import annotations

from paceline.core import ROOT, Claims, Draft, Outcome, SpeculationStats
from paceline.engine.counters import record


def test_chances_are_counted_where_the_target_decided() -> None:
    """10 with 11 and 12 behind it, and 20 with 21. The target takes 10 and 12; of 21 nothing is known."""
    draft = Draft(
        [10, 20, 11, 12, 21],
        [ROOT, ROOT, 0, 0, 1],
        [0.75, 0.125, 0.5, 0.25, 1.0],
        ("eagle", "ngram", "eagle", "eagle", "ngram"),
    )
    stats, totals = SpeculationStats(), SpeculationStats()
    record(stats, totals, Outcome(draft, (0, 3), (10, 12, 30)))
    for each in (stats, totals):
        eagle, ngram = each.by_drafter["eagle"], each.by_drafter["ngram"]
        assert (eagle.drafted, eagle.accepted) == (3, 2)
        assert (ngram.drafted, ngram.accepted) == (2, 0)
    assert stats.by_drafter["eagle"].claims == {
        7: Claims(1, 0.75, 1),
        5: Claims(1, 0.5, 0),
        2: Claims(1, 0.25, 1),
    }
    assert stats.by_drafter["ngram"].claims == {1: Claims(1, 0.125, 0)}


def test_certainty_belongs_to_the_highest_class() -> None:
    draft = Draft([1], [ROOT], [1.0], ("prediction",))
    stats = SpeculationStats()
    for path in ((0,), ()):
        record(stats, SpeculationStats(), Outcome(draft, path, (1,)))
    assert stats.by_drafter["prediction"].claims == {9: Claims(2, 2.0, 1)}
