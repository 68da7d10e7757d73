"""The constraint in the sampling loop, against the steps written out one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core import Draft, SamplingParams
from paceline.errors import RequestError
from paceline.sampling import Sampler, walk
from support.grammars import Listed, allowed

SIZE = 70  # more than two words of a mask
GREEDY = SamplingParams(temperature=0.0)
ROW = np.random.default_rng(7).normal(0, 2, SIZE).astype(np.float32)
ROW.setflags(write=False)


def made(
    params: SamplingParams, *steps: list[int] | None, stops: tuple[int, ...] = (), size: int = SIZE
) -> Sampler:
    return Sampler(params, (), stops, size, 5, Listed(list(steps), size, frozenset(stops)))


def likeliest(row: NDArray[Any], ids: list[int]) -> int:
    return min(ids, key=lambda token: (-row[token], token))


@settings(max_examples=200, deadline=None)
@given(
    ids=st.sets(st.integers(0, SIZE - 1), min_size=1),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 200]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    bias=st.booleans(),
    penalty=st.sampled_from([0.0, 1.5]),
)
def test_the_draw_is_that_of_a_row_without_the_forbidden_tokens(
    ids: set[int], temperature: float, top_k: int, top_p: float, min_p: float, bias: bool, penalty: float
) -> None:
    """The mask comes before the truncations: they see the allowed tokens alone."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logit_bias={3: 2.0, 60: -1.0} if bias else {},
        frequency_penalty=penalty,
    )
    sampler, oracle = made(params, None, sorted(ids)), Sampler(params, (), (), SIZE, 5)
    for each in (sampler, oracle):
        each.advance(9)
    cut = np.where(allowed(Listed([sorted(ids)], SIZE).mask(), SIZE), ROW, np.float32(-np.inf))
    for position in range(12):
        token = sampler.pick(ROW, int(ROW.argmax()), position)
        assert token in ids
        assert token == oracle.pick(cut, int(cut.argmax()), position)
    np.testing.assert_array_equal(sampler.distribution(ROW), oracle.distribution(cut))
    support, shares = sampler.support(ROW)
    assert set(support.tolist()) <= ids or shares[~np.isin(support, sorted(ids))].sum() == 0.0


@settings(max_examples=100, deadline=None)
@given(ids=st.sets(st.integers(0, SIZE - 1), min_size=1), ties=st.booleans())
def test_greedy_takes_the_likeliest_allowed_token_the_lowest_on_a_tie(ids: set[int], ties: bool) -> None:
    row = np.round(ROW / 2) if ties else ROW
    sampler = made(GREEDY, sorted(ids))
    assert sampler.needs_logits
    assert sampler.pick(row, int(row.argmax()), 0) == likeliest(row, sorted(ids))
    np.testing.assert_array_equal(sampler.support(row)[0], [likeliest(row, sorted(ids))])


def test_where_one_token_is_allowed_nothing_else_matters() -> None:
    for params in (GREEDY, SamplingParams(), SamplingParams(top_p=0.1), SamplingParams(min_tokens=9)):
        for token in (0, 31, 32, 63, 64, 69):
            assert made(params, [token]).pick(ROW, int(ROW.argmax()), 3) == token
            assert made(params, [token]).distribution(ROW)[token] == 1.0


def test_none_allows_everything() -> None:
    plain = Sampler(SamplingParams(), (), (), SIZE, 5)
    for position in range(20):
        assert made(SamplingParams(), None).pick(ROW, 0, position) == plain.pick(ROW, 0, position)


def test_ids_beyond_the_mask_are_forbidden() -> None:
    row = np.zeros(100, np.float32)
    row[99] = 9.0
    short = Listed([[3, 40]], 41)
    assert Sampler(GREEDY, (), (), 100, 0, short).pick(row, 99, 0) == 3


def test_logprobs_stay_those_of_the_raw_row() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    assert made(params, [4, 5]).logprobs(ROW, 4) == Sampler(params, (), (), SIZE, 5).logprobs(ROW, 4)


@pytest.mark.parametrize("draft_length", [0, 1, 5])
def test_a_draft_is_checked_under_the_constraint_as_it_moves(draft_length: int) -> None:
    steps: list[list[int] | None] = [[1, 2], [7], None, [40, 41, 42], [69]]
    sampler, plain = made(GREEDY, *steps), int(ROW.argmax())
    expected = [likeliest(ROW, ids) if ids else plain for ids in steps]
    tokens: list[int] = []
    while len(tokens) < len(steps):
        guess = expected[len(tokens) : len(tokens) + draft_length]
        draft = Draft.chain(guess, [1.0] * len(guess), "oracle")
        rows = np.tile(ROW, (1 + len(guess), 1))
        tokens += [
            token for token, _ in walk(draft, sampler, rows.argmax(1).astype(np.int32), rows, len(tokens))
        ]
    assert tokens[: len(steps)] == expected


def test_min_tokens_bans_stops_while_the_constraint_leaves_another_way() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    row = np.zeros(SIZE, np.float32)
    row[69] = 5.0
    sampler = made(params, [1, 69], [1, 69], [1, 69], stops=(69,))
    tokens = []
    for position in range(3):
        tokens.append(sampler.pick(row, 69, position))
        sampler.advance(tokens[-1])
    assert tokens == [1, 1, 69]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_complete_text_ends_whatever_min_tokens_says(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=9)
    assert made(params, [69], stops=(68, 69)).pick(ROW, 0, 0) == 69
    assert made(params, [68, 69], stops=(68, 69)).pick(ROW, 0, 0) in (68, 69)


def test_ignore_eos_and_a_constraint_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="ignore_eos is True"):
        made(SamplingParams(ignore_eos=True), [1])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2)])
def test_a_constraint_that_the_model_cannot_follow_is_an_error(params: SamplingParams) -> None:
    row = ROW.copy()
    row[[2, 3]] = -np.inf
    with pytest.raises(RequestError, match="allows 2 of 70 tokens here, and the model can write none"):
        made(params, [2, 3]).pick(row, int(row.argmax()), 0)
    with pytest.raises(RequestError, match="allows 0 of 70"):
        made(params, []).pick(row, int(row.argmax()), 0)


def test_only_advance_moves_the_constraint() -> None:
    sampler = made(SamplingParams(), [1, 2], [3])
    for position in range(5):
        assert sampler.pick(ROW, 0, position) in (1, 2)
        sampler.support(ROW)
    sampler.advance(2)
    assert sampler.pick(ROW, 0, 5) == 3
