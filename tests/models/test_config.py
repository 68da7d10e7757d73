"""Metadata: what is read, and that whatever is not understood is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.models.architecture import Architecture
from paceline.models.config import DecoderConfig, Experts
from paceline.models.registry import ARCHITECTURES, architecture
from paceline.models.rope import Rope
from support.tiny_models import TinyModel

PLAIN = TinyModel(heads=4, kv_heads=2, head_dim=32, width=128, hidden=256, context=4096).metadata()


def config(**changes: Any) -> DecoderConfig:
    """Of the plain model, with keys replaced; None removes one. Dots are written as __."""
    return config_of("llama", **changes)


def config_of(family: str, **changes: Any) -> DecoderConfig:
    metadata = {key.replace("llama.", f"{family}."): value for key, value in PLAIN.items()}
    metadata["general.architecture"] = family
    for name, value in changes.items():
        key = f"{family}." + name.replace("__", ".")
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
        windows=(0, 0),
        rope=Rope(base=5000.0, dim=32, original=4096),
        local_rope=Rope(base=5000.0, dim=32, original=4096),
        query_scale=1 / math.sqrt(32),
        attention_cap=0.0,
        logit_cap=0.0,
        experts=None,
    )


def test_what_a_file_may_leave_out() -> None:
    got = config(
        attention__head_count_kv=None,
        attention__key_length=None,
        attention__value_length=None,
        rope__freq_base=None,
    )
    assert (got.kv_heads, got.head_dim, got.rope.dim, got.rope.base) == (4, 32, 32, 10000.0)


def test_windows() -> None:
    assert config(attention__sliding_window=1000).windows == (1000, 1000)
    assert config(attention__sliding_window=1000).context_length == 4096
    assert config(attention__sliding_window=4096).windows == (0, 0)
    assert config(attention__sliding_window=0).windows == (0, 0)


def test_a_pattern_leaves_layers_without_a_window() -> None:
    six = {"block_count": 6, "attention__sliding_window": 9}
    assert config_of("gemma2", **six).windows == (9, 0, 9, 0, 9, 0)
    assert config_of("gemma3", **six).windows == (9, 9, 9, 9, 9, 0)
    given = config_of("gemma3", **six, attention__sliding_window_pattern=3)
    assert given.windows == (9, 9, 0, 9, 9, 0)
    listed = [True, False, False, True, True, False]
    assert config(**six, attention__sliding_window_pattern=listed).windows == (9, 0, 0, 9, 9, 0)


def test_layers_with_a_window_may_turn_otherwise() -> None:
    scaled = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    got = config_of("gemma3", **scaled)
    assert got.local_rope == Rope(base=10000.0, dim=32)
    assert (got.rope.base, got.rope.kind, got.rope.factor) == (1e6, "linear", 8.0)
    assert config_of("gemma3", rope__freq_base_swa=5000.0).local_rope.base == 5000.0
    plain = config_of("gemma2", **scaled)
    assert plain.local_rope == plain.rope


def test_scores_are_scaled_by_the_head_size_but_for_the_largest_gemmas() -> None:
    assert config_of("gemma3").query_scale == 1 / math.sqrt(32)
    wide = {"embedding_length": 256}
    assert config_of("gemma3", block_count=62, **wide).query_scale == 1 / math.sqrt(64)
    assert config_of("gemma2", block_count=46, **wide).query_scale == 1 / math.sqrt(64)
    assert config_of("gemma3", attention__scale=0.5, block_count=62).query_scale == 0.5


def test_caps() -> None:
    got = config(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (got.attention_cap, got.logit_cap) == (50.0, 30.0)


def test_experts() -> None:
    eight = {"expert_count": 8, "expert_used_count": 2}
    assert config(**eight).experts == Experts(8, 2, 256, True)
    got = config_of("qwen3moe", **eight, expert_feed_forward_length=96, expert_weights_norm=False)
    assert got.experts == Experts(8, 2, 96, False)
    assert got.hidden == 256
    only = config_of("qwen3moe", **eight, expert_feed_forward_length=96, feed_forward_length=None)
    assert only.hidden == 96
    assert config(expert_count=0).experts is None


def test_partial_rotary() -> None:
    got = config(rope__dimension_count=16)
    assert got.rope.frequencies(4096) == [10000.0 ** (-i / 8) for i in range(8)]


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
    assert got.rope.factor == 4.0
    assert got.rope.frequencies(4096) == [f / 4 for f in config().rope.frequencies(4096)]


def test_every_key_of_yarn_is_read() -> None:
    keys = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 1024,
        "rope__scaling__yarn_beta_fast": 16.0,
        "rope__scaling__yarn_beta_slow": 2.0,
        "rope__scaling__yarn_ext_factor": 1.0,
        "rope__scaling__finetuned": True,
    }
    got = config(**keys).rope
    expected = Rope(
        base=10000.0, dim=32, kind="yarn", factor=4.0, original=1024, beta_fast=16.0, beta_slow=2.0
    )
    assert got == expected
    twice = config(**keys, rope__scaling__attn_factor=2.0).rope
    assert twice.scale == 2.0 * got.scale
    del keys["rope__scaling__factor"]
    assert config(**keys).rope.factor == 4.0  # what the context is longer by


REFUSED: dict[str, dict[str, Any]] = {
    "attention.causal": {"attention__causal": False},
    "logit_scale": {"logit_scale": 16.0},
    "expert_gating_func = 2": {"expert_gating_func": 2},
    "expert_shared_count = 1": {"expert_shared_count": 1},
    "expert_weights_scale = 2.5": {"expert_weights_scale": 2.5},
    "rope scaling 'xpos'": {"rope__scaling__type": "xpos", "rope__scaling__factor": 4.0},
    "yarn_ext_factor = 0.5": {"rope__scaling__yarn_ext_factor": 0.5},
    "yarn_attn_factor = 1.5": {"rope__scaling__yarn_attn_factor": 1.5},
    "yarn_log_multiplier = 0.1": {"rope__scaling__yarn_log_multiplier": 0.1},
    "different length": {"attention__value_length": 64},
    "width 100": {"embedding_length": 100},
    "head size 24": {"attention__key_length": 24, "attention__value_length": 24},
    "128 heads per": {"attention__head_count": 256},
    "feed_forward_length differs": {"feed_forward_length": [256, 512]},
    "widths 128, 250, head size 32": {"feed_forward_length": 250},
    "widths 128, 256, 16, head size 16": {
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


def test_heads_that_are_normalised_come_in_groups_of_32() -> None:
    sizes = {"attention__key_length": 48, "attention__value_length": 48, "rope__dimension_count": 48}
    assert config(**sizes).head_dim == 48
    with pytest.raises(UnsupportedModelError, match="head size 48"):
        config_of("qwen3", **sizes)


DAMAGED: dict[str, dict[str, Any]] = {
    "embedding_length": {"embedding_length": None},
    "block_count is 0": {"block_count": 0},
    "block_count is 2147483647": {"block_count": 2**31 - 1},
    "block_count is True": {"block_count": True},
    "head_count is 2.5": {"attention__head_count": 2.5},
    "context_length is 4294967296": {"context_length": 2**32},
    "key_length is 1048576": {"attention__key_length": 2**20},
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
    "9 of 8 experts": {"expert_count": 8, "expert_used_count": 9},
    "neither true nor false": {"expert_count": 8, "expert_used_count": 2, "expert_weights_norm": 1},
    "sliding_window is -1": {"attention__sliding_window": -1},
    "sliding_window_pattern is [True]": {
        "attention__sliding_window": 9,
        "attention__sliding_window_pattern": [True],
    },
    "rope with base 0.5": {"rope__freq_base": 0.5},
    "trained on 1 positions": {
        "rope__scaling__type": "yarn",
        "rope__scaling__original_context_length": 1,
    },
    "softcapping is -1": {"final_logit_softcapping": -1.0},
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
    st.sampled_from(["linear", "dynamic", "yarn", "longrope"]),
    st.lists(st.integers(0, 9), max_size=3),
)
keys = st.sampled_from(
    [
        *(k for k in PLAIN if k.startswith("llama.")),
        "llama.rope.scaling.type",
        "llama.rope.scaling.original_context_length",
        "llama.attention.sliding_window",
        "llama.attention.sliding_window_pattern",
        "llama.expert_count",
        "llama.odd",
    ]
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
    assert all(math.isfinite(f) for f in got.rope.frequencies(got.context_length))


def test_every_architecture_of_the_table_is_described() -> None:
    for name in ARCHITECTURES:
        assert isinstance(architecture(name), Architecture)


def test_an_unknown_architecture_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        architecture("qwen22")
    assert "'qwen22'" in caught.value.message
    assert "qwen2" in caught.value.hint
