"""Sampling parameters that come from outside: each bad one is refused by name before anything runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.core import SamplingParams
from paceline.errors import RequestError

REFUSED: dict[str, list[Any]] = {
    "temperature": [None, "1", True, [], math.nan, math.inf, -0.1, 100.1],
    "top_k": [None, 1.5, 3.0, "a", True, -2, 2**31],
    "top_p": [None, 0, 1.1, math.nan],
    "min_p": [None, -0.1, 2],
    "seed": [1.5, "x", True, 2**64, -(2**63) - 1],
    "max_tokens": [1.5, "3", True, -1, 2**31],
    "min_tokens": [None, 3.5, -1],
    "stop": [None, 5, b"ab", [1], ["a", None], [b"x"], "", ["a", ""], {"a"}],
    "stop_token_ids": [None, 5, "12", b"12", ["a"], [1.5], [True], [None]],
    "ignore_eos": [None, "yes", 0],
    "presence_penalty": [None, 3, math.nan],
    "frequency_penalty": [None, -3, "1"],
    "repetition_penalty": [None, 0, 101],
    "logit_bias": [
        None,
        [],
        [1],
        {"1": 1},
        {1.5: 1},
        {True: 1},
        {1: None},
        {1: math.inf},
        {1: "a"},
        {1: 2e4},
    ],
    "logprobs": [1.5, -1, 101, True],
    "n": [None, 0, 1.5, 129, "2", True],
    "verification": [None, "x", ["coupled"]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]])
def test_a_value_that_means_nothing_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name}\b") as caught:
        SamplingParams(**{name: value})
    assert caught.value.hint


def test_the_last_of_n_seeds_must_exist_too() -> None:
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(seed=2**64 - 3, n=3).seed == 2**64 - 3
    with pytest.raises(RequestError, match="seed is"):
        SamplingParams(seed=2**64 - 2, n=3)


def test_numpy_numbers_count_as_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([3, 4]),
    )
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 2**64 - 1)
    assert params.stop_token_ids == (3, 4)


def test_what_was_given_as_a_list_can_change_afterwards() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(RequestError, match="'temprature'\nhint: did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1})
