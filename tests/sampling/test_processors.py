"""Processors against a slow reference in float64, against recorded values of transformers, and on ties."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core import Floats, SamplingParams
from paceline.sampling import Sampler, processors

RECORDED = json.loads((Path(__file__).parent / "recorded" / "processors.json").read_text())


def reference(
    logits: Floats, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]
) -> NDArray[np.float64]:
    """[vocab] probabilities: the definitions of `SamplingParams`, one token at a time."""
    row = [float(x) for x in logits]
    for token in set(prompt) | set(output):
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(output) < params.min_tokens:
        row = [-np.inf if token in stops else x for token, x in enumerate(row)]
    best = max(row)
    if params.temperature == 0:
        return np.eye(len(row))[row.index(best)]
    weight = {token: float(np.exp((x - best) / params.temperature)) for token, x in enumerate(row)}
    order = sorted(weight, key=lambda token: (-row[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, nucleus = sum(weight[token] for token in order), 0.0, []
    for token in order:
        nucleus.append(token)
        mass += weight[token]
        if mass >= params.top_p * total and params.top_p < 1:
            break
    kept = [token for token in nucleus if weight[token] >= params.min_p]
    return np.array([weight[t] if t in kept else 0.0 for t in weight]) / sum(weight[t] for t in kept)


def sampler(params: SamplingParams, prompt: list[int], output: list[int], vocabulary: int) -> Sampler:
    made = Sampler(params, prompt, {1, 3}, vocabulary, seed=0)
    for token in output:
        made.advance(token)
    return made


tokens = st.lists(st.integers(0, 11), max_size=8)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 7, 12, 50]),
    top_p=st.sampled_from([0.05, 0.35, 0.71, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.17, 1.0]),
    min_tokens=st.sampled_from([0, 3]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([-0.6, 0.0, 0.45]),
    presence_penalty=st.sampled_from([-1.1, 0.0, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, -0.7, 1.9]), max_size=3),
)


@given(params, tokens, tokens, st.integers(0, 100_000))
@settings(max_examples=600, deadline=None)
def test_distribution_equals_the_reference(
    params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 12).astype(np.float32)
    expected = reference(logits, params, prompt, output, {1, 3})
    actual = sampler(params, prompt, output, 12).distribution(logits)
    # A token exactly on a boundary may fall either way in float32; the draw of the case then says nothing.
    assume(np.array_equal(expected > 0, actual > 0) or not _on_a_boundary(logits, params, prompt, output))
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    assert actual.sum() == pytest.approx(1.0, abs=1e-12)


def _on_a_boundary(logits: Floats, params: SamplingParams, prompt: list[int], output: list[int]) -> bool:
    """Whether the reference itself changes when top_p or min_p moves by a millionth."""
    supports = set()
    for nudge in (-1e-6, 1e-6):
        top_p = params.top_p + nudge if params.top_p < 1 else 1.0
        min_p = max(params.min_p + nudge, 0.0) if 0 < params.min_p < 1 else params.min_p
        moved = dataclasses.replace(params, top_p=top_p, min_p=min_p)
        supports.add(tuple(reference(logits, moved, prompt, output, {1, 3}) > 0))
    return len(supports) > 1


@given(
    st.integers(2000, 6000),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.sampled_from([0, 5, 300, 2500]),
    st.sampled_from([0.2, 0.9, 0.97, 1.0]),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_large_rows_keep_what_a_full_sort_keeps(
    size: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Past the sizes where narrowing starts; quarter steps make many ties."""
    row = (np.random.default_rng(seed).normal(0, 4, size).round(2) / 0.25).round().astype(np.float32) * 0.25
    order = np.lexsort((np.arange(size), -row))
    if 0 < top_k < size:
        order = order[:top_k]
    weights = np.exp((row[order].astype(np.float64) - row.max()) / temperature)
    reached = np.cumsum(weights) / weights.sum()
    count = len(order) if top_p == 1 else int(np.searchsorted(reached, top_p)) + 1
    assume(count == len(order) or abs(reached[count - 1] - top_p) > 1e-6)
    assume(count < 2 or top_p == 1 or abs(reached[count - 2] - top_p) > 1e-6)
    kept = processors.keep(row, temperature, top_k, top_p, 0.0)
    assert kept.tolist() == sorted(order[:count].tolist())


def test_ties_at_every_boundary_keep_the_lowest_ids() -> None:
    row = np.array([0, 2, 1, 2, 1, 1, 2, 0], np.float32)
    assert processors.keep(row, 1.0, 2, 1.0, 0.0).tolist() == [1, 3]
    assert processors.keep(row, 1.0, 4, 1.0, 0.0).tolist() == [1, 2, 3, 6]
    level = np.zeros(8, np.float32)
    assert processors.keep(level, 1.0, 3, 1.0, 0.0).tolist() == [0, 1, 2]
    assert processors.keep(level, 1.0, 0, 0.5, 0.0).tolist() == [0, 1, 2, 3]
    assert processors.keep(level, 1.0, 0, 0.51, 0.0).tolist() == [0, 1, 2, 3, 4]
    assert processors.keep(level, 1.0, 0, 1.0, 1.0).tolist() == list(range(8))


def test_ties_across_a_large_constant_row_keep_the_lowest_ids() -> None:
    level = np.zeros(5000, np.float32)
    assert processors.keep(level, 1.0, 1700, 1.0, 0.0).tolist() == list(range(1700))
    assert processors.keep(level, 1.0, 0, 0.5, 0.0).tolist() == list(range(2500))


def test_min_p_boundary_is_exact() -> None:
    """The token at exactly min_p times the best stays; the next float32 below goes."""
    half = np.float32(np.log(0.5))
    row = np.array(
        [0.0, half, np.nextafter(half, np.float32(-1)), np.nextafter(half, np.float32(0))], np.float32
    )
    floor = processors.min_p_floor(row, 1.0, 0.5)
    assert float(floor) >= np.log(0.5) > float(np.nextafter(floor, np.float32(-1)))
    kept = set(processors.keep(row, 1.0, 0, 1.0, 0.5).tolist())
    assert kept == {i for i, x in enumerate(row) if float(x) >= np.log(0.5)}


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["name"])
def test_distribution_equals_recorded_transformers(case: Mapping[str, object]) -> None:
    logits = np.array(RECORDED["logits"], np.float32)
    made = Sampler(
        SamplingParams.from_mapping(_keys_as_ids(case["params"])), RECORDED["prompt"], {1, 3}, len(logits), 0
    )
    for token in RECORDED["output"]:
        made.advance(token)
    np.testing.assert_allclose(made.distribution(logits), case["probabilities"], atol=1e-6)


def _keys_as_ids(params: object) -> dict[str, object]:
    """JSON has no integer keys."""
    assert isinstance(params, dict)
    bias = {int(token): value for token, value in params.get("logit_bias", {}).items()}
    return {**params, "logit_bias": bias}
