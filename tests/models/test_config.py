"""Metadata: what is read, and that whatever is not understood is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.models.config import DecoderConfig
from paceline.models.registry import ARCHITECTURES, recorder
from support.tiny_models import TinyModel

PLAIN = TinyModel(heads=4, kv_heads=2, head_dim=32, width=128, hidden=256, context=4096).metadata()


def config(**changes: Any) -> DecoderConfig:
    """Of the plain model, with keys replaced; None removes one. Dots are written as __."""
    metadata = dict(PLAIN)
    for name, value in changes.items():
        key = "llama." + name.replace("__", ".")
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return DecoderConfig.from_metadata(metadata)


def test_everything_is_read() -> None:
    got = config(rope__freq_base=5000.0)
    assert got == DecoderConfig(
        architecture="llama",
        layers=2,
        width=128,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=32,
        context_length=4096,
        norm_eps=1e-5,
        rope_base=5000.0,
        rope_dim=32,
        rope_factor=1.0,
    )


def test_what_a_file_may_leave_out() -> None:
    got = config(
        attention__head_count_kv=None,
        attention__key_length=None,
        attention__value_length=None,
        rope__freq_base=None,
    )
    assert (got.kv_heads, got.head_dim, got.rope_dim, got.rope_base) == (4, 32, 32, 10000.0)


def test_a_sliding_window_caps_the_context() -> None:
    assert config(attention__sliding_window=1000).context_length == 1000
    assert config(attention__sliding_window=100000).context_length == 4096


def test_partial_rotary() -> None:
    got = config(rope__dimension_count=16)
    assert got.rope_frequencies() == [10000.0 ** (-i / 8) for i in range(8)]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
        {"rope__scaling__type": "linear", "rope__scale_linear": 4.0},
    ],
    ids=str,
)
def test_linear_scaling_divides_positions(scaling: dict[str, Any]) -> None:
    got = config(**scaling)
    assert got.rope_factor == 4.0
    assert got.rope_frequencies() == [f / 4 for f in config().rope_frequencies()]


def test_llama_3_factors_divide_frequencies() -> None:
    factors = [1.0 + i for i in range(16)]
    plain = config().rope_frequencies()
    assert config().rope_frequencies(factors) == [f / by for f, by in zip(plain, factors, strict=True)]


REFUSED: dict[str, dict[str, Any]] = {
    "attention.scale": {"attention__scale": 0.5},
    "logit_scale": {"logit_scale": 16.0},
    "8 experts": {"expert_count": 8},
    "rope scaling 'yarn'": {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
    "rope scaling 'longrope'": {"rope__scaling__type": "longrope"},
    "different length": {"attention__value_length": 64},
    "width 100": {"embedding_length": 100},
    "head size 24": {"attention__key_length": 24, "attention__value_length": 24},
    "128 heads per": {"attention__head_count": 256},
    "feed_forward_length differs": {"feed_forward_length": [256, 512]},
    "widths 128, 250, 128": {"feed_forward_length": 250},
    "widths 128, 256, 16": {
        "attention__head_count": 1,
        "attention__head_count_kv": 1,
        "attention__key_length": 16,
        "attention__value_length": 16,
    },
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_would_change_the_mathematics_is_refused(named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        config(**REFUSED[named])
    assert named.split("width ")[-1] in str(caught.value)
    assert caught.value.hint


DAMAGED: dict[str, dict[str, Any]] = {
    "embedding_length": {"embedding_length": None},
    "block_count is 0": {"block_count": 0},
    "block_count is True": {"block_count": True},
    "head_count is 2.5": {"attention__head_count": 2.5},
    "context_length is 4294967296": {"context_length": 2**32},
    "context_length is -1": {"context_length": -1},
    "layer_norm_rms_epsilon is None": {"attention__layer_norm_rms_epsilon": None},
    "layer_norm_rms_epsilon is nan": {"attention__layer_norm_rms_epsilon": math.nan},
    "freq_base is -1": {"rope__freq_base": -1.0},
    "factor is 0.0": {"rope__scaling__type": "linear", "rope__scaling__factor": 0.0},
    "3 heads, 2 key-value heads": {"attention__head_count": 3},
    "do not divide": {
        "attention__head_count": 5,
        "attention__head_count_kv": 5,
        "attention__key_length": None,
    },
    "33 of 32 dimensions": {"rope__dimension_count": 33},
    "15 of 32 dimensions": {"rope__dimension_count": 15},
}


@pytest.mark.parametrize("named", DAMAGED)
def test_values_that_make_no_sense_are_damage(named: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        config(**DAMAGED[named])
    assert named in str(caught.value)


def test_a_long_value_is_not_printed_whole() -> None:
    with pytest.raises(ModelFileError) as caught:
        config(block_count="x" * 100_000)
    assert len(str(caught.value)) < 300


values = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 300),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=3),
)
keys = st.sampled_from(
    [*(k for k in PLAIN if k.startswith("llama.")), "llama.rope.scaling.type", "llama.odd"]
)


@given(st.dictionaries(keys, values, max_size=4))
def test_hostile_metadata_is_refused_in_words(changes: dict[str, Any]) -> None:
    metadata = {**PLAIN, **changes}
    try:
        got = DecoderConfig.from_metadata(metadata)
    except PacelineError:
        return
    assert got.heads % got.kv_heads == 0
    assert got.width % 32 == got.hidden % 32 == got.heads * got.head_dim % 32 == 0
    assert all(math.isfinite(f) for f in got.rope_frequencies())


def test_every_architecture_of_the_table_can_be_recorded() -> None:
    for name in ARCHITECTURES:
        assert callable(recorder(name))


def test_an_unknown_architecture_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        recorder("qwen")
    assert "'qwen'" in caught.value.message
    assert "qwen2" in caught.value.hint
