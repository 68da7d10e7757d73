"""The sampler alone: history, bans, logprobs, and what it says of unusable logits."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core import Draft, SamplingParams
from paceline.errors import ModelFileError, RequestError
from paceline.sampling import Sampler, walk

INF = np.inf


def made(
    params: SamplingParams, *, prompt: tuple[int, ...] = (), stops: tuple[int, ...] = (), vocabulary: int = 4
) -> Sampler:
    return Sampler(params, prompt, stops, vocabulary, seed=0)


def greedy(sampler: Sampler, row: list[float]) -> int:
    logits = np.array(row, np.float32)
    return sampler.pick(logits if sampler.needs_logits else None, int(logits.argmax()), 0)


@pytest.mark.parametrize("draft_length", range(9))
def test_frequency_penalty_counts_every_token_of_a_draft(draft_length: int) -> None:
    """A=2, B=1, penalty 0.6 per occurrence: exactly this text, however many tokens one pass commits."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.6)
    sampler = made(params, vocabulary=2)
    expected = [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    tokens: list[int] = []
    while len(tokens) < 12:
        guess = expected[len(tokens) : len(tokens) + draft_length]
        draft = Draft.chain(guess, [0.5] * len(guess), "oracle")
        rows = np.tile(np.array([2.0, 1.0], np.float32), (1 + len(guess), 1))
        before = len(tokens)
        for token, _ in walk(draft, sampler, np.zeros(len(rows), np.int32), rows, len(tokens)):
            tokens.append(token)
        assert len(tokens) - before == len(guess) + 1
    assert tokens[:12] == expected


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("minimum", [0, 1, 5])
def test_min_tokens_counts_tokens_not_passes(minimum: int, draft_length: int) -> None:
    """The stop token is always likeliest: it comes exactly at token minimum + 1."""
    sampler = made(SamplingParams(temperature=0.0, min_tokens=minimum), stops=(3,))
    tokens: list[int] = []
    while 3 not in tokens:
        assert sampler.needs_logits == (len(tokens) < minimum)
        draft = Draft.chain([1] * draft_length, [0.5] * draft_length, "constant")
        rows = np.tile(np.array([0.0, 2.0, 1.0, 9.0], np.float32), (1 + draft_length, 1))
        argmax = rows.argmax(axis=1).astype(np.int32)
        given = rows if sampler.needs_logits else None
        tokens += [token for token, _ in walk(draft, sampler, argmax, given, len(tokens))]
    assert tokens == [1] * minimum + [3]


def test_penalties_see_the_prompt_as_documented() -> None:
    row = [1.0, 0.9, 0.8, -5.0]
    assert greedy(made(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=(0,)), row) == 1
    assert greedy(made(SamplingParams(temperature=0.0, frequency_penalty=2.0), prompt=(0,)), row) == 0
    assert greedy(made(SamplingParams(temperature=0.0, presence_penalty=2.0), prompt=(0,)), row) == 0


def test_presence_counts_once_and_frequency_each_time() -> None:
    row = np.zeros(3, np.float32)
    sampler = made(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), vocabulary=3)
    for token in (1, 1, 1, 2):
        sampler.advance(token)
    weights = np.exp([0.0, -0.5 - 0.75, -0.5 - 0.25])
    np.testing.assert_allclose(sampler.distribution(row), weights / weights.sum(), rtol=1e-6)


def test_repetition_divides_positive_and_multiplies_negative_logits_once() -> None:
    row = np.array([2.0, -2.0, 0.0, 1.0], np.float32)
    sampler = made(SamplingParams(repetition_penalty=2.0), prompt=(0, 0, 1))
    sampler.advance(1)
    weights = np.exp([1.0, -4.0, 0.0, 1.0])
    np.testing.assert_allclose(sampler.distribution(row), weights / weights.sum(), rtol=1e-6)


def test_history_of_many_tokens_is_counted_right() -> None:
    """Past the first growth of the arrays."""
    sampler = made(SamplingParams(frequency_penalty=0.5), vocabulary=300)
    for token in range(300):
        for _ in range(token % 3):
            sampler.advance(token)
    weights = np.exp([-0.5 * (token % 3) for token in range(300)])
    row = np.zeros(300, np.float32)
    np.testing.assert_allclose(sampler.distribution(row), weights / weights.sum(), rtol=1e-5)


def test_bias_moves_the_choice_and_never_writes_to_the_targets_logits() -> None:
    row = np.array([0.0, 5.0, 4.0, 0.0], np.float32)
    row.setflags(write=False)
    banned = made(SamplingParams(temperature=0.0, logit_bias={1: -100.0}))
    assert banned.pick(row, 1, 0) == 2
    tied = made(SamplingParams(temperature=0.0, logit_bias={3: 5.0, 2: 1.0}))
    assert tied.pick(row, 1, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9])
def test_greedy_and_nearly_greedy_choose_the_likeliest(temperature: float) -> None:
    sampler = made(SamplingParams(temperature=temperature, logit_bias={0: 0.0}))
    row = np.array([1.0, 2.0, 2.0 - 1e-6, -INF], np.float32)
    assert [sampler.pick(row, 1, position) for position in range(50)] == [1] * 50


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert greedy(made(SamplingParams(temperature=0.0, logit_bias={3: 1.0})), [0.0, 2.0, 2.0, 1.0]) == 1


def test_greedy_without_processors_needs_no_logits() -> None:
    plain = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2, presence_penalty=0.0)
    assert not made(plain).needs_logits
    assert made(plain).pick(None, 2, 0) == 2
    for needy in (
        SamplingParams(),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, presence_penalty=-0.1),
        SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
    ):
        assert made(needy).needs_logits


def test_equal_seeds_repeat_and_others_differ() -> None:
    row = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)

    def text(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(), (), (), 1000, seed)
        return [sampler.pick(row, 0, position) for position in range(20)]

    assert text(5) == text(5)
    assert len({tuple(text(seed)) for seed in (-(2**63), -1, 0, 1, 5, 2**64 - 2)}) == 6


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0.0, np.nan, 1.0, 0.0], "1 NaN or +inf among 4"),
        ([INF, np.nan, INF, 0.0], "3 NaN or +inf among 4"),
        ([-INF, -INF, -INF, -INF], "-inf for all of 4"),
    ],
)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=2),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
    ],
)
def test_unusable_logits_are_named(row: list[float], words: str, params: SamplingParams) -> None:
    logits = np.array(row, np.float32)
    with pytest.raises(ModelFileError) as caught:
        made(params).pick(logits, 0, 7)
    assert words in caught.value.message
    with pytest.raises(ModelFileError):
        made(params).logprobs(logits, 0)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.99)])
def test_a_token_at_minus_infinity_is_never_sampled(params: SamplingParams) -> None:
    row = np.array([-INF, 0.0, -INF, 1.0], np.float32)
    sampler = made(params)
    assert {sampler.pick(row, 3, position) for position in range(200)} == {1, 3}


def test_min_tokens_that_bans_everything_is_refused() -> None:
    sampler = made(SamplingParams(temperature=0.0, min_tokens=1), stops=(0, 1), vocabulary=2)
    with pytest.raises(RequestError) as caught:
        sampler.pick(np.zeros(2, np.float32), 0, 0)
    assert caught.value.message == "min_tokens bans every one of the 2 tokens"


def test_a_repetition_penalty_that_overflows_is_refused() -> None:
    sampler = made(SamplingParams(repetition_penalty=1e-40), prompt=(0,))
    with pytest.raises(RequestError) as caught:
        sampler.pick(np.array([5.0, 1, 1, 1], np.float32), 0, 0)
    assert caught.value.message == "repetition_penalty 1e-40 takes logits beyond the range of float32"


def test_an_end_token_beyond_the_logits_is_no_obstacle() -> None:
    sampler = made(SamplingParams(temperature=0.0, min_tokens=2), stops=(1, 900))
    assert sampler.pick(np.array([0.0, 5.0, 2.0, 1.0], np.float32), 1, 0) == 2


@pytest.mark.parametrize("token", [-1, 4])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RequestError) as caught:
        made(SamplingParams(logit_bias={token: 1.0}))
    assert caught.value.message == f"logit_bias names token {token}, outside the vocabulary of 4"
    with pytest.raises(RequestError) as caught:
        made(SamplingParams(stop_token_ids=[token]))
    assert caught.value.message == f"stop_token_ids names token {token}, outside the vocabulary of 4"


def test_logprobs_are_those_of_the_raw_row() -> None:
    row = np.array([1.0, 3.0, 3.0, -INF], np.float32)
    sampler = made(SamplingParams(temperature=0.1, top_k=1, logit_bias={0: 50.0}, logprobs=3))
    exact = np.log(np.exp([1.0, 3.0, 3.0]) / np.exp([1.0, 3.0, 3.0]).sum())
    emitted = sampler.logprobs(row, 0)
    assert emitted.token == 0
    assert emitted.logprob == pytest.approx(exact[0], abs=1e-6)
    assert [token for token, _ in emitted.top] == [1, 2, 0]
    assert [value for _, value in emitted.top] == pytest.approx([exact[1], exact[2], exact[0]], abs=1e-6)
    assert sampler.logprobs(row, 3).logprob == -INF


def test_logprobs_sum_to_one_and_the_count_is_capped_by_the_vocabulary() -> None:
    row = np.random.default_rng(1).normal(0, 3, 30).astype(np.float32)
    every = made(SamplingParams(logprobs=50), vocabulary=30).logprobs(row, 4)
    assert len(every.top) == 30
    assert np.exp([value for _, value in every.top]).sum() == pytest.approx(1.0, abs=1e-6)
    assert dict(every.top)[4] == every.logprob
    assert made(SamplingParams(logprobs=0), vocabulary=30).logprobs(row, 4).top == ()
