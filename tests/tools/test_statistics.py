"""The benchmark's arithmetic on numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import Claims, DrafterStats, SpeculationStats
from paceline.tools.statistics import (
    Difference,
    Sample,
    acceptance,
    answered_by_all,
    figures,
    first_difference,
    speed_up,
    summarize,
    time_per_output_token,
)


def sample(arm: str, prompt: str, decoded: int, seconds: float, **more: object) -> Sample:
    """A sample with `decoded` tokens after the first one, made in `seconds`."""
    fields: dict[str, object] = {
        "arm": arm,
        "prompt": prompt,
        "category": "writing",
        "prompt_tokens": 10,
        "completion_tokens": decoded + 1,
        "decode_s": seconds,
        "first_token_s": 0.5,
    }
    return Sample(**(fields | more))  # type: ignore[arg-type]


def test_time_per_output_token_ignores_chunks() -> None:
    # 100 tokens in 25 chunks over 2.0 s after the first chunk. Chunks come every 83.3 ms; tokens do not.
    assert time_per_output_token(100, 1.0, 3.0) * 1e3 == pytest.approx(20.2020, abs=1e-4)
    assert sample("a", "p", 99, 2.0).time_per_output_token_s == time_per_output_token(100, 1.0, 3.0)


def test_one_token_has_no_time_between_tokens() -> None:
    assert sample("a", "p", 0, 0.0).time_per_output_token_s is None
    with pytest.raises(ValueError, match="1 tokens"):
        time_per_output_token(1, 0.0, 1.0)


def test_speed_is_total_tokens_over_total_time_not_a_mean_of_speeds() -> None:
    samples = [sample("a", "1", 100, 1.0), sample("a", "2", 100, 10.0)]
    assert figures(samples).decode_tokens_per_s == pytest.approx(200 / 11)
    assert (100 / 1.0 + 100 / 10.0) / 2 == 55.0  # what the mean of speeds would have claimed


def test_speed_up_is_a_ratio_of_totals_not_a_ratio_of_mean_speeds() -> None:
    samples = [
        sample("off", "1", 100, 1.0),
        sample("off", "2", 100, 10.0),
        sample("auto", "1", 100, 0.2),
        sample("auto", "2", 100, 10.0),
    ]
    found = speed_up(samples, "off", "auto")
    assert found is not None
    assert found.ratio == pytest.approx((200 / 10.2) / (200 / 11.0))  # 1.078
    # A ratio of mean speeds would have claimed (510 / 2) / (110 / 2) = 4.64.
    assert (found.median, found.worst, found.prompts) == (pytest.approx(3.0), pytest.approx(1.0), 2)


def test_both_arms_count_tokens_after_the_first() -> None:
    equal = [sample("off", "1", 9, 3.0), sample("auto", "1", 9, 3.0)]
    found = speed_up(equal, "off", "auto")
    assert found is not None
    assert found.ratio == 1.0
    assert figures(equal[:1]).decode_tokens_per_s == pytest.approx(3.0)


def test_a_failed_prompt_leaves_no_numbers_behind() -> None:
    samples = [
        sample("off", "1", 10, 1.0),
        sample("off", "2", 10, 5.0),
        sample("auto", "1", 10, 1.0),  # "auto" failed on prompt 2
    ]
    kept = answered_by_all(samples, ["off", "auto"])
    assert [(s.arm, s.prompt) for s in kept] == [("off", "1"), ("auto", "1")]
    found = speed_up(samples, "off", "auto")
    assert found is not None
    assert (found.ratio, found.prompts) == (1.0, 1)


def test_repetitions_of_a_prompt_are_one_prompt() -> None:
    samples = [sample("off", "1", 10, 1.0), sample("off", "1", 10, 3.0), sample("auto", "1", 10, 1.0)]
    found = speed_up(samples, "off", "auto")
    assert found is not None
    assert (found.ratio, found.low, found.prompts) == (pytest.approx(2.0), None, 1)
    assert answered_by_all(samples, ["off", "auto"]) == samples


def test_differences_say_where() -> None:
    a = sample("off", "1", 3, 1.0, tokens=(5, 6, 7, 8))
    assert first_difference(a, replace(a, arm="auto")) is None
    assert first_difference(a, replace(a, arm="auto", tokens=(5, 6, 9, 8))) == Difference(
        "1", "off", "auto", "token", 2
    )
    assert first_difference(a, replace(a, arm="auto", tokens=(5, 6))) == Difference(
        "1", "off", "auto", "token", 2
    )
    with_text = replace(a, text="abc")
    assert first_difference(with_text, replace(a, arm="url", tokens=None, text="abd")) == Difference(
        "1", "off", "url", "character", 2
    )


def test_acceptance_counts_the_bonus_in_length_and_not_in_rate() -> None:
    # Ten rounds of three drafts, accepting 0, 1, 2, 3 tokens five, two, zero and three times.
    stats = SpeculationStats(
        passes=10,
        drafts=10,
        drafted=30,
        accepted=11,
        accepted_per_position=[5, 3, 3],
        committed=21,
        by_drafter={"ngram": DrafterStats(30, 11)},
    )
    found = acceptance([stats])
    assert (found.passes, found.drafted, found.accepted) == (10, 30, 11)
    assert found.acceptance_rate == pytest.approx(0.3667, abs=1e-4)
    assert found.mean_acceptance_length == 2.1
    assert found.per_position == [0.5, 0.3, 0.3]
    assert (found.drafted_by, found.accepted_by) == ({"ngram": 30}, {"ngram": 11})


def test_chances_are_held_against_what_came_true() -> None:
    """Over two requests: of chances from 0.9 on half came true, of those around a quarter a third."""
    one = DrafterStats(6, 3, {9: Claims(2, 1.9, 1), 2: Claims(1, 0.25, 0)})
    other = DrafterStats(6, 3, {9: Claims(2, 1.86, 1), 2: Claims(2, 0.5, 1)})
    stats = [SpeculationStats(by_drafter={"eagle3": one}), SpeculationStats(by_drafter={"eagle3": other})]
    found = acceptance([*stats, SpeculationStats()]).reliability
    assert list(found) == ["eagle3"]
    low, high = found["eagle3"]
    assert (low.decided, low.predicted, low.accepted) == (3, 0.25, pytest.approx(1 / 3))
    assert (high.decided, high.predicted, high.accepted) == (4, pytest.approx(0.94), 0.5)


def test_acceptance_adds_requests_by_token_not_by_request() -> None:
    long = SpeculationStats(
        passes=90, drafts=1, drafted=2, accepted=2, accepted_per_position=[1, 1], committed=92
    )
    short = SpeculationStats(passes=1, off_reason="nothing pays", committed=1)
    found = acceptance([long, short])
    assert found.mean_acceptance_length == pytest.approx(93 / 91)
    assert found.off_reasons == {"nothing pays": 1}
    assert acceptance([SpeculationStats()]).mean_acceptance_length == 1.0


def test_prefill_speed_leaves_out_cached_tokens_and_silent_servers() -> None:
    samples = [
        sample("a", "1", 1, 1.0, prompt_tokens=100, cached_tokens=60, prefill_s=0.5),
        sample("a", "2", 1, 1.0, prompt_tokens=100, prefill_s=None),
    ]
    assert figures(samples).prefill_tokens_per_s == pytest.approx(80.0)
    assert figures(samples[1:]).prefill_tokens_per_s is None


def test_interval_of_equal_ratios_is_a_point() -> None:
    samples = [
        sample(arm, str(i), 60 * i, s * i) for i in range(1, 9) for arm, s in (("off", 2.0), ("auto", 0.5))
    ]
    found = speed_up(samples, "off", "auto")
    assert found is not None
    assert (found.ratio, found.low, found.high) == (pytest.approx(4.0),) * 3


def test_bootstrap_resamples_prompts() -> None:
    samples = [sample("off", "1", 1, 1.0), sample("off", "2", 1, 1.0)]
    samples += [sample("auto", "1", 1, 1.0), sample("auto", "2", 1, 0.25)]
    found = speed_up(samples, "off", "auto", resamples=4000)
    assert found is not None
    # Two prompts resampled twice: ratio 1 or 4 a quarter of the time each, else 2 / 1.25.
    assert (found.low, found.ratio, found.high) == (
        pytest.approx(1.0),
        pytest.approx(1.6),
        pytest.approx(4.0),
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(0.01, 50), st.floats(0.01, 50)), min_size=2, max_size=30
    )
)
def test_interval_stays_within_the_prompts_own_ratios(rows: list[tuple[int, float, float]]) -> None:
    samples = []
    for i, (tokens, base, fast) in enumerate(rows):
        samples += [sample("off", str(i), tokens, base), sample("auto", str(i), tokens, fast)]
    found = speed_up(samples, "off", "auto", resamples=200)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    top = max(base / fast for _, base, fast in rows)
    assert found.worst * (1 - 1e-9) <= found.low <= found.high <= top * (1 + 1e-9)


def test_summary_compares_with_the_first_arm_only() -> None:
    samples = [sample("off", "1", 10, 2.0), sample("auto", "1", 10, 1.0), sample("off", "2", 10, 2.0)]
    found = summarize(samples, ["off", "auto", "absent"])
    assert list(found.figures) == ["off", "auto"]
    assert found.speed_ups["off"] is not None
    assert found.speed_ups["off"].ratio == 1.0
    assert found.speed_ups["auto"] is not None
    assert found.speed_ups["auto"].ratio == 2.0
